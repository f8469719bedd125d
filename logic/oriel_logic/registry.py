"""Which release a request gets, and what there is to say about the services of this server."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from oriel_logic.definition import Definition
from oriel_logic.errors import LogicError, ServiceBroken, ServiceUnknown
from oriel_logic.releases import Release
from oriel_logic.sources import HandlerFile, natural
from oriel_logic.weights import Shares
from oriel_policies.documents.promises import fits
from oriel_wire.near_names import did_you_mean

__all__ = ["Registry"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the newest state of a file serves nothing: "" while it is being set up. at: when that was found, or begun."""

    file: HandlerFile
    problem: str
    at: str


class Service:
    """One name: its releases by version, which of them take requests that name none, and what failed.

    `only`: the release of every such request, if there is just one; else `shares` picks.
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
        """Work out who takes requests; after every change."""
        weighted = {version: self.weights.get(version, 0) for version in self.releases}
        if not any(weighted.values()):  # nobody said, or those who have a share are not there: the newest
            weighted = dict.fromkeys(self.releases, 0)
            if weighted:
                weighted[max(weighted, key=natural)] = 1
        self.shares = Shares(self.name, weighted) if weighted else None
        self.only = self.releases[self.shares.only] if self.shares is not None and self.shares.only else None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to say of it but weights for versions that may come."""
        return not (self.releases or self.failures)

    def refusal(self, version: str) -> LogicError:
        if self.is_empty:
            return ServiceUnknown(f"there is no service '{self.name}'")
        if version and self.releases:
            versions = ", ".join(sorted(self.releases, key=natural)[:16])
            if not any(file.version == version for file in self.failures):
                return ServiceUnknown(f"the service '{self.name}' has no version {version[:64]!r}, it has {versions}")
            return ServiceBroken(f"version {version[:64]!r} of the service '{self.name}' cannot run")
        if not any(failure.problem for failure in self.failures.values()):
            return ServiceBroken(f"the service '{self.name}' is being set up: try again later", retry_after_s=1.0)
        return ServiceBroken(f"the service '{self.name}' cannot run: GET /v1/services says why")


def no_news(file: HandlerFile, name: str, problem: str) -> None:
    """Nobody listens."""


class Registry:
    """The services of this server. Single writer: the loop.

    news: told of what takes requests from now on (problem "") and of what cannot, with its file and its service's name.
    """

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self.news: Callable[[HandlerFile, str, str], None] = no_news

    def find(self, name: str, version: str = "", key: str = "", patterns: str | None = None) -> Release:
        """The release for a request. version: "" for the one that the weights give to `key`, its id. patterns: of the
        services whose names the caller may know, between commas; None: all.

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
        """Of each service that can run, the one of its newest version; in order of names."""
        able = [service for _, service in sorted(self._services.items()) if service.releases]
        return [each.releases[max(each.releases, key=natural)].definition for each in able]

    def releases(self) -> list[Release]:
        """All that take requests."""
        return [release for service in self._services.values() for release in service.releases.values()]

    @property
    def failed(self) -> int:
        """Files whose newest state serves nothing."""
        failures = [each for service in self._services.values() for each in service.failures.values()]
        return len({each.file.origin for each in failures if each.problem})

    def name_of(self, origin: str) -> str:
        """The first service that is made from the file at `origin`, or should be; "" if none is."""
        for name, service in sorted(self._services.items()):
            files = [*(each.file for each in service.releases.values()), *service.failures]
            if any(file.origin == origin for file in files):
                return name
        return ""

    def holder(self, name: str, version: str) -> Release | None:
        """Who serves this name and version now."""
        service = self._services.get(name)
        return service.releases.get(version) if service is not None else None

    # -- told by whoever sets services up ----------------------------------------------------------------------------

    def publish(self, origin: str, releases: Iterable[Release]) -> list[Release]:
        """Let what was made from the file at `origin` take requests from now on; gives those it replaces, which leave.

        A release of that origin that has no successor leaves too.
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
            old.leave()
        for release in new:
            self.news(release.file, release.name, "")
        return gone

    def withdraw(self, origin: str) -> list[Release]:
        """The file at `origin` is gone: its releases, which leave."""
        return self.publish(origin, ())

    def fail(self, file: HandlerFile, name: str, problem: str) -> None:
        """What `file` now says cannot be served; whoever serves `name` goes on. Logged."""
        problem = problem.encode(errors="backslashreplace").decode()  # it may quote what is no text
        self._forgive(file.origin, lambda failure: not failure.problem)
        service = self._note(file, name, problem)
        goes_on = service.releases.get(file.version)
        kept = f"; release {goes_on.number} goes on serving" if goes_on is not None else ""
        _log.error("services: '%s' (%s) cannot run: %s%s", service.name, file.label, problem, kept)
        self.news(file, service.name, problem)

    def expect(self, file: HandlerFile, name: str) -> None:
        """What `file` now says is being set up; what failed before is no longer of interest."""
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
        """A release that was published turns out not to work: it takes no more requests."""
        service = self._services[release.name]
        if service.releases.get(release.version) is release:
            del service.releases[release.version]
            service.share()
            release.leave()
            self.fail(release.file, release.name, problem)

    def weigh(self, name: str, weights: Mapping[str, int]) -> None:
        """Which versions take which part of the requests that name none."""
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

    # -- for GET /v1/services ----------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """Of each service name, file, state, version, release, description, and model, problem or update."""
        rows: list[dict[str, Any]] = []
        for name in sorted(self._services):
            service = self._services[name]
            if not service.is_empty:
                rows.append(self.describe_one(name))
                rows += shadowed(service)
        return rows

    def describe_one(self, name: str) -> dict[str, Any]:
        """Raises ServiceUnknown."""
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
    """Whether what failed would have replaced or joined what is served, rather than clash with it."""
    serving = service.releases.get(failure.file.version)
    return serving is None or serving.file.origin == failure.file.origin


def describe_failure(failure: Failure) -> dict[str, Any]:
    facts = {"state": "failed" if failure.problem else "setting up", "file": failure.file.label}
    facts |= {"version": failure.file.version, "at": failure.at}
    return facts | {"problem": failure.problem} if failure.problem else facts


def describe_unserved(name: str, failure: Failure) -> dict[str, Any]:
    if not failure.problem:
        return {"name": name, "file": failure.file.label, "state": "setting up"}
    return {"name": name, "file": failure.file.label, "state": "broken", "problem": failure.problem}


def shadowed(service: Service) -> list[dict[str, Any]]:
    """What has the same name as another file's service, and is not served."""
    if not service.releases:
        others = list(service.failures.values())[1:]
    else:
        others = [each for each in service.failures.values() if not is_update(service, each)]
    return [describe_unserved(service.name, each) for each in others]
