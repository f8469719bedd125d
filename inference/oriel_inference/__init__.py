"""The inference server: models behind the v2 protocol.

From the bottom up: `errors`, `clock`, `model` (values) <- `stores`, `repository`, `backends`, `batching`,
`statistics` <- `lifecycle`, `dataplane` <- `servers` <- `app`, which alone puts them together.
"""
