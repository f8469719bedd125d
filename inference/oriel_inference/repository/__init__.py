"""Turns `config.pbtxt` and a model file into a `ModelSpec`: parse, validate, complete, check against the file."""
