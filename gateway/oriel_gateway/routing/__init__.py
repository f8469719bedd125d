"""Routing from a request line to the target that serves it: routes, splits and sticky sessions."""
