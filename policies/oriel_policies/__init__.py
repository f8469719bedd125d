"""The rules of the service levels, without I/O, shared by the gateway, the logic server and the inference server."""
