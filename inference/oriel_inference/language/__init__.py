"""Language models (`backend: "language"`). The tokenizer and the engine of a model run in a process of their own.

engine     the child: the interface of an engine, and the values that go in and come out
openvino   the child: openvino-genai behind this interface
gguf, vocabulary  the child: facts of a model that the engine does not report in the form that is needed
double     the child: a deterministic engine for tests, without a model
child      the child: takes commands, steps, and reports each step
messages   both sides: the messages they exchange
prefixes   the child: which beginnings of prompts are cached, as far as is known
sampling, guides  the server: reads and bounds the sampling parameters of a request
text       the server: makes text of tokens, and finds stop strings
generation the server: one answer: its tokens, and the responses that they make
order      the server: decides which generations are in the next step; step_times has what it learns
scheduler  the server: leads calls through the steps
decoder    the server: starts, watches and restarts the process; hands its reports on
backend    the server: opens the model of a folder
"""
