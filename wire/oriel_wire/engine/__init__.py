"""The asyncio protocols of servers and upstream connections: the only socket code of the data path."""
