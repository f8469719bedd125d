"""From `config.pbtxt` and a model file to a `ModelSpec`: parse, validate, complete, check against the file."""
