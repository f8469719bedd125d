"""A headless Chromium, driven over its pipe (DevTools protocol): what a page loads, shows and does."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--remote-debugging-pipe")
# The browser reads commands from its descriptor 3 and answers on 4.
PLACE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
# The browser's error for a script whose page was left meanwhile.
LEFT = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)
WAIT = """new Promise((done, late) => {
  const end = Date.now() + 30000;
  const look = () => {
    let found = null;
    try { found = %s; } catch (error) { found = null; }
    if (found) done(found); else if (Date.now() > end) late(new Error("waited in vain")); else setTimeout(look, 20);
  };
  look();
})"""


class Page:
    """One tab. requested: the URLs that it requested. complaints: messages of its console and of its content policy."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands = commands
        self._answers = answers
        self._ids = itertools.count(1)
        self._session = ""
        self.requested: list[str] = []
        self.complaints: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol. Raises RuntimeError if the browser refuses it."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == number:
                if "error" in said:
                    raise RuntimeError(said["error"]["message"])
                return said["result"]
            self._note(said)

    def _read(self) -> Any:
        data = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            data += byte
        return json.loads(data)

    def _note(self, event: Any) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))

    def open(self, url: str) -> None:
        self.tell("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited. Raises RuntimeError for an exception that it throws."""
        answer = self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"].get("exception", {}).get("description")))
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Return the value of the expression once it counts as true, on this page or on one that follows it."""
        while True:
            try:
                return self.run(WAIT % condition)
            except RuntimeError as error:
                if str(error) not in LEFT:
                    raise

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first element that the selector finds, once it is there."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.wait(found)
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        x, y = self.run(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({found}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, *, height: int = 1400) -> None:
        size = {"width": 1000, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.tell("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(b64decode(self.tell("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def opened(profile: Path, *flags: str) -> Iterator[Page]:
    """Start a browser with one tab and a profile in the given folder. flags: further ones."""
    assert CHROMIUM is not None
    their_in, commands = os.pipe()
    answers, their_out = os.pipe()
    words = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"]
    placed = [sys.executable, "-c", PLACE, str(their_in), str(their_out)]
    with (
        os.fdopen(commands, "wb", buffering=0) as to_browser,
        os.fdopen(answers, "rb") as from_browser,
        subprocess.Popen([*placed, *words], pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL) as process,
    ):
        os.close(their_in)
        os.close(their_out)
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.kill()
