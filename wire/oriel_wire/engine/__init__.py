"""asyncio protocols and the upstream pool: the only socket code of the data path."""
