"""The paths of containers of SageMaker and Vertex AI. Each stands for a path of v2, which answers as ever."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from oriel_inference.models.control import ModelControl
from oriel_inference.servers.sagemaker import SagemakerModels
from oriel_wire.errors import StartFailed
from oriel_wire.h1.request import RequestHead

_MIME = "application/vnd.%s-triton.binary+json;json-header-size="
_REDIRECTED = ("/v2/health/", "/v2/models/", "/v2/repository/", "/v2/systemsharedmemory/", "/v2/cudasharedmemory/")
_POSTED = frozenset(("infer", "generate", "generate_stream", "index", "load", "unload", "register", "unregister"))


@dataclass(frozen=True, slots=True)
class CloudPaths:
    """The paths of one cloud.

    mime: content type of a body with binary tensors, up to the length of its JSON part.
    target: returns the method and the path of v2 that a request stands for; the path is "" if there is none.
    models: serves `/models`, which stands for no path of v2; None if that is not served.
    """

    mime: str
    target: Callable[[RequestHead], tuple[str, str]]
    models: SagemakerModels | None = None


def sagemaker_paths(environ: Mapping[str, str], control: ModelControl) -> CloudPaths:
    """Return SageMaker's paths, by Triton's variables of the environment. control: loads models for SageMaker."""
    models = SagemakerModels(control) if environ.get("SAGEMAKER_MULTI_MODEL") == "true" else None
    name = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
    model, kind = environ.get(name, f"unspecified_{name}"), environ.get("SAGEMAKER_TRITON_INFERENCE_TYPE", "infer")
    ping = "/v2/health/" + environ.get("SAGEMAKER_TRITON_PING_MODE", "ready")

    def target(head: RequestHead) -> tuple[str, str]:
        if head.path == "/invocations":
            chosen = head.get("x-amzn-sagemaker-target-model") or model
            return head.method, f"/v2/models/{quote(chosen, safe='')}/{kind}"
        if models is not None and head.path.startswith("/models"):
            return head.method, models.path(head)
        return head.method, ping if head.path == "/ping" else ""

    return CloudPaths(_MIME % "sagemaker", target, models)


def vertex_paths(environ: Mapping[str, str], default_model: Callable[[], str]) -> CloudPaths:
    """Return Vertex AI's paths, which are in its variables of the environment. Raises StartFailed."""
    predict, health = environ.get("AIP_PREDICT_ROUTE"), environ.get("AIP_HEALTH_ROUTE")
    if not predict or not health:
        raise StartFailed("Vertex AI needs AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE, or --allow-vertex-ai=false")

    def target(head: RequestHead) -> tuple[str, str]:
        if head.path != predict:
            return head.method, "/v2/health/ready" if head.path == health else ""
        redirect = head.get("x-vertex-ai-triton-redirect")
        if redirect is None:
            return head.method, f"/v2/models/{quote(default_model(), safe='')}/infer"
        path = "/" + redirect
        if head.method != "POST" or (path != "/v2" and not path.startswith(_REDIRECTED)):
            return head.method, ""
        return "POST" if path.rpartition("/")[2] in _POSTED else "GET", path

    return CloudPaths(_MIME % "vertex-ai", target)
