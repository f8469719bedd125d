"""Python models (`backend: "python"`), each instance in a process of its own.

messages   both ends: what they say to one another
frames     both ends: the bytes of it
process    the server's end: starts one child, reads and writes its socket, sees it die
executions the server's end: the batches one process works on
session    the server's end: what an instance is to the batcher; restarts its process
backend    the server's end: from a folder with `model.py` to sessions
child      the child: loads the model and executes
runtime    the child: its socket, and who waits for what
pb_*       the child: the names user code imports as `triton_python_backend_utils`
"""
