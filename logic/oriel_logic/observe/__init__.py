"""Metrics, stages of a request, and the watchdog of the event loop."""
