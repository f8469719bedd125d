"""Runs a command of this checkout with compiled modules, if those in build/run were compiled from these sources.

    PYTHON requirements/run.py COMMAND...      as `make run` does

Otherwise the command runs in pure Python. If nothing was compiled yet and there is a C compiler, a process of low
priority compiles meanwhile, in an environment of its own. It outlives the command, because few runs take as long. Its
result becomes build/run as a whole. The file build/run/.sources is the checksum of the sources that were compiled, or
empty if they could not be compiled.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

PACKAGES = [f"{unit}/oriel_{unit}" for unit in ("wire", "policies", "gateway", "logic", "inference", "cli", "tools")]
OTHERS = ("pyproject.toml", "hatch_build.py", "requirements/image-build.txt")
COMPILED, LOG = Path("build/run"), Path("build/run.log")
SOURCES = COMPILED / ".sources"


def checksum() -> str:
    """Return the checksum of all files that go into the wheel or say how it is made, and of this Python's version."""
    whole = hashlib.sha256(sys.version.encode())
    inside = [each for name in PACKAGES for each in Path(name).rglob("*") if each.parent.name != "__pycache__"]
    for path in sorted([*map(Path, OTHERS), *inside]):
        if path.is_file():
            whole.update(b"%b\0%b" % (bytes(path), hashlib.sha256(path.read_bytes()).digest()))
    return whole.hexdigest()


def say(text: str) -> None:
    """Write one line to the terminal."""
    sys.stderr.write(f"oriel: {text}\n")


def compile_sources() -> None:
    """Compile the sources as they are now into build/run. If one is edited meanwhile, the next run compiles again."""
    os.nice(19)
    sources, parts, made = checksum(), Path("build/run.parts"), Path("build/run.parts/made")
    shutil.rmtree(parts, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        environment = {**os.environ, "VENV": "build/compiler", "PYTHON": sys.executable, "ORIEL_COMPILE": "1"}
        subprocess.run(["requirements/install", "image-build.txt"], check=True, env=environment)
        build = ("build/compiler/bin/python", "-m", "hatchling", "build", "-t", "wheel", "-d", str(parts))
        subprocess.run(build, check=True, env=environment)
        (wheel,) = parts.glob("*.whl")
        ZipFile(wheel).extractall(made)
        shutil.rmtree(made / "oriel_cli" / "_demo")  # the checkout's own files, which may be edited, are served
    except (subprocess.CalledProcessError, OSError) as failed:
        say(str(failed))
        sources = ""
    if sources in ("", checksum()):
        (made / SOURCES.name).write_text(sources)
        made.rename(COMPILED)
    shutil.rmtree(parts)


def start_compiling() -> str:
    """Compile in the background, unless another run does so. Returns what to say about it."""
    try:
        COMPILED.parent.mkdir(exist_ok=True)
        lock = open("build/run.lock", "w")  # free again when the process that compiles has ended
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log = LOG.open("w")
    except BlockingIOError:
        return f"another `make run` has the checkout compiled ({LOG}), and later ones will be faster"
    except OSError as error:
        return f"the checkout cannot be compiled here: {error}"
    command = [sys.executable, __file__, "--compile"]
    # Ctrl-C is for the command only, hence a session of its own.
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock.fileno()], start_new_session=True
    )
    return (
        "the checkout is compiled in the background, once, for faster runs later: minutes at low priority, also after "
        f"Ctrl-C ({LOG}; `kill -- -{child.pid}` stops it)"
    )


def main() -> None:
    if sys.argv[1] == "--compile":
        compile_sources()
        return
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    sources = SOURCES.read_text() if SOURCES.exists() else None
    if sources and sources == checksum():
        say(f"compiled from these sources ({COMPILED})")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(COMPILED.resolve()), os.getenv("PYTHONPATH"))))
        os.execvp(sys.argv[1], sys.argv[1:])
    if sources:
        reason = f"the sources, or the Python, changed after they were compiled; `rm -r {COMPILED}` has it done again"
    elif sources == "":
        reason = f"compiling failed ({LOG}); `rm -r {COMPILED}` lets the next run try again"
    elif shutil.which(compiler):
        reason = start_compiling()
    else:
        reason = f"with a C compiler ({compiler}) the checkout would be compiled for faster runs later"
    say(f"pure Python: {reason}")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
