"""Translates between bytes and messages: HTTP/1.1 heads, the v2 protocol, trace context and request deadlines.

Everything here is a codec without I/O, except `oriel_wire.engine`, the only socket code of the data path, and
`oriel_wire.objects`, the clients of object stores.
"""
