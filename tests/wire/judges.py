"""Runs programs that judge our HTTP/2 and were not written here. Tests of those that are not installed are skipped."""

import asyncio
import os
import shutil

import pytest


def needed(program: str) -> str:
    """The program, if it is installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    return program


async def run(*command: str, **environment: str) -> str:
    """Return what a program writes; it has to succeed. environment: variables beside this process's own."""
    process = await asyncio.create_subprocess_exec(
        needed(command[0]),
        *command[1:],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()
