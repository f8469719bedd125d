from pathlib import Path

import pytest

from oriel_cli.demo import demo, generate
from oriel_cli.up import demo_assets
from oriel_cli.up.demo_assets import DEMO_KEYS
from oriel_policies.documents import compile_documents


def test_the_demos_keys_open_one_tenant_of_each_tier() -> None:
    import hashlib

    folder = demo_assets.find().policies
    snapshot = compile_documents({path.name: path.read_bytes() for path in folder.glob("*.toml")})
    for tier, key in DEMO_KEYS.items():
        assert snapshot.keys[hashlib.sha256(key.encode()).digest()].tenant.tier.name == tier


def test_generated_models_appear_whole_once(tmp_path: Path) -> None:
    script = tmp_path / "write.py"
    script.write_text("def write(folder):\n    (folder / 'model').write_text('weights')\n")
    folder = tmp_path / "state" / "models"
    generate.generate([script], folder)
    assert (folder / "model").read_text() == "weights"
    (folder / "model").write_text("of another first run")
    generate.generate([script], folder)
    assert (folder / "model").read_text() == "of another first run"
    assert [path.name for path in folder.parent.iterdir()] == ["models"]


def test_a_generator_that_fails_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "write.py"
    script.write_text("def write(folder):\n    (folder / 'half').touch()\n    raise OSError('disk full')\n")
    with pytest.raises(OSError, match="disk full"):
        generate.generate([script], tmp_path / "state" / "models")
    assert list((tmp_path / "state").iterdir()) == []


def test_the_table_shows_both_ways_and_their_runs() -> None:
    figures = {"p50_ms": 8.0, "p99_ms": 12.5, "others": {}}
    measured = {
        "mlp_single": {"batching": "off", "requests_per_s": 2000.4, **figures, "executions_by_rows": {"1": 100}},
        "mlp": {"batching": "on", "requests_per_s": 5900.0, **figures, "executions_by_rows": {"2": 10, "8": 40}},
    }
    assert demo._lines(measured, 16) == [
        "16 requests under way, one row each, through the gateway:",
        "",
        "model       batching  req/s  p50 ms  p99 ms  rows per run  failed",
        "mlp_single  off        2000    8.00   12.50           1.0       0",
        "mlp         on         5900    8.00   12.50           6.8       0",
        "",
        "mlp_single: runs by rows",
        "     1      100  ########################################",
        "",
        "mlp: runs by rows",
        "     2       10  ##########",
        "     8       40  ########################################",
    ]
