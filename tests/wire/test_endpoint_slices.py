"""The rules of EndpointSlices without I/O, and the watch of them at a scripted API server."""

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.discovery.discovery import MAX_ADDRESSES, DiscoveryFailed, DnsDiscovery
from oriel_wire.discovery.endpoint_slices import (
    MAX_LINE_BYTES,
    ApiServer,
    EndpointSlices,
    LineBuffer,
    Listed,
    SliceTable,
    _BadAnswer,
    _ListAgain,
    is_service,
)

from ..gateway.certificates import OPENSSL, certificate
from ..waiting import until
from .kubernetes_api import TOKEN, KubernetesApi, endpoint, event, hosts, kubernetes, piece

# The rules ------------------------------------------------------------------------------------------------------


def listed(*slices: dict[str, Any], version: str = "7") -> SliceTable:
    table = SliceTable()
    table.replace(json.dumps({"metadata": {"resourceVersion": version}, "items": list(slices)}).encode())
    return table


def test_ready_is_true_where_it_is_absent_and_terminating_pods_get_nothing_new() -> None:
    found = listed(
        piece(
            "a",
            endpoint("10.0.0.1", ready=None),
            endpoint("10.0.0.2", ready=False, pod="two"),
            endpoint("10.0.0.3", terminating=True),
            {"addresses": ["10.0.0.4"]},
            {"addresses": []},
            {"addresses": ["not-an-address"]},
        )
    ).found()
    assert found == (Listed("10.0.0.1", True, ""), Listed("10.0.0.2", False, "two"), Listed("10.0.0.4", True, ""))


def test_several_slices_are_one_service_and_a_pod_in_two_of_them_is_one_address() -> None:
    table = listed(
        piece("a", endpoint("10.0.0.2", ready=False), endpoint("10.0.0.1")),
        piece("b", endpoint("10.0.0.2"), endpoint("10.0.0.3")),
        piece("c", endpoint("fd00::1"), kind="IPv6"),
        piece("d", endpoint("pod.example"), kind="FQDN"),
    )
    assert hosts(table.found()) == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"]
    assert all(each.ready for each in table.found())


def test_changes_are_applied_and_a_bookmark_only_moves_the_version() -> None:
    table = listed(piece("a", endpoint("10.0.0.1")))
    assert table.apply(event("ADDED", "8", piece("b", endpoint("10.0.0.2"))))
    assert table.apply(event("MODIFIED", "9", piece("a")))
    assert not table.apply(event("MODIFIED", "9", piece("a")))  # nothing new
    assert not table.apply(event("BOOKMARK", "12", {"kind": "EndpointSlice"}))
    assert (hosts(table.found()), table.version) == (["10.0.0.2"], "12")
    assert table.apply(event("DELETED", "13", piece("b", endpoint("10.0.0.2"))))
    assert table.found() == () and not table.apply(event("DELETED", "14", piece("b")))
    assert not table.apply(event("INVENTED", "15", piece("c", endpoint("10.0.0.9")))) and table.found() == ()


def test_too_old_a_version_and_other_errors_are_told_apart() -> None:
    table = listed(piece("a", endpoint("10.0.0.1")))
    with pytest.raises(_ListAgain):
        table.apply(b'{"type":"ERROR","object":{"kind":"Status","code":410}}')
    with pytest.raises(_BadAnswer, match="code 500: etcd is away"):
        table.apply(b'{"type":"ERROR","object":{"kind":"Status","code":500,"message":"etcd is away"}}')
    with pytest.raises(msgspec.DecodeError):
        table.apply(b'{"type":"ADDED","object":[]}')
    assert hosts(table.found()) == ["10.0.0.1"] and table.version == "7"


def test_a_flood_of_pods_is_bounded() -> None:
    many = [endpoint(f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}") for n in range(MAX_ADDRESSES + 100)]
    assert len(listed(piece("a", *many)).found()) == MAX_ADDRESSES


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ADDED", "MODIFIED", "DELETED"]),
            st.sampled_from("ab"),
            st.dictionaries(st.integers(1, 4), st.tuples(st.booleans(), st.booleans())),
        ),
        max_size=12,
    )
)
def test_changes_give_what_a_list_of_the_result_gives(
    changes: list[tuple[str, str, dict[int, tuple[bool, bool]]]],
) -> None:
    table, now = listed(), {}
    for kind, name, pods in changes:
        found = piece(name, *(endpoint(f"10.0.0.{n}", ready=r, terminating=t) for n, (r, t) in pods.items()))
        table.apply(event(kind, "9", found))
        now.pop(name, None)
        if kind != "DELETED":
            now[name] = found
    assert table.found() == listed(*now.values()).found()


