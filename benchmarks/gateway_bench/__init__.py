"""Measurements of the gateway, for the entry points one folder up."""
