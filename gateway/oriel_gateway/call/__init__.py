"""A call on its way through the gateway: `lifecycle` has its states, and these end it:

| what ends it | outcome |
|---|---|
| `response` or `response_data` with the last byte | answered, whatever the status |
| `client_left` | client_left |
| `expired`: the deadline passed, or a stream was silent or lasted too long | deadline_exceeded, upstream_unreachable |
| `displaced`: another call took its place in the full queue, or its bytes | displaced |
| `failed`: no answer, or no more of it, and nothing left to try (`call.attempts`) | upstream_* |
| `stopping`: the gateway ends and the call has been sent to nobody | server_stopping |
| `refuse` by its pool, its limits or its route | as they report it |

Exactly one of these ends a call, through `Lifecycle.finish`, which gives everything back. The permit is given back at
the upstream's last byte, or for a slot at the first byte of a stream (`pools.stream_slots`). Bytes that the client has
not read are buffered in its transport, whose high-water mark pauses the upstream.
"""
