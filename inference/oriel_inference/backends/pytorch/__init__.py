"""PyTorch programs (`backend: "pytorch"`). Each model runs in a process of its own, which all its instances share.

form       the server: which kind of program a file is, read from its directory of contents, without PyTorch
process    the server: opens files as sessions; starts the process of a model, and notices its end
lane       both sides: one batch at a time in shared memory
names      the child: which argument or result of the program a tensor of the configuration stands for
programs   the child: loads and calls the programs of each form
child      the child: its main thread, and one thread for each lane
"""
