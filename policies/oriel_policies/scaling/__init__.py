"""Decides how many replicas a pool needs so that its calls meet their deadlines. Rules without I/O or clocks.

Entry points, in the order in which a gateway uses them:

    DemandCounter   one per pool and gateway. `arrived` counts every call that wants the pool's capacity, also one that
                    is refused for want of it (then `refused` as well); `queued` and `left_queue` those that wait;
                    `started` and `finished`, or `running`, those in flight; `executed` the service times. `record(now)`
                    returns the gateway's share as a `PoolRecord`, to be published about once a second and at every
                    edge from idle.
    Members         one per pool and gateway. `read(records, now)` takes all published records with their ages (the
                    gateway's own among them); `demand(now)` returns their sum, and whether a record is missing.
    pack, unpack    the bytes of a gateway's records of all its pools.
    Planner         one per pool and gateway. `plan(demand, replicas, now)` returns the wanted number of replicas and
                    whether the pool has to be active. All gateways come to the same result, because they start from
                    the same sum.
    Window          hours of the week with a larger minimum; `scheduled_minimum` of all windows is the planner's
                    `scheduled`.
    ColdStarts      one per pool and gateway: how long a pool without servers takes to get one; with `hold_until` and
                    `worth_holding`, which calls wait for that.
    reported_value  turns the wanted number into the value of an external metric (target 1, AverageValue) that makes a
                    HorizontalPodAutoscaler act in spite of its tolerance.

`now` is monotonic seconds of the process everywhere. Records hold ages and durations only, so that clocks of several
machines never meet. The rules are explained where they stand: `wanted`, `forecast`, `planner`, `members`.
"""
