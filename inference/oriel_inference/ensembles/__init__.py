"""Models made of models: the graph, the models it runs on, and the scheduler that runs it."""
