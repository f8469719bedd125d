"""The state that gateways of form 1 have left, as they wrote it. It never changes: later versions have to read it."""

import sqlite3
from pathlib import Path

DAY, MONTH = 20_717, 24_320  # the windows of `NOON` in limit_desk.py
QUOTAS = f"""CREATE TABLE quotas (
    tenant TEXT NOT NULL, bound TEXT NOT NULL, period TEXT NOT NULL, number INTEGER NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY (tenant, bound)) WITHOUT ROWID;
INSERT INTO "quotas" VALUES('t','compute-month','month',{MONTH},7000);
INSERT INTO "quotas" VALUES('t','requests-day','day',{DAY},2);
"""
OBJECTIVES = """CREATE TABLE slots (
    tenant TEXT NOT NULL, tier TEXT NOT NULL, target TEXT NOT NULL, width INTEGER NOT NULL, start INTEGER NOT NULL,
    total INTEGER NOT NULL, bad INTEGER NOT NULL, PRIMARY KEY (tenant, tier, target, width, start)) WITHOUT ROWID;
INSERT INTO "slots" VALUES('','gold','',300,1789992000,10,2);
INSERT INTO "slots" VALUES('','gold','',3600,1789992000,10,2);
INSERT INTO "slots" VALUES('t','gold','m',300,1789992000,10,2);
INSERT INTO "slots" VALUES('t','gold','m',3600,1789992000,10,2);
"""
CANARY = '{"route":"d","side":"p1","reason":"errors","text":"why","at":1789992000.0,"form":1}'
CANARY_NAME = "ab7e1e14ea6bc649c8090e8ce78ad7d9"
USAGE = (
    b'{"kind":"start","minute":"2026-09-21T12:00","unit":"gateway"}\n'
    b'{"minute":"2026-09-21T12:00","unit":"gateway","tenant":"t","tier":"gold","target":"m","target_kind":"model",'
    b'"requests":3,"device_ns":7000,"bytes_in":30,"bytes_out":60}\n'
)
REDIS = [
    ("SET", "oriel:form", "1"),
    ("SET", "oriel:{t}requests", "1789992000000000.000:1789992000000000.000"),
    ("HSET", "oriel:{use}2026-09", "since", "1789992000", "slo\x1f1789992000\x1f\x1fgold\x1f\x1f+calls", "10"),
]


def write_database(path: Path, script: str, *, form: int = 1) -> None:
    """Write an SQLite file as a gateway leaves it."""
    database = sqlite3.connect(path)
    database.executescript(f"PRAGMA journal_mode = WAL; {script} PRAGMA user_version = {form};")
    database.close()


def write_segment(folder: Path, name: str, lines: bytes) -> Path:
    """Write the open segment of a gateway that has crashed."""
    path = folder / "usage" / "v1" / "open" / f"{name}.ndjson"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines)
    return path
