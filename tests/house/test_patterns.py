"""Every regular expression is listed here, and takes steps by the length of its text, whatever the text is.

A pattern that tries the rest of a text again from many of its places takes steps by the square of its length, or worse:
48 KB of a caller's text once took four seconds of the loop that answers everybody.
"""

import sys
from collections.abc import Iterator

import pytest

from .backtracking import Attacks, steps
from .regexes import Regex, regexes

SHORT, LONG = 40, 160  # characters of two texts that differ in their length only
MOST_AT_ONCE = 2000  # steps for the short one

# By the file: the names of its patterns, or of the variables and functions around those that have none.
# Texts of callers.
CALLERS = {
    "gateway/oriel_gateway/api_docs/document.py": "_id",
    "gateway/oriel_gateway/call/cors.py": "_NAMES",
    "gateway/oriel_gateway/identity/named_models.py": "_MODEL_NAME _JSON_TYPE _FORM_TYPE _DISPOSITION _KEY",
    "gateway/oriel_gateway/ingress/forwarded.py": "_ELEMENT _FOR _PORT _HOST",
    "gateway/oriel_gateway/shared/sequence_steps.py": "_NAMES",
    "gateway/oriel_gateway/routing/targets.py": "_SERVICE _MODEL _ONLY_NAME _ONLY_VERSION _OPERATOR _LISTED",
    "inference/oriel_inference/language/guides.py": "_NAME",
    "inference/oriel_inference/model.py": "_NAME _VERSION",
    "inference/oriel_inference/servers/not_served.py": "_PATH",
    "logic/oriel_logic/bodies/encoding.py": "FIELD VALUE",
    "logic/oriel_logic/bodies/json.py": "ONE_FIELD",
    "logic/oriel_logic/openai/schema.py": "FIELD _WHOLE",
    "logic/oriel_logic/server/ingress.py": "SERVICE",
    "wire/oriel_wire/process/allowed.py": "_SENTENCE _STEP",
    "wire/oriel_wire/h1/chunked.py": "_SIZE _TRAILER",
    "wire/oriel_wire/context.py": "_REQUEST_ID _NAME _COST _STREAM _TOKENS",
    "wire/oriel_wire/engine/peers.py": "_HOST",
    "wire/oriel_wire/h1/request.py": "_FIELD _REQUEST_LINE _ABSOLUTE _HOST_VALUE",
    "wire/oriel_wire/h2/fields.py": "_TOKEN _HOST_VALUE",
    "wire/oriel_wire/h2/grpc.py": "_ESCAPED _CODED",
    "wire/oriel_wire/h2/grpc_web.py": "_TYPE _PADDED",
    "wire/oriel_wire/h2/known_fields.py": "_NAME",
    "wire/oriel_wire/observe/semantics.py": "_ROUTES _ROUTES _ROUTES _ROUTES _ROUTES _ROUTES _ROUTES _FIXED",
    "wire/oriel_wire/observe/trace.py": "_PARENT",
    "wire/oriel_wire/v2/jsondata.py": "_OPENING",
}
# Texts of servers that answer us: upstreams, stores, other instances.
SERVERS = {
    "gateway/oriel_gateway/api_docs/reading.py": "MODEL_NAME _SERVICE _OPENAI_MODEL _MEDIA _COMPONENT",
    "gateway/oriel_gateway/pools/grpc_answers.py": "_ADDRESS _LOST _WORD",
    "gateway/oriel_gateway/pools/upstream_answers.py": "_REFUSED _ABSENT",
    "wire/oriel_wire/h1/response.py": "_EVENT_TYPE _STATUS_LINE",
    "wire/oriel_wire/objects/client.py": "_BUCKET",
    "wire/oriel_wire/objects/obstore.py": "_STATUS _CREDENTIALS _BAD_NAME",
    "wire/oriel_wire/objects/s3.py": "_MD5",
    "wire/oriel_wire/objects/s3_http.py": "_REGION",
    "wire/oriel_wire/observe/orca.py": "_NAME",
    "wire/oriel_wire/observe/server_timing.py": "_ODD _ENTRY",
    "wire/oriel_wire/usage/lines.py": "_SEGMENT",
    "wire/oriel_wire/v2/metadata.py": "_ENUM _FIELD",
}
# Texts of operators: policy documents, configurations, flags.
OPERATORS = {
    "cli/oriel_cli/policies/key_documents.py": "header following keys",
    "cli/oriel_cli/policies/keys.py": "_LASTS _NAME _TIER",
    "tools/oriel_tools/load/bodies.py": "_MODEL",
    "cli/oriel_cli/models/models.py": "_FILE",
    "tools/oriel_tools/simulate/requests.py": "_MODEL",
    "tools/oriel_tools/tune/command.py": "_DURATION",
    "tools/oriel_tools/tune/config_text.py": "_TOKEN",
    "tools/oriel_tools/tune/objective.py": "_GOAL _BOUND _FOR _TIER _RATE",
    "gateway/oriel_gateway/backup.py": "_SEGMENT",
    "gateway/oriel_gateway/settings.py": "_OVERRIDE key_prefix",
    "inference/oriel_inference/servers/forwarded_headers.py": "_SLOW header_pattern",
    "inference/oriel_inference/settings.py": "_DEVICE _CLASS",
    "policies/oriel_policies/artefacts/comparison.py": "_TOLERANCE",
    "policies/oriel_policies/artefacts/devices.py": "_CAPABILITY",
    "policies/oriel_policies/documents/compile.py": "_HEADER _VERSION _ADDRESS _SERVICE _PATH _ROUTE_NAME _MODEL _MODEL_OF_BODY",  # noqa: E501
    "policies/oriel_policies/documents/reading.py": "_TEXT",
    "policies/oriel_policies/documents/prices.py": "_CLASS _CURRENCY",
    "policies/oriel_policies/documents/tenants.py": "_NAME _PATTERN _GRANT _SHA256",
    "policies/oriel_policies/quality/reference.py": "_INDEX",
    "policies/oriel_policies/scaling/schedule.py": "_CLOCK",
    "wire/oriel_wire/discovery/endpoint_slices.py": "_SERVICE",
    "wire/oriel_wire/process/environment.py": "_NAME",
}
# Texts of authors of models and services, and of this project.
AUTHORS = {
    "inference/oriel_inference/backends/__init__.py": "_FOLDERS",
    "inference/oriel_inference/backends/compilers.py": "_INSTRUCTIONS found",
    "inference/oriel_inference/backends/onnx_runtime.py": "_PREFIX",
    "inference/oriel_inference/backends/openvino_models.py": "_OPERATORS",
    "inference/oriel_inference/backends/python/model_metrics.py": "_NAME _LABEL",
    "inference/oriel_inference/language/gguf.py": "_CONTEXT _TENSOR",
    "inference/oriel_inference/language/vocabulary.py": "_BYTE",
    "inference/oriel_inference/repository/config.py": "_NO_POLICY _CAPABILITY _LINE",
    "inference/oriel_inference/repository/metrics_config.py": "_TAG",
    "inference/oriel_inference/stores/manifest.py": "_SUM",
    "inference/oriel_inference/stores/opening.py": "readable",
    "logic/oriel_logic/dev/build.py": "_REQUIREMENT _LABEL _REFERENCE dockerfile requirements_of found pinned",
    "logic/oriel_logic/dev/console.py": "found missing",
    "logic/oriel_logic/dev/new.py": "found filled",
    "logic/oriel_logic/loading/listing.py": "IMPORT",
    "logic/oriel_logic/loading/sources.py": "VERSION NO_HANDLER UNFIT parts",
    "logic/oriel_logic/openai/served.py": "NAME",
    "logic/oriel_logic/openai/templates.py": "_MARKS",
    "logic/oriel_logic/server/openapi.py": "made",
    "logic/oriel_logic/services/definition.py": "NAME",
    "wire/oriel_wire/process/api_page.py": "found",
}
LISTED = {**CALLERS, **SERVERS, **OPERATORS, **AUTHORS}
# Patterns that are handed to a function which only calls `match`.
MATCHED = {"_TIER", "_PATTERN", "_GRANT", "_GOAL", "_BOUND", "_RATE"}
# Patterns that are tried on nothing but files of this project.
OWN = {"wire/oriel_wire/process/api_page.py:found"}


