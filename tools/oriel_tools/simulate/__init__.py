"""`oriel simulate`: replays loads in virtual time by the servers' own rules, and measures the profiles it needs."""
