"""Measurements of the inference server, for the entry points one folder up."""
