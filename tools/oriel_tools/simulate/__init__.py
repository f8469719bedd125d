"""`oriel simulate`: replays loads in virtual time, compares scaling policies, and packs services into nodes."""