def worst(regex: Regex) -> str:
    """Return the beginning of a text whose steps grow faster than its length, "" if none does."""
    for short, long in Attacks(regex.pattern, regex.flags).texts(SHORT, LONG):
        few = steps(regex.pattern, regex.flags, short, anchored=regex.anchored, most=MOST_AT_ONCE)
        most = few * LONG // SHORT * 3 // 2 + 200
        if few > MOST_AT_ONCE or steps(regex.pattern, regex.flags, long, anchored=regex.anchored, most=most) > most:
            return short
    return ""


@pytest.fixture(autouse=True)
def deep() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    yield
    sys.setrecursionlimit(limit)


@pytest.fixture(scope="module")
def found() -> list[Regex]:
    return regexes()


def test_every_pattern_is_listed(found: list[Regex]) -> None:
    names: dict[str, list[str]] = {}
    for regex in found:
        file, _, name = regex.where.partition(":")
        names.setdefault(file, []).append(name)
    assert {file: " ".join(each) for file, each in names.items()} == LISTED, "list it, and say whose texts it reads"


@pytest.mark.parametrize("unit", ["cli", "gateway", "inference", "logic", "policies", "tools", "wire"])
def test_no_pattern_takes_more_steps_than_its_text_is_long(found: list[Regex], unit: str) -> None:
    bad = {}
    for regex in found:
        if regex.where.startswith(f"{unit}/") and regex.where not in OWN:
            if not regex.uses and regex.where.partition(":")[2] in MATCHED:
                regex.uses.add("match")
            if text := worst(regex):
                bad[regex.where] = text
    assert bad == {}


@pytest.mark.parametrize(
    ("pattern", "uses"),
    [
        (rb'"(?:[^"\\]|\\.)*"', "sub"),  # texts of JSON that never end: each quote begins anew
        (r" - at `\$\.?(.*)`\Z", "search"),
        (r"[a-z]+\Z", "search"),
        (r"(a+)+\Z", "match"),
        (r"(?:a|ab|b)*c", "match"),
        (r"\s*=\s*(\S.*?)\s*\Z", "match"),
    ],
)
def test_a_pattern_that_begins_again_and_again_is_found(pattern: str | bytes, uses: str) -> None:
    assert worst(Regex("here", pattern, 0, {uses}))


@pytest.mark.parametrize(
    ("pattern", "uses"),
    [(r"[a-z]+\Z", "match"), (r"model|lora", "search"), (rb"%([0-9A-F]{2})", "sub"), (r"(?:/[^/]+)+\Z", "match")],
)
def test_a_pattern_that_goes_on_is_taken(pattern: str | bytes, uses: str) -> None:
    assert not worst(Regex("here", pattern, 0, {uses}))
