"""Bytes <-> messages: HTTP/1.1 heads, the v2 protocol, trace context and the deadline every request carries.

Everything here is a codec without I/O, except `oriel_wire.engine`, the only socket code of the data path.
"""
