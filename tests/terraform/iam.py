"""Takes the IAM policies of a state apart: who may do what on which resource."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Types whose policies give rights -> the argument with the JSON.
DOCUMENTS = {
    "aws_ecr_repository_policy": "policy",
    "aws_iam_policy": "policy",
    "aws_iam_role": "assume_role_policy",
    "aws_iam_role_policy": "policy",
    "aws_kms_key": "policy",
    "aws_s3_bucket_policy": "policy",
    "aws_vpc_endpoint": "policy",
}


@dataclass(frozen=True, slots=True)
class Statement:
    address: str  # of the resource that carries it
    sid: str
    effect: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    principals: tuple[str, ...]  # AWS:*, Service:eks.amazonaws.com
    condition: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.address}: {self.sid}".removesuffix(": ")


def statements(resources: Mapping[str, Mapping[str, Any]]) -> Iterator[Statement]:
    """Return the statements of all policies. resources: address -> values. Raises ValueError for an invalid policy."""
    for address, values in resources.items():
        argument = DOCUMENTS.get(address.split("[")[0].split(".")[-2])
        text = values.get(argument) if argument else None
        if not text or not text.startswith("{"):
            continue
        document = json.loads(text)
        if document["Version"] != "2012-10-17":
            raise ValueError(f"{address}: {document['Version']}: an older version ignores policy variables")
        for each in document["Statement"]:
            if "NotAction" in each or "NotResource" in each or "NotPrincipal" in each:
                raise ValueError(f"{address}: gives what it does not name")
            yield Statement(
                address,
                each.get("Sid", ""),
                each["Effect"],
                tuple(_listed(each["Action"])),
                tuple(_listed(each.get("Resource", []))),
                tuple(_principals(each.get("Principal", {}))),
                each.get("Condition", {}),
            )


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _principals(value: str | dict[str, str | list[str]]) -> Iterator[str]:
    if isinstance(value, str):
        yield f"AWS:{value}"
        return
    for kind, names in value.items():
        for name in _listed(names):
            yield f"{kind}:{name}"
