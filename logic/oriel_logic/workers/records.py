"""The records on the fork server's control socket: `kind u8 | token, pid or length u32 | pid or wait status i32`.

BROKEN is followed by `length` bytes of text: why no worker can be started, ever. It is the last one.
"""

import struct

__all__ = ["BROKEN", "EXITED", "RECORD", "SPAWN", "STARTED"]

RECORD = struct.Struct("!BIi")
SPAWN, STARTED, EXITED, BROKEN = 1, 2, 3, 4
