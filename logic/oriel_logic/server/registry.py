"""The services of this server, and the release that each request gets.

The version of a request is chosen by its id and the service's name, so a retry, or the same request at another replica,
gets the same version, independently of how a gateway has split the same ids before.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from oriel_logic.errors import LogicError, ServiceBroken, ServiceUnknown
from oriel_logic.loading.sources import HandlerFile, natural
from oriel_logic.server.releases import Release
from oriel_logic.services.definition import Definition
from oriel_policies.documents.promises import fits
from oriel_wire.near_names import did_you_mean

_log = logging.getLogger(__name__)


class Shares:
    """Divides requests between versions by weight.

    weights: version -> share, in any unit; versions with 0 are used only by name. At least one is above 0.
    only: the version that gets all requests, "" if there are several.
    """

    __slots__ = ("_bounds", "_salt", "_versions", "only", "weights")

    def __init__(self, service: str, weights: Mapping[str, int]) -> None:
        self._salt = blake2b(service.encode(), digest_size=16).digest()
        self._versions: list[str] = []
        self._bounds: list[int] = []
        total = 0
        for version, weight in sorted(weights.items()):
            if weight > 0:
                total += weight
                self._versions.append(version)
                self._bounds.append(total)
        if not self._versions:
            raise ValueError("no version has a share")
        self.weights = {version: weight for version, weight in weights.items() if weight > 0}
        self.only = self._versions[0] if len(self._versions) == 1 else ""

    def pick(self, key: str) -> str:
        """Return the version for this request id; the same one every time."""
        if self.only:
            return self.only
        digest = blake2b(key.encode("utf-8", "replace"), digest_size=8, salt=self._salt).digest()
        place = int.from_bytes(digest) * self._bounds[-1] >> 64
        return self._versions[bisect_right(self._bounds, place)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a file's newest state is not served: "" while it is being set up. at: the time when it failed or
    began.
    """

    file: HandlerFile
    problem: str
    at: str


