"""`oriel usage`: reads the usage ledger, exports it with prices, and checks that nothing is missing."""
