"""Measures inference servers under the same load, for the entry points one folder up."""
