"""Identify callers by API keys and by tokens with their key sets, and check the models that a caller may name."""
