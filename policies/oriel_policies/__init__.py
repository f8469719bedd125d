"""What was promised, and what follows from it: pure rules without I/O, shared by the gateway and the batcher."""
