"""Connections of clients: read requests over HTTP/1.1 and gRPC, judge their heads, and hand them to `call`."""
