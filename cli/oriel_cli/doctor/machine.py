"""Checks of this machine: packages, the state folder, open files, ports and who holds them, the clock, certificates."""

import ctypes
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

from oriel_cli.doctor.findings import EXPIRY_WARNING_S, Finding, fail, good, warn
from oriel_cli.errors import CommandFailed
from oriel_cli.probe import get
from oriel_cli.state import state_folder
from oriel_cli.up.plan import PORTS
from oriel_wire.distribution import build, installed_version
from oriel_wire.errors import StartFailed
from oriel_wire.process.process import listen

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

LOOPBACK = "127.0.0.1"
RENEW = "replace both files: they are taken up within a second"
READY = {("gateway", "admin"): "/health/ready", ("logic", "admin"): "/health/ready"}
READY |= {("inference", "http"): "/v2/health/ready"}
ENOUGH_FILES = 4096
# extra -> its package
ENGINES = {"torch": "torch", "forests": "treelite", "openvino-models": "openvino", "language": "openvino_genai"}
EARLIEST_S = 1_767_225_600.0  # 2026: no machine that runs this is older
_TIME_ERROR = 5
_LISTEN = "0A"


def packages() -> Iterator[Finding]:
    """Check the distribution, and that exactly one ONNX Runtime is installed."""
    version = installed_version()
    if version == "unknown":
        yield warn("packages", "oriel-serving is not installed, it runs from a folder", "'make setup' in the checkout")
    else:
        yield good("packages", f"oriel-serving {version}, {build()}")
    from oriel_inference.backends.distributions import check_distributions

    conflict = check_distributions()
    if conflict:
        yield fail("onnx runtime", conflict.partition(";")[0], conflict.partition("; ")[2])
    elif find_spec("onnxruntime") is None:
        fix = "where models run here: pip install 'oriel-serving[cpu]' (or openvino, gpu)"
        yield warn("onnx runtime", "it is not installed: no ONNX model can be served here", fix)
    else:
        yield good("onnx runtime", "one distribution of it is installed")
    for extra, package in ENGINES.items():
        yield good(extra, "installed" if find_spec(package) else f"not installed: pip install 'oriel-serving[{extra}]'")


def state() -> Iterator[Finding]:
    """Check that quotas and copies of policies can be written to the state folder."""
    try:
        folder = state_folder()
        if os.access(folder, os.W_OK):
            yield good("state", f"{folder} can be written")
        else:
            yield fail("state", f"{folder} cannot be written", "give it to this user, or set ORIEL_STATE")
    except CommandFailed as error:
        what, _, fix = str(error).partition(": ")
        yield fail("state", what, fix)


def files() -> Iterator[Finding]:
    """Check how many files, and thereby connections, a process may have open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < ENOUGH_FILES:
        yield warn(
            "open files",
            f"a process may open only {hard}",
            f"raise it: ulimit -Hn {ENOUGH_FILES} or more, or LimitNOFILE=",
        )
    else:
        yield good("open files", "as many as are needed" if hard < 0 else f"a process may open {hard}")


async def ports(host: str = LOOPBACK, default: dict[str, dict[str, int]] = PORTS) -> list[Finding]:
    """Report for each default port: free, held by an Oriel that is ready or not, or by another program."""
    found = []
    for unit, labels in default.items():
        for label, port in labels.items():
            found.append(await _port(host, unit, label, port))
    return found


async def _port(host: str, unit: str, label: str, port: int) -> Finding:
    check = f"port {port}"
    try:
        listen(host, port, f"{unit} {label}").close()
        return good(check, f"free ({unit} {label})")
    except StartFailed as refused:
        pid, name = holder(port)
        if not name:
            fix = f"free it, or move the unit: --{label}-port N"
            return fail(check, f"{refused} ".partition(": ")[0] + " by a process that cannot be seen", fix)
    if name != f"oriel {unit}":
        fix = f"stop it, or move the unit: 'oriel up --{unit}-{label}-port N'"
        return fail(check, f"wanted by {unit} {label}, held by {name} (process {pid})", fix)
    path = READY.get((unit, label))
    answer = await get(host, port, path, timeout_s=3.0) if path else None
    if path and (answer is None or answer.status != 200):
        body = answer.document if answer is not None and isinstance(answer.document, dict) else {}
        why = str(body.get("error") or body.get("reason") or "it does not answer")[:200]
        return fail(check, f"{name} (process {pid}) is not ready: {why}", "its log says more")
    return good(check, f"held by {name} (process {pid}){', ready' if path else ''}")


def holder(port: int) -> tuple[int, str]:
    """Return id and name of the process that listens on `port`; (0, "") if that cannot be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(each) in inodes for each in (process / "fd").iterdir()):
                return int(process.name), _name(process)
    return 0, ""


