"""Folders and files that only this server's user may write, so that their content is what the server put there.

A symbolic link, a hard link, or a folder that others may write was not made by this server: writing through it would
change another file, and reading through it would serve unchecked bytes.
"""

import os
import shutil
import stat
from pathlib import Path
from typing import IO


def own_folder(path: Path) -> str:
    """Create the folder unless it exists. Return "" if only this user may write it, otherwise what is wrong with it.

    Write permission for a group of this process is removed: volumes are handed to a pod that way (fsGroup), each time.
    Raises OSError if the folder can neither be created nor read.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a link, not a folder"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this server runs as {os.geteuid()}"
    if not found.st_mode & stat.S_IWOTH and found.st_gid in (os.getegid(), *os.getgroups()):
        path.chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IWGRP)
        found = path.lstat()
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def untouched(folder: Path) -> bool:
    """Return whether all below consists of folders, and files without hard links, of this user; else remove all of it.

    Raises OSError.
    """
    if folder.is_symlink() or any(not _own(found) for found in _below(folder)):
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)  # removes links, never follows them
        return False
    return True


def _below(folder: Path) -> list[os.stat_result]:
    found: list[os.stat_result] = []
    for root, folders, files in os.walk(folder):
        found += [os.lstat(os.path.join(root, name)) for name in (*folders, *files)]
    return found


def _own(found: os.stat_result) -> bool:
    mine = found.st_uid == os.geteuid()
    return mine and (stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1))


def open_new(path: Path) -> int:
    """Return a descriptor of a new, empty file in place of whatever has that name. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def read_own(path: Path, limit: int = -1) -> bytes:
    """Return at most `limit` bytes of a file of this user that has only this name. Raises OSError."""
    with open_own(path) as file:
        return file.read(limit)


def open_own(path: Path) -> IO[bytes]:
    """Open a file of this user that has only this name, to read it. Raises OSError."""
    # Without O_NONBLOCK, opening a named pipe waits for whoever writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and _own(found):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise PermissionError(f"{path.name} is not this server's own")
