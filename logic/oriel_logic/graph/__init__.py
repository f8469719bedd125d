"""Pipelines that are declared: a `.toml` file of a services folder says which steps there are and what flows where.

`document` reads the file, `references` its little language, `plan` what may run when (pure), `run` runs it.
"""
