"""Models whose requests are steps of sequences: their slots, the tensors that describe a step, and the kept states."""
