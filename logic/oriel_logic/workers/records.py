"""The records on the fork server's control socket: `kind u8 | token or pid u32 | pid or wait status i32`."""

import struct

__all__ = ["EXITED", "RECORD", "SPAWN", "STARTED"]

RECORD = struct.Struct("!BIi")
SPAWN, STARTED, EXITED = 1, 2, 3
