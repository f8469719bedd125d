"""`oriel doctor` checks an installation, one thing at a time. `command` runs the checks and prints findings."""
