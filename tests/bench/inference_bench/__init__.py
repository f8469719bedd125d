"""Oriel's inference server and others under the same load. Commands: `inference_peers.py`, `goodput.py`, one folder up."""
