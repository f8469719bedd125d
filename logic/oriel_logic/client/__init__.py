"""Clients of inference servers: calls to models, for handlers and pipelines."""