def _name(process: Path) -> str:
    """`oriel gateway` for one of ours; else the program's name, never its arguments: these may hold secrets."""
    words = (process / "cmdline").read_bytes().split(b"\0")
    for at, word in enumerate(words[:-1]):
        ours = word == b"oriel_cli.main" or word.rpartition(b"/")[2] == b"oriel"
        if ours and words[at + 1].decode("ascii", "replace") in PORTS:
            return f"oriel {words[at + 1].decode()}"
    return (process / "comm").read_text().strip() or "an unnamed program"


def clock(others: dict[str, float], skew_s: float) -> Iterator[Finding]:
    """Compare clocks. others: name -> seconds it is ahead of ours. skew_s: a larger difference is a fault."""
    far = {name: ahead for name, ahead in others.items() if abs(ahead) > skew_s}
    fix = "synchronise it over the network (chrony, systemd-timesyncd): tokens expire by it, with 60 s of tolerance"
    if time() < EARLIEST_S:
        yield fail("clock", "this machine's clock is years behind", fix)
    elif far:
        named = ", ".join(f"{name} is {ahead:+.0f} s" for name, ahead in sorted(far.items()))
        yield fail("clock", f"clocks differ from this machine's: {named}", fix)
    elif _unsynchronised():
        yield warn("clock", "the kernel reports that this clock is not synchronised", fix)
    else:
        known = ", ".join(sorted(others))
        yield good("clock", f"agrees with {known}" if known else "no server was there to compare it with")


def _unsynchronised() -> bool:
    try:
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))) == _TIME_ERROR
    except (AttributeError, OSError):
        return False


def certificates(chain: Path | None, key: Path | None) -> Iterator[Finding]:
    """Check that certificate and key fit together, and how long each certificate of the chain is valid."""
    if chain is None and key is None:
        return
    if chain is None or key is None:
        yield fail("certificate", "a certificate goes with its key", "pass both --tls-cert and --tls-key")
        return
    from cryptography import x509

    from oriel_wire.engine.tls import Certificates

    try:
        found = x509.load_pem_x509_certificates(Certificates(chain, key).pem[0])
    except (StartFailed, ValueError) as error:
        yield fail("certificate", str(error), "put a certificate chain and its key, both as PEM, into these files")
        return
    yield from validity(found)


def validity(chain: "Iterable[Certificate]") -> Iterator[Finding]:
    """Check how long each certificate of a chain is valid."""
    for each in chain:
        name = each.subject.rfc4514_string()[:100] or "a certificate without a name"
        left_s, until = each.not_valid_after_utc.timestamp() - time(), f"{each.not_valid_after_utc:%Y-%m-%d}"
        if left_s <= 0:
            yield fail("certificate", f"{name} expired on {until}", RENEW)
        elif each.not_valid_before_utc.timestamp() > time():
            yield fail("certificate", f"{name} is not valid yet", "wait, or look at this machine's clock")
        elif left_s < EXPIRY_WARNING_S:
            yield warn("certificate", f"{name} expires on {until}", RENEW)
        else:
            yield good("certificate", f"{name} is valid until {until}")