@given(st.lists(st.binary(max_size=20)), st.integers(1, 7))
def test_lines_are_the_same_however_their_bytes_arrive(lines: list[bytes], size: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    buffer = LineBuffer()
    cut = [line for at in range(0, len(data), size) for line in buffer.feed(data[at : at + size])]
    assert cut == [line for line in data.split(b"\n") if line]


@pytest.mark.parametrize("step", [1 << 16, MAX_LINE_BYTES + 1])
def test_a_line_that_does_not_end_is_not_kept(step: int) -> None:
    buffer = LineBuffer()
    with pytest.raises(_BadAnswer, match="longer than"):
        for _ in range(MAX_LINE_BYTES // step + 1):
            buffer.feed(bytes(step))


def test_names_of_services() -> None:
    assert all(map(is_service, ["inference", "a-1", "inference.models", "a.b-c"]))
    assert not any(map(is_service, ["", "A", "a.", ".a", "a.b.c", "a_b", "1a", "a" * 64, "a\n", "a/b"]))


def test_outside_of_a_cluster_the_reason_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryFailed, match="KUBERNETES_SERVICE_HOST is not set"):
        ApiServer.of_pod({})
    assert ApiServer.of_pod({"KUBERNETES_SERVICE_HOST": "fd00::1"}).url == "https://[fd00::1]:443"
    api = ApiServer.of_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"})
    assert api.url == "https://10.0.0.1:6443"
    missing = ApiServer(api.url, tmp_path)
    with pytest.raises(DiscoveryFailed, match="is the pod's token mounted"):
        missing.read("token")
    with pytest.raises(DiscoveryFailed, match=r"ca\.crt cannot be read"):
        missing.tls()
    (tmp_path / "token").write_bytes(b"a\r\nb: c")
    with pytest.raises(DiscoveryFailed, match="damaged"):
        missing.read("token")


# The watch ------------------------------------------------------------------------------------------------------


class Follower:
    """A watch that runs. reported: what was found at each announcement."""

    def __init__(self, where: ApiServer, watch_s: float, service: str = "inference") -> None:
        self.reported: list[list[str]] = []
        self.slices = EndpointSlices(
            service,
            8000,
            changed=lambda: self.reported.append(hosts(self.slices.found)),
            api=lambda: where,
            watch_s=watch_s,
            wait_s=0.001,
        )

    async def sees(self, *expected: str) -> None:
        await until(lambda: self.slices.found is not None and hosts(self.slices.found) == list(expected))


Following = Callable[..., Any]


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[KubernetesApi, Following]]:
    async with kubernetes(tmp_path) as (server, where):

        @asynccontextmanager
        async def following(watch_s: float = 600.0, **more: Any) -> AsyncIterator[Follower]:
            follower = Follower(where, watch_s, **more)
            task = asyncio.create_task(follower.slices.run())
            try:
                yield follower
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

        yield server, following


async def test_a_list_then_a_watch_from_its_version(api: tuple[KubernetesApi, Following]) -> None:
    server, following = api
    server.put(piece("a", endpoint("10.0.0.1")))
    async with following() as follower:
        assert await follower.slices.lookup() == (("10.0.0.1", 8000),)
        await until(lambda: server.watching)
        server.put(piece("b", endpoint("10.0.0.2", ready=False)))
        await follower.sees("10.0.0.1", "10.0.0.2")
        assert await follower.slices.lookup() == (("10.0.0.1", 8000),)  # the ready ones
        server.delete("a")
        await follower.sees("10.0.0.2")
    (path, first), (_, second) = server.asked
    assert path == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
    assert first["labelSelector"] == ["kubernetes.io/service-name=inference"] and "watch" not in first
    assert (
        second["watch"] == ["1"] and second["allowWatchBookmarks"] == ["true"] and second["timeoutSeconds"] == ["600"]
    )
    assert second["resourceVersion"] == ["101"] and second["labelSelector"] == first["labelSelector"]


async def test_another_namespace_is_asked_by_name(api: tuple[KubernetesApi, Following]) -> None:
    server, following = api
    async with following(service="inference.gpu") as follower:
        await follower.sees()
    assert server.asked[0][0].endswith("/namespaces/gpu/endpointslices")


async def test_a_watch_that_ends_goes_on_from_the_last_bookmark(api: tuple[KubernetesApi, Following]) -> None:
    server, following = api
    async with following() as follower:
        await until(lambda: server.watching)
        server.send(event("BOOKMARK", "555", {"kind": "EndpointSlice"}))
        server.end_watches()
        await until(lambda: server.watches == 2)
        assert server.asked[-1][1]["resourceVersion"] == ["555"] and server.lists == 1
        await until(lambda: server.watching)
        server.put(piece("a", endpoint("10.0.0.1")))
        await follower.sees("10.0.0.1")


