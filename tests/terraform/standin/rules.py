"""What the schemas do not say of a provider, one TOML file each: tests/terraform/rules/aws.toml and so on.

    [aws_eks_cluster]                       # or ["data.aws_region"], or [provider]
    computed = ["version"]                  # optional arguments that the provider fills in when they are left out
    replace = ["name", "vpc_config.subnet_ids"]   # a change of these makes a new one
    sensitive = ["token"]
    write_only = ["secret_wo"]
    protected = ["deletion_protection"]     # while one of these is true, it is not deleted
    conflicts = [["name", "name_prefix"]]   # at most one of these is given
    one_of = [["cidr", "ipam_pool_id"]]     # at least one of these is given
    ordered = [["min_size", "max_size"]]    # none is greater than the next, as far as they are given
    cidr = ["cidr_block"]                   # IPv4 or IPv6 networks, without host bits
    [aws_eks_cluster.defaults]              # known when planning
    authentication_mode = "API"
    [aws_eks_cluster.set]                   # known after apply; {name}: another argument of it, {seed}: unique
    endpoint = "https://{name}.invalid"
    "certificate.data" = "..."              # also inside blocks that the provider makes when none is written
    [aws_eks_cluster.enum]
    "taint.effect" = ["NO_SCHEDULE"]
    [aws_eks_cluster.match]                 # regular expressions, of the whole value
    name = "[a-z]+"
    [aws_eks_cluster.range]
    node_count = [0, 1000]

Paths are dotted through blocks and nested attributes, without indices: they hold for every element.
"""

import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    computed: list[str] = field(default_factory=list)
    replace: list[str] = field(default_factory=list)
    sensitive: list[str] = field(default_factory=list)
    write_only: list[str] = field(default_factory=list)
    protected: list[str] = field(default_factory=list)
    conflicts: list[list[str]] = field(default_factory=list)
    one_of: list[list[str]] = field(default_factory=list)
    ordered: list[list[str]] = field(default_factory=list)
    cidr: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)
    enum: dict[str, list[Any]] = field(default_factory=dict)
    match: dict[str, str] = field(default_factory=dict)
    range: dict[str, list[float]] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """Yield every argument that the rule names."""
        single = [*self.computed, *self.replace, *self.sensitive, *self.write_only, *self.protected, *self.cidr]
        keyed = [*self.defaults, *self.set, *self.enum, *self.match, *self.range]
        return single + keyed + [each for group in (*self.conflicts, *self.one_of, *self.ordered) for each in group]


def load(path: Path) -> dict[str, Rule]:
    """Load the rules of a provider. Raises ValueError for a keyword that is not one of the above."""
    return read(tomllib.loads(path.read_text()), str(path))


def read(document: dict[str, dict[str, Any]], where: str = "rules") -> dict[str, Rule]:
    words = {each.name for each in fields(Rule)}
    for name, rule in document.items():
        if unknown := set(rule) - words:
            raise ValueError(f"{where}: [{name}] has {', '.join(sorted(unknown))}; known: {', '.join(sorted(words))}")
    return {name: Rule(**rule) for name, rule in document.items()}
