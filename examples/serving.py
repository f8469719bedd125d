"""Runs `oriel up` for a demo that has a model of its own, and prints the commands that try it."""

import json
import signal
import subprocess
import sys
from pathlib import Path


def serve(words: list[str], *, policies: Path, services: Path, models: Path, to_try: str) -> int:
    """Serve until Ctrl-C or SIGTERM, or end at once if a model cannot be loaded. Return the exit status.

    words: further flags of `oriel up`. policies, services, models: its folders. to_try: text that is printed once all
    is ready; `{gateway}` and `{admin}` in it become the addresses of the gateway's ports.
    """
    command = [sys.executable, "-P", "-m", "oriel_cli.main", "up", "--json", *words]
    command += ["--policies", str(policies), "--services", str(services), "--model-repository", str(models)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to both
        signal.signal(signal.SIGTERM, lambda *_: up.terminate())
        assert up.stdout is not None
        line = up.stdout.readline()
        if line:
            ready = json.loads(line)
            failed = [model for model in ready["models"] if model["state"] != "READY"]
            if failed:
                print(f"oriel: the demo's model is not ready: {failed[0].get('reason')}", file=sys.stderr)
                up.terminate()
                return up.wait() or 1
            units = {unit["unit"]: unit["addresses"] for unit in ready["units"]}
            print(to_try.format(gateway=units["gateway"]["http"], admin=units["gateway"]["admin"]), flush=True)
        return up.wait()
