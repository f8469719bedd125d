"""Models whose requests are steps of sequences: who holds which slot, what the model is told, what is kept for it."""
