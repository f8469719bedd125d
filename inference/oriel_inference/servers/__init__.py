"""The v2 protocol over HTTP and gRPC, and the metrics port. Only these files know status codes."""
