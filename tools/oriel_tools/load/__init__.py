"""`oriel load`: an open-loop generator.

arrivals, histogram, tally, lag   pure: schedule of arrivals, counters, the rule for quoting a phase
scenario, bodies                  the requests, as values and as bytes
pacer, senders, generator         the loops: wake on time, send, gather
report, chart, plot, command      the report, its page, and the command itself
"""
