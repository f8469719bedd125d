"""What only the kernel knows of a connection, or does for it.

That its peer has closed behind bytes which nobody has read yet; how much of an answer it takes that it cannot send yet.
"""

import asyncio
import socket
import sys

__all__ = ["UNSENT_BYTES", "closed_behind_unread", "take_little"]

UNSENT_BYTES = 128 << 10
_GONE = (7, 8)  # of tcpi_state: CLOSE, CLOSE_WAIT


def take_little(listening: socket.socket) -> None:
    """Have the kernel take at most UNSENT_BYTES of an answer beyond what is on its way, for all who connect here.

    By itself it takes 4 MiB for a client that reads nothing: on no budget, and copied for nobody. What is on its way
    does not count, so a distant client's answer is no slower. Does nothing where that is not known (not Linux, macOS).
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None and listening.family in (socket.AF_INET, socket.AF_INET6):
        listening.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)  # connections have it of their listener


def closed_behind_unread(transport: asyncio.Transport) -> bool:
    """Whether the peer of a paused transport has closed; False where it cannot be known (not Linux, not a socket)."""
    if sys.platform != "linux":
        return False
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except (OSError, AttributeError):
        return False
    return bool(info[0] in _GONE)
