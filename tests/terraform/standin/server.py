"""Serves the stand-ins by gRPC on loopback, and returns the environment variable that makes Terraform use them."""

import json
import os
import traceback
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from .calls import CallLog
from .faults import Faults
from .provider import Answer, StandIn
from .schema import Provider
from .wire import field

_UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, standin: StandIn) -> None:
        self._standin = standin

    def service(self, details: Any) -> Any:
        service, method = details.method.strip("/").split("/")
        if service == "grpc.health.v1.Health":
            return grpc.unary_unary_rpc_method_handler(lambda request, context: field(1, 1))
        return grpc.unary_unary_rpc_method_handler(self._run(method)) if service == "tfplugin6.Provider" else None

    def _run(self, method: str) -> Callable[[bytes, Any], bytes]:
        def run(request: bytes, context: Any) -> bytes:
            try:
                response = self._standin.answer(method, request)
            except Exception:  # the edge: terraform shows it as the provider's failure
                context.abort(grpc.StatusCode.INTERNAL, f"{method}: {traceback.format_exc()}")
            if response is None:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, method)
            return response

        return run


class Servers:
    """Providers that are served together, with one log and one set of faults; `close` it.

    answers: name of a data source -> its answer from then on.
    """

    def __init__(self, providers: list[Provider]) -> None:
        self.log = CallLog()
        self.faults = Faults()
        self.answers: dict[str, Answer] = {}
        self.providers = {provider.source: provider for provider in providers}
        self._servers = []
        reattach = {}
        for provider in providers:
            server = grpc.server(futures.ThreadPoolExecutor(8), options=_UNBOUNDED)
            server.add_generic_rpc_handlers((_Methods(StandIn(provider, self.log, self.faults, self.answers)),))
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            self._servers.append(server)
            reattach[provider.source] = {
                "Protocol": "grpc",
                "ProtocolVersion": 6,
                "Pid": os.getpid(),
                "Test": True,
                "Addr": {"Network": "tcp", "String": f"127.0.0.1:{port}"},
            }
        self.environment = {"TF_REATTACH_PROVIDERS": json.dumps(reattach)}

    def close(self) -> None:
        for stopped in [server.stop(None) for server in self._servers]:
            stopped.wait()