@pytest.mark.parametrize("how", ["event", "status"])
async def test_a_version_that_is_too_old_is_listed_again(api: tuple[KubernetesApi, Following], how: str) -> None:
    server, following = api
    server.put(piece("a", endpoint("10.0.0.1")))
    async with following() as follower:
        await follower.sees("10.0.0.1")
        await until(lambda: server.watching)
        server.missed(piece("a", endpoint("10.0.0.2")))
        if how == "event":
            server.send(b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n')
        else:
            server.refuse["watch"] = 410
            server.end_watches()
            await until(lambda: server.lists > 1)
            server.refuse.clear()
        await follower.sees("10.0.0.2")
        assert server.lists >= 2 and follower.reported == [["10.0.0.1"], ["10.0.0.2"]]


async def test_a_half_open_connection_is_given_up(api: tuple[KubernetesApi, Following]) -> None:
    server, following = api
    server.put(piece("a", endpoint("10.0.0.1")))
    server.deaf = True
    async with following(watch_s=0.05) as follower:
        await follower.sees("10.0.0.1")
        await until(lambda: server.watches)
        server.missed(piece("a", endpoint("10.0.0.2")))
        await follower.sees("10.0.0.2")


async def test_a_watch_that_sends_byte_after_byte_is_given_up(api: tuple[KubernetesApi, Following]) -> None:
    server, following = api
    server.put(piece("a", endpoint("10.0.0.1")))
    async with following(watch_s=0.2) as follower:
        await follower.sees("10.0.0.1")
        server.missed(piece("a", endpoint("10.0.0.2")))
        await until(lambda: server.send(b" ") or hosts(follower.slices.found) == ["10.0.0.2"])


@pytest.mark.parametrize("bad", [b"x" * (MAX_LINE_BYTES + 1), b"no JSON\n", b'{"type":"ADDED","object":3}\n'])
async def test_what_cannot_be_read_ends_the_watch_and_takes_nothing_away(
    api: tuple[KubernetesApi, Following], bad: bytes
) -> None:
    server, following = api
    server.put(piece("a", endpoint("10.0.0.1")))
    async with following() as follower:
        await until(lambda: server.watching)
        server.send(bad)
        await until(lambda: server.lists == 2 and server.watching)
        assert hosts(follower.slices.found) == ["10.0.0.1"] and follower.reported == [["10.0.0.1"]]
        server.put(piece("b", endpoint("10.0.0.2")))
        await follower.sees("10.0.0.1", "10.0.0.2")


async def test_the_addresses_stay_while_the_api_server_cannot_be_asked(
    api: tuple[KubernetesApi, Following], caplog: pytest.LogCaptureFixture
) -> None:
    server, following = api
    server.put(piece("a", endpoint("10.0.0.1")))
    async with following() as follower:
        await follower.sees("10.0.0.1")
        server.refuse = {"list": 500, "watch": 500}
        server.abort()
        await until(lambda: "500" in follower.slices.failure)
        assert await follower.slices.lookup() == (("10.0.0.1", 8000),)
        server.delete("a")
        server.refuse.clear()
        await follower.sees()  # empty is an answer
        assert follower.slices.failure == "" and await follower.slices.lookup() == ()
    assert "the last known addresses stay" in caplog.text


async def test_the_token_is_read_again(api: tuple[KubernetesApi, Following], tmp_path: Path) -> None:
    server, following = api
    async with following() as follower:
        await until(lambda: server.watching)
        server.token = "second-token"
        server.end_watches()
        await until(lambda: "401: it does not know the token" in follower.slices.failure)
        (tmp_path / "token").write_text("second-token")
        await until(lambda: server.watching)
    tokens = [query["token"][0] for _, query in server.asked]
    assert tokens[0] == TOKEN and tokens[-1] == "second-token"


@pytest.mark.skipif(OPENSSL is None, reason="no openssl here")
async def test_the_api_server_has_to_show_the_clusters_certificate(tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "apiserver")
    stranger, _ = certificate(tmp_path, "stranger")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(chain, key)
    async with kubernetes(tmp_path, tls) as (server, where):
        server.put(piece("a", endpoint("10.0.0.1")))
        (tmp_path / "ca.crt").write_bytes(stranger.read_bytes())
        follower = Follower(where, 600.0)
        task = asyncio.create_task(follower.slices.run())
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in follower.slices.failure)
        assert not server.asked and follower.slices.found is None
        (tmp_path / "ca.crt").write_bytes(chain.read_bytes())  # renewed: it is read again
        await follower.sees("10.0.0.1")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_missing_role_is_said(api: tuple[KubernetesApi, Following]) -> None:
    server, following = api
    server.refuse["list"] = 403
    async with following() as follower:
        with pytest.raises(DiscoveryFailed, match="needs a Role with get, list and watch of endpointslices"):
            await follower.slices.lookup()


async def test_a_name_that_does_not_exist_is_an_empty_pool_and_not_a_failure() -> None:
    async def nobody(host: str, port: int) -> list[tuple[Any, ...]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert await DnsDiscovery("pods.example", 80, resolve=nobody).lookup() == ()
