"""`oriel top`: the console's snapshot in the terminal, once a second."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Final

from oriel_cli import state
from oriel_cli.admin import TOKEN, token_headers
from oriel_cli.errors import CommandFailed
from oriel_cli.watch.top_screen import SORTS, draw
from oriel_wire.process.flags import split_url

SILENCE_S: Final = 30.0  # a stream that brings nothing for so long is lost: it has a comment every 15 s
MAX_EVENT: Final = 256 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `top`."""
    parser.add_argument("--admin-port", type=int, metavar="N", help="which gateway of this machine, by its admin port")
    parser.add_argument("--url", metavar="URL", help=f"admin port of a gateway elsewhere; the token comes from {TOKEN}")
    parser.add_argument("--once", action="store_true", help="print one snapshot and end")
    parser.add_argument("--json", action="store_true", help="print snapshots as lines of JSON")
    parser.add_argument(
        "--sort", choices=list(SORTS.values()), default="importance", help="order of the rows (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Show snapshots until `q`; return 0. Raises CommandFailed."""
    base = _base(args)
    sort = next(key for key, name in SORTS.items() if name == args.sort)
    if args.json or args.once or not sys.stdout.isatty():
        return asyncio.run(_print(base, as_json=args.json, once=args.once, sort=sort))
    return asyncio.run(_show(base, sort))


def _base(args: argparse.Namespace) -> str:
    if args.url:
        parts = split_url(args.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandFailed("--url takes the address of an admin port, like http://127.0.0.1:8082")
        return str(args.url).rstrip("/")
    return f"http://127.0.0.1:{state.admin_port(args.admin_port)}"


async def snapshots(base: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the snapshots of the gateway with its admin port at `base`. Raises CommandFailed when there are no more."""
    import httpx

    headers = dict(token_headers())
    try:
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=SILENCE_S), trust_env=False) as client,
            client.stream("GET", f"{base}/console/live", headers=headers) as answer,
        ):
            if answer.status_code == 401:
                raise CommandFailed(f"the gateway asks for its admin token: put it into {TOKEN}")
            if answer.status_code == 503:
                raise CommandFailed("the gateway has as many console viewers as it allows: close one of them")
            if answer.status_code != 200:
                raise CommandFailed(f"there is no console at {base}: it answered {answer.status_code}")
            kept = ""
            async for text in answer.aiter_text():
                *events, kept = (kept + text).split("\n\n")
                if len(kept) > MAX_EVENT:
                    raise CommandFailed(f"there is no console at {base}")
                for event in events:
                    if event.startswith("data: "):
                        yield json.loads(event[6:])
    except httpx.HTTPError as error:
        raise CommandFailed(f"no gateway answers at {base} ({type(error).__name__})") from error
    raise CommandFailed(f"the gateway at {base} has stopped: run the command again when it is back")


async def _print(base: str, *, as_json: bool, once: bool, sort: str) -> int:
    async with contextlib.aclosing(snapshots(base)) as found:
        async for snapshot in found:
            width = shutil.get_terminal_size().columns
            lines = [json.dumps(snapshot)] if as_json else draw(snapshot, sort=sort, colour=_colour(), width=width)
            print("\n".join(lines), flush=True)
            if once:
                return 0
            if not as_json:
                print()
    return 0


async def _show(base: str, sort: str) -> int:
    """Draw each snapshot over the one before; the keys of `SORTS` choose the order, p pauses, q ends."""
    chosen = {"sort": sort, "paused": False}
    latest: dict[str, Any] = {}
    over = asyncio.Event()

    def paint() -> None:
        if not latest:
            return
        columns, height = shutil.get_terminal_size()
        note = "paused" if chosen["paused"] else f"by {SORTS[str(chosen['sort'])]}"
        order = str(chosen["sort"])
        lines = draw(latest, sort=order, colour=_colour(), width=columns, height=height - 2, note=note)
        hint = "  ".join(f"{key} {name}" for key, name in SORTS.items()) + "  p pause  q quit"
        screen = "".join(f"{line}\x1b[K\r\n" for line in lines)
        print(f"\x1b[H{screen}\x1b[K\r\n{hint[:columns]}\x1b[K\x1b[J", end="", flush=True)

    def key(text: str) -> None:
        if text in SORTS:
            chosen["sort"] = text
        elif text == "p":
            chosen["paused"] = not chosen["paused"]
        elif text in ("q", "\x03", "\x04"):
            over.set()
        paint()

    async def follow() -> None:
        async with contextlib.aclosing(snapshots(base)) as found:
            async for snapshot in found:
                if not chosen["paused"]:
                    latest.clear()
                    latest.update(snapshot)
                    paint()

    with _terminal(key):
        following = asyncio.create_task(follow())
        ending = asyncio.create_task(over.wait())
        await asyncio.wait((following, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if following.done():
            following.result()
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, CommandFailed):
            await following
    return 0


def _colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def _terminal(key: Callable[[str], None]) -> Iterator[None]:
    """Use the terminal's other screen, and call `key` with each key; afterwards everything is as before."""
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin) if sys.stdin.isatty() else None
    loop = asyncio.get_running_loop()
    print("\x1b[?1049h\x1b[?25l", end="", flush=True)
    try:
        if before is not None:
            tty.setcbreak(stdin)
            loop.add_reader(stdin, lambda: key(os.read(stdin, 1).decode("ascii", "replace")))
        yield
    finally:
        if before is not None:
            loop.remove_reader(stdin)
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        print("\x1b[?25h\x1b[?1049l", end="", flush=True)
