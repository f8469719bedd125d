"""The records on the fork server's control socket: `kind u8 | token, pid or length u32 | pid or wait status i32`.

BROKEN is followed by `length` bytes of text: why workers can never be started. It is the last one.
"""

import struct

RECORD = struct.Struct("!BIi")
SPAWN, STARTED, EXITED, BROKEN = 1, 2, 3, 4