class Service:
    """One name: its releases by version, their shares of requests that name no version, and failures.

    `only`: the release of every such request if there is just one; otherwise `shares` decides.
    """

    __slots__ = ("failures", "name", "numbers", "only", "releases", "shares", "weights")

    def __init__(self, name: str) -> None:
        self.name = name
        self.releases: dict[str, Release] = {}
        self.failures: dict[HandlerFile, Failure] = {}
        self.weights: Mapping[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.only: Release | None = None
        self.shares: Shares | None = None

    def share(self) -> None:
        """Compute the shares; called after every change."""
        weighted = {version: self.weights.get(version, 0) for version in self.releases}
        if not any(weighted.values()):  # no weights, or none for the versions that exist: the newest
            weighted = dict.fromkeys(self.releases, 0)
            if weighted:
                weighted[max(weighted, key=natural)] = 1
        self.shares = Shares(self.name, weighted) if weighted else None
        self.only = self.releases[self.shares.only] if self.shares is not None and self.shares.only else None

    @property
    def is_empty(self) -> bool:
        """Return whether the service has neither versions nor failures, at most weights for versions that may come."""
        return not (self.releases or self.failures)

    def refusal(self, version: str) -> LogicError:
        """Return the error for a request that no release can answer."""
        if self.is_empty:
            return ServiceUnknown(f"there is no service '{self.name}'")
        if version and self.releases:
            versions = ", ".join(sorted(self.releases, key=natural)[:16])
            if not any(file.version == version for file in self.failures):
                return ServiceUnknown(f"the service '{self.name}' has no version {version[:64]!r}, it has {versions}")
            return ServiceBroken(f"version {version[:64]!r} of the service '{self.name}' cannot run")
        if not any(failure.problem for failure in self.failures.values()):
            return ServiceBroken(f"the service '{self.name}' is being set up: try again later", retry_after_s=1.0)
        return ServiceBroken(f"the service '{self.name}' cannot run: GET /v1/services on the logic server says why")


class Registry:
    """The services of this server. Single writer: the loop.

    on_change: called with file, service name and problem when a service begins to take requests (problem "") or cannot.
    """

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self.on_change: Callable[[HandlerFile, str, str], None] = lambda file, name, problem: None

    def find(self, name: str, version: str = "", key: str = "", patterns: str | None = None) -> Release:
        """Return the release for a request.

        version: "" to choose one by the weights and `key`, the request's id.
        patterns: name patterns of the services whose names the caller may know, separated by commas; None for all.
        Raises ServiceUnknown or ServiceBroken.
        """
        service = self._services.get(name)
        if service is None:
            near = did_you_mean(name, (each for each in self._services if patterns is None or allows(patterns, each)))
            raise ServiceUnknown(f"there is no service {name[:128]!r}{near or ': GET /v1/services lists them'}")
        found = service.only
        if version:
            found = service.releases.get(version)
        elif found is None and service.shares is not None:
            found = service.releases[service.shares.pick(key)]
        if found is None:
            raise service.refusal(version)
        return found

    def definitions(self) -> list[Definition]:
        """Return the definition of the newest version of each service that can run, sorted by name."""
        able = [service for _, service in sorted(self._services.items()) if service.releases]
        return [each.releases[max(each.releases, key=natural)].definition for each in able]

    def releases(self) -> list[Release]:
        """Return all releases that take requests."""
        return [release for service in self._services.values() for release in service.releases.values()]

    @property
    def failed_files(self) -> int:
        """The number of files whose newest state is not served."""
        failures = [each for service in self._services.values() for each in service.failures.values()]
        return len({each.file.origin for each in failures if each.problem})

    def name_of(self, origin: str) -> str:
        """Return the first service that is, or should be, made from the file at `origin`; "" if there is none."""
        for name, service in sorted(self._services.items()):
            files = [*(each.file for each in service.releases.values()), *service.failures]
            if any(file.origin == origin for file in files):
                return name
        return ""

    def holder(self, name: str, version: str) -> Release | None:
        """Return the release that serves this name and version now."""
        service = self._services.get(name)
        return service.releases.get(version) if service is not None else None

    # Methods for the code that sets services up --------------------------------------------------------------------

    def publish(self, origin: str, releases: Iterable[Release]) -> list[Release]:
        """Let the releases of the file at `origin` take requests, and return those they replace, which are retired.

        A release of that origin without a successor is retired too.
        """
        new = list(releases)
        gone = [each for each in self.releases() if each.file.origin == origin]
        for old in gone:
            del self._services[old.name].releases[old.version]
        self._forgive(origin)
        for release in new:
            service = self._services.setdefault(release.name, Service(release.name))
            number = service.numbers[release.version] = service.numbers.get(release.version, 0) + 1
            release.number = number
            service.releases[release.version] = release
        self._settle()
        for old in gone:
            old.retire()
        for release in new:
            self.on_change(release.file, release.name, "")
        return gone

    def withdraw(self, origin: str) -> list[Release]:
        """Retire the releases of a file that was removed, and return them."""
        return self.publish(origin, ())

    def fail(self, file: HandlerFile, name: str, problem: str) -> None:
        """Record and log that the new state of `file` cannot be served; the current release goes on."""
        problem = problem.encode(errors="backslashreplace").decode()  # it may quote text that is not valid UTF-8
        self._forgive(file.origin, lambda failure: not failure.problem)
        service = self._note(file, name, problem)
        goes_on = service.releases.get(file.version)
        kept = f"; release {goes_on.number} goes on serving" if goes_on is not None else ""
        _log.error("services: '%s' (%s) cannot run: %s%s", service.name, file.label, problem, kept)
        self.on_change(file, service.name, problem)

    def expect(self, file: HandlerFile, name: str) -> None:
        """Record that the new state of `file` is being set up, and forget its earlier failures."""
        self._forgive(file.origin)
        self._note(file, name, "")

    def _note(self, file: HandlerFile, name: str, problem: str) -> Service:
        service = self._services.setdefault(name or file.name, Service(name or file.name))
        for known in [each for each in service.failures if each.origin == file.origin]:
            del service.failures[known]
        at = datetime.now(UTC).isoformat(timespec="seconds")
        service.failures[file] = Failure(file=file, problem=problem, at=at)
        return service

    def break_down(self, release: Release, problem: str) -> None:
        """Take a published release out of service because it does not work."""
        service = self._services[release.name]
        if service.releases.get(release.version) is release:
            del service.releases[release.version]
            service.share()
            release.retire()
            self.fail(release.file, release.name, problem)

    def weigh(self, name: str, weights: Mapping[str, int]) -> None:
        """Set the shares of the versions in requests that name no version."""
        service = self._services.setdefault(name, Service(name))
        service.weights = dict(weights)
        self._settle()

    def _forgive(self, origin: str, which: Callable[[Failure], bool] = lambda failure: True) -> None:
        for service in self._services.values():
            for file, failure in list(service.failures.items()):
                if file.origin == origin and which(failure):
                    del service.failures[file]

    def _settle(self) -> None:
        for service in self._services.values():
            service.share()
        for name in [name for name, each in self._services.items() if each.is_empty and not each.weights]:
            del self._services[name]

    # Reports for GET /v1/services ----------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """Describe each service: name, file, state, version, release, description, and model, problem or update."""
        rows: list[dict[str, Any]] = []
        for name in sorted(self._services):
            service = self._services[name]
            if not service.is_empty:
                rows.append(self.describe_one(name))
                rows += shadowed(service)
        return rows

    def describe_one(self, name: str) -> dict[str, Any]:
        """Describe one service. Raises ServiceUnknown."""
        service = self._services.get(name)
        if service is None or service.is_empty:
            raise ServiceUnknown(f"there is no service {name[:128]!r}")
        if not service.releases:
            return describe_unserved(name, next(iter(service.failures.values())))
        versions = sorted(service.releases, key=natural)
        newest = service.releases[versions[-1]]
        facts: dict[str, Any] = {
            "name": name,
            "file": newest.file.label,
            "state": "ready",
            "path": f"/v1/services/{name}",
            "description": newest.definition.description,
            "version": newest.version,
            "release": newest.number,
        }
        if newest.definition.model:
            facts["model"] = newest.definition.model
        if len(versions) > 1 or newest.version != "1":
            shares = service.shares.weights if service.shares is not None else {}
            facts["versions"] = [
                {
                    "version": version,
                    "file": service.releases[version].file.label,
                    "release": service.releases[version].number,
                    "weight": shares.get(version, 0),
                    "path": f"/v1/services/{name}/versions/{version}",
                }
                for version in versions
            ]
        updates = [describe_failure(each) for each in service.failures.values() if is_update(service, each)]
        if updates:
            facts["update"] = updates[0] if len(updates) == 1 else updates
        return facts


def allows(patterns: str, name: str) -> bool:
    return any(fits(pattern.strip(), name) for pattern in patterns.split(","))


def is_update(service: Service, failure: Failure) -> bool:
    """Return whether the failed file would have replaced or joined what is served, rather than clashed with it."""
    serving = service.releases.get(failure.file.version)
    return serving is None or serving.file.origin == failure.file.origin


def describe_failure(failure: Failure) -> dict[str, Any]:
    facts = {"state": "failed" if failure.problem else "setting up", "file": failure.file.label}
    facts |= {"version": failure.file.version, "at": failure.at}
    return facts | {"problem": failure.problem} if failure.problem else facts


def describe_unserved(name: str, failure: Failure) -> dict[str, Any]:
    if not failure.problem:
        return {"name": name, "file": failure.file.label, "state": "setting up"}
    return {"name": name, "file": failure.file.label, "state": "broken", "at": failure.at, "problem": failure.problem}


def for_tenants(facts: Any) -> Any:
    """Return a description without what is for operators: files, and problems, which quote errors of user code."""
    if isinstance(facts, list):
        return [for_tenants(each) for each in facts]
    if not isinstance(facts, dict):
        return facts
    return {name: for_tenants(value) for name, value in facts.items() if name not in ("file", "problem")}


def shadowed(service: Service) -> list[dict[str, Any]]:
    """Describe the files that are not served because another file's service has their name."""
    if not service.releases:
        others = list(service.failures.values())[1:]
    else:
        others = [each for each in service.failures.values() if not is_update(service, each)]
    return [describe_unserved(service.name, each) for each in others]
