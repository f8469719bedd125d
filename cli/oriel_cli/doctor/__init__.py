"""`oriel doctor`: what an installation needs, each checked by itself. `command` runs the checks and prints findings."""
