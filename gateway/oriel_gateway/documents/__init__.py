"""Policy documents: their sources, how they are compiled and reloaded, and which are in force."""
