"""Inference servers under the same load. Commands: `inference_peers.py` and `goodput.py`, one folder up."""
