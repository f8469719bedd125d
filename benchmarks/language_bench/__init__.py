"""Measurements of language models, for the entry point one folder up."""
