"""Python models (`backend: "python"`). Each instance runs in its own process.

messages   both sides: the messages they exchange
frames     both sides: how messages are encoded as bytes
process    the server: starts one child, reads and writes its socket, notices its end
executions the server: the batches that one process works on
model_metrics the server: the metrics that models define
session    the server: one instance as the batcher sees it; restarts its process
environments the server: finds the interpreters of models
backend    the server: opens a folder with `model.py` as sessions
child      the child: loads the model and executes it
runtime    the child: its sockets, and which request waits for what
pb_*       the child: the names that user code imports as `triton_python_backend_utils`
"""
