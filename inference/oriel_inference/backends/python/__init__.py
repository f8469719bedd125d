"""Python models (`backend: "python"`), each instance in a process of its own.

frames     both ends: messages and the bytes they travel in
process    the server's end: starts one child, reads and writes its socket, sees it die
session    the server's end: what an instance is to the batcher; restarts its process
backend    the server's end: from a folder with `model.py` to sessions
scripting  the server's end: requests that models make of other models
child      the child: loads the model and executes
runtime    the child: its socket, and who waits for what
pb_*       the child: the names user code imports as `triton_python_backend_utils`
"""
