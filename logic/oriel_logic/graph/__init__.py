"""Declared pipelines: a `.toml` file of a services folder names the steps and the data between them.

`document` reads the file, `references` parses references between steps, `plan` decides which steps may run
(pure), `run` runs them.
"""
