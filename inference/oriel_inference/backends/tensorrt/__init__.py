"""TensorRT plans: the files that TensorRT's builder writes, run by its Python API and by cuda-bindings.

`library` finds the two packages, `device` has memory and streams, `plan` reads what an engine says of itself, `engine`
shares one engine between instances, `context` runs batches, `session` gives each context a thread of its own, and
`backend` is what the rest of the server sees.

Everything here is written against the documented API and was tested against a stand-in of it, not on a GPU.
"""

# The name of the provider in the options of a session, and its options.
PROVIDER = "TensorRT"
GPU_KEY, HOST_CODE_KEY = "device_id", "engine_host_code_allowed"
