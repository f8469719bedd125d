import argparse
from pathlib import Path

import pytest

from oriel_inference.command import add_arguments
from oriel_inference.host import available_cores
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.errors import StartFailed


def test_tritonservers_spellings_are_understood() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--model-store /m --http-address 0.0.0.0 --http-port 9000 --http-max-input-size 5 --model-control-mode none"
    args = parser.parse_args(words.split())
    assert args.model_repository == [Path("/m")]
    assert (args.http_address, args.http_port, args.max_body_bytes) == ("0.0.0.0", 9000, 5)


def test_trusted_peers_are_addresses_and_networks() -> None:
    peers = TrustedPeers(("127.0.0.0/8", "::1"))
    assert "127.0.0.1" in peers and "::1" in peers and "::ffff:127.0.0.1" in peers
    assert "10.0.0.1" not in peers and "unix" not in peers
    with pytest.raises(StartFailed, match="--trusted-peer"):
        TrustedPeers(("everybody",))


def test_there_is_at_least_one_core() -> None:
    assert available_cores() >= 1
