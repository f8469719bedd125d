"""The servers that `gateway_sla.py` starts, the promises it judges, and the page it writes."""
