"""One call from its authorised head to its last byte: its states, its attempts, and its bytes over HTTP and gRPC."""
