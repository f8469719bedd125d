"""APIs that only callers with a secret may use: Triton's groups of paths and methods, and a header for each of them."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest

from oriel_wire.errors import StartFailed

GRPC_PREFIX = "triton-grpc-protocol-"
# Group -> kinds of HTTP routes and methods of gRPC.
GROUPS: Mapping[str, frozenset[str]] = {
    group: frozenset(names.split())
    for group, names in {
        "health": "live ready model_ready ServerLive ServerReady ModelReady Check Watch",
        "metadata": "metadata model_metadata ServerMetadata ModelMetadata",
        "inference": "infer generate generate_stream ModelInfer ModelStreamInfer",
        "shared-memory": "regions_status regions_unregister region_status region_register region_unregister "
        "SystemSharedMemoryStatus SystemSharedMemoryRegister SystemSharedMemoryUnregister "
        "CudaSharedMemoryStatus CudaSharedMemoryRegister CudaSharedMemoryUnregister",
        "model-config": "config ModelConfig",
        "model-repository": "repository_index repository_load repository_unload repository_memory archives "
        "RepositoryIndex RepositoryModelLoad RepositoryModelUnload",
        "statistics": "stats all_stats ModelStatistics",
        "trace": "trace TraceSetting",
        "logging": "logging LogSettings",
    }.items()
}


@dataclass(frozen=True, slots=True, eq=False)
class Restriction:
    """A secret that callers of some groups have to send. header: its name, with `GRPC_PREFIX` for gRPC."""

    groups: Sequence[str]
    header: str
    secret: bytes = field(repr=False)

    def met(self, get: Callable[[str], str | None]) -> bool:
        """Return whether a call has the secret. get: returns the value of its header of a lower-case name."""
        given = get(self.header.lower())
        return given is not None and compare_digest(given.encode("latin-1"), self.secret)


NOT_RESTRICTED: Mapping[str, Restriction] = {}


def restriction_flag(what: str, prefix: str) -> Callable[[str], Restriction]:
    """Return the converter of a flag. what: "api" or "protocol". prefix: stands before the header's name."""

    def convert(text: str) -> Restriction:
        names, _, rest = text.partition(":")
        key, _, secret = rest.partition("=")
        if not (key and secret) or "=" in names:  # not shown, as it may hold the secret
            raise argparse.ArgumentTypeError("write it as GROUP,GROUP:KEY=VALUE")
        groups = names.split(",")
        if unknown := [each for each in groups if each not in GROUPS]:
            raise argparse.ArgumentTypeError(f"unknown restricted {what} '{unknown[0][:40]}' ({', '.join(GROUPS)})")
        return Restriction(groups, prefix + key, secret.encode("utf-8", "surrogateescape"))

    return convert


def by_name(restrictions: Iterable[Restriction], what: str) -> dict[str, Restriction]:
    """Return the restriction of each kind of route and method that has one. Raises StartFailed for a group that two of
    them name.
    """
    found: dict[str, Restriction] = {}
    for each in restrictions:
        for group in each.groups:
            if not found.keys().isdisjoint(GROUPS[group]):
                raise StartFailed(f"restricted {what} '{group}' can not be specified in multiple config groups")
            found.update(dict.fromkeys(GROUPS[group], each))
    return found
