"""Record the outcome of each call: counters, decisions, traces and the access log."""
