"""What the benches of the logic server share: the same service in other frameworks, and the load on it."""
