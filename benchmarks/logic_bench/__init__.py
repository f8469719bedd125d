"""Measurements of the logic server, for the entry points one folder up."""
