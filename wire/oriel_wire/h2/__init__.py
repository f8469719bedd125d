"""HTTP/2 without I/O (RFC 9113, RFC 7541): frames, header compression, streams and connections of both roles.

No push, no priorities, no Upgrade from HTTP/1.1.
"""
