"""Models made of models: the graph, what it runs on, and the scheduler that runs it."""
