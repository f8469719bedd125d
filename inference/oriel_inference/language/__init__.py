"""Language models: sequences of tokens that an engine in a process of its own continues, step by step."""
