"""Runs programs that judge our HTTP/2 and were not written here. Tests of those that are not installed are skipped."""

import asyncio
import shutil

import pytest


async def run(*command: str) -> str:
    """What a program writes; it has to succeed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()
