"""What only the kernel knows of a connection: that its peer has closed behind bytes which nobody has read yet."""

import asyncio
import socket
import sys

__all__ = ["closed_behind_unread"]

_GONE = (7, 8)  # of tcpi_state: CLOSE, CLOSE_WAIT


def closed_behind_unread(transport: asyncio.Transport) -> bool:
    """Whether the peer of a paused transport has closed; False where it cannot be known (not Linux, not a socket)."""
    if sys.platform != "linux":
        return False
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except (OSError, AttributeError):
        return False
    return bool(info[0] in _GONE)
