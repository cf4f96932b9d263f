"""Put down a set that `tests/fixtures/upgrade/make.py` made with an older version, as that version left it.

Paths and the stamps of files follow the new place: inode and modification time are others after a copy. The
formulas of the stamps are the older version's, written out here: were they those of the code under test, a
change of them would go unnoticed.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy
import zstandard
from blake3 import blake3

FIXTURES = Path(__file__).parents[1] / "fixtures" / "upgrade"
ROOT = "@ROOT@"
MAGIC = b"CKPF1\n"
BINARY = (".distcp", ".safetensors")


def put_down(name: str, root: Path) -> Path:
    """Put the set down in a folder that does not exist yet; its catalog is `catalog.sqlite`."""
    shutil.copytree(FIXTURES / name, root)
    for path in root.rglob("*"):
        if path.is_file() and path.suffix not in BINARY and path.stat().st_size:
            path.write_bytes(path.read_bytes().replace(ROOT.encode(), str(root).encode()))
    for plan in [*root.glob(".*.ckptcore/plan"), root / "saved"]:
        _stamp_plan(plan)
        _move_plan(plan, root)
    for noted in root.glob(".*.ckptcore/publishing.json"):
        target = root / noted.parent.name.removeprefix(".").removesuffix(".ckptcore")
        seen = target.lstat()
        form = json.loads(noted.read_text()) | {"identity": [seen.st_dev, seen.st_ino, seen.st_mtime_ns]}
        noted.write_text(json.dumps(form))
    with sqlite3.connect(root / "catalog.sqlite") as conn:
        conn.executescript((root / "catalog.sql").read_text())
        _stamp_rows(conn, json.loads((root / "manifests.json").read_text()))
        _make_current(conn)
    conn.close()
    return root


def copy_to_postgresql(path: Path, url: str) -> None:
    """Copy every row of a SQLite catalog into an empty catalog of the same revision."""
    source = sqlalchemy.create_engine(f"sqlite:///{path}")
    target = sqlalchemy.create_engine(url)
    tables = sqlalchemy.MetaData()
    tables.reflect(target)
    with source.connect() as reading, target.begin() as writing:
        for table in tables.sorted_tables:
            if table.name == "alembic_version":
                continue
            rows = [dict(row._mapping) for row in reading.execute(sqlalchemy.select(table))]
            if rows:
                writing.execute(table.insert(), rows)
            if "id" in table.c and rows:
                writing.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), "
                    f"(SELECT max(id) FROM {table.name}))"
                )
    source.dispose()
    target.dispose()


def _stamp(path: Path) -> str:
    seen = path.stat()
    return f"{seen.st_size} bytes, modified {seen.st_mtime_ns}, inode {seen.st_ino}"


def _stamp_plan(plan: Path) -> None:
    source = Path(json.loads((plan / "head.json").read_text())["source"])
    noted = json.loads((plan / "source.json").read_text())
    (plan / "source.json").write_text(json.dumps({name: _stamp(source / name) for name in noted}))


def _move_plan(plan: Path, root: Path) -> None:
    """The source's path is part of every file's plan, and so of the digests that receipts name."""
    head = json.loads((plan / "head.json").read_text())
    hasher = blake3()
    for path in sorted(plan.glob("file-*.plan")):
        raw = zstandard.decompress(path.read_bytes().removeprefix(MAGIC))
        length = int.from_bytes(raw[:8], "little")
        body = _canonical(_replaced(json.loads(raw[8 : 8 + length]), root))
        raw = len(body).to_bytes(8, "little") + body + raw[8 + length :]
        path.write_bytes(MAGIC + zstandard.compress(raw, 3))
        hasher.update(blake3(raw).digest())
    target = head["target"]
    hasher.update(_canonical([head["manifest_digest"], target["format"], target["single"], head["extra"]]))
    old, new = head["digest"], hasher.hexdigest()
    for path in [plan / "head.json", *plan.parent.glob("receipts/*.json"), plan.parent / "publishing.json"]:
        if path.exists():
            path.write_text(path.read_text().replace(old, new))


def _replaced(form: object, root: Path) -> object:
    return json.loads(json.dumps(form).replace(ROOT, str(root)))


def _canonical(form: object) -> bytes:
    return json.dumps(form, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _stamp_rows(conn: sqlite3.Connection, manifests: Mapping[str, str]) -> None:
    """Make sightings and claims refer to the files of this copy."""
    for uri, stamp in conn.execute("SELECT uri, stamp FROM sightings").fetchall():
        hasher = blake3()
        files = (p for p in Path(uri).rglob("*") if p.is_file())
        for name, path in sorted((str(p.relative_to(uri)), p) for p in files):
            seen = path.stat()
            hasher.update(f"{name}\0{seen.st_size}\0{seen.st_mtime_ns} {seen.st_ino}\n".encode())
        now = re.sub("^[0-9a-f]{64}", hasher.hexdigest(), stamp)
        conn.execute("UPDATE sightings SET stamp=? WHERE uri=?", (now, uri))
    for table, place in (("claims", "source_uri"), ("sightings", "uri")):
        for uri, digest in manifests.items():
            conn.execute(
                f"UPDATE {table} SET source_digest=? WHERE {place}=? AND source_digest IS NOT NULL",
                (_source_digest(uri, digest), uri),
            )


def _source_digest(uri: str, manifest: str) -> str:
    hasher = blake3(manifest.encode())
    for path in sorted(Path(uri).glob("*.distcp")):
        hasher.update(f"{path.name}\0{_stamp(path)}\n".encode())
    return hasher.hexdigest()


def _make_current(conn: sqlite3.Connection) -> None:
    """The lease of what was at work when the version was changed ends five minutes from now."""
    due = (datetime.now(UTC) + timedelta(minutes=5)).strftime("%Y-%m-%d %H:%M:%S.%f")
    conn.execute("UPDATE claims SET due_at=? WHERE state='taken'", (due,))
