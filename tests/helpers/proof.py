"""Prove that inbox, disk and catalog agree about a batch, and that everything is there once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy
import torch
from batches import Batch, left_in_the_middle
from psycopg.rows import dict_row
from safetensors import safe_open
from stack import ROOT, Stack

FILES = """SELECT c.uri, c.state, c.format, c.manifest_digest, f.path, f.nbytes, f.digest
FROM checkpoint c JOIN checkpoint_file f ON f.checkpoint_id = c.id WHERE c.uri LIKE {}"""


def asked(stack: Stack, statement: str, *parameters: Any) -> list[dict[str, Any]]:
    """Rows of the catalog's database."""
    url = stack.env["CKPTCORE_CATALOG_URL"].replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url, row_factory=dict_row, connect_timeout=5) as connection:  # type: ignore[arg-type]
        return connection.execute(statement, parameters).fetchall()  # type: ignore[arg-type,return-value]


def has_ended(stack: Stack, batch: Batch) -> bool:
    """Whether no event of a batch waits for anything any more; False too while nobody can tell."""
    try:
        events = asked(stack, "SELECT state FROM inbox WHERE run = %s", batch.run)
    except psycopg.OperationalError:
        return False
    return all(event["state"] in ("done", "failed") for event in events)


def prove(stack: Stack, batch: Batch) -> None:
    """Every accepted event is done, every checkpoint is exported, once, and nothing else is there."""
    events = asked(stack, "SELECT uuid, uri, state, error_message FROM inbox WHERE run = %s", batch.run)
    assert {event["uuid"] for event in events} == {reply["id"] for reply in batch.answers.values()}
    assert sorted(e["uri"] for e in events) == sorted(str(batch.source(stack, step)) for step in batch.steps)
    assert [e for e in events if e["state"] != "done"] == [], standing(stack, batch)
    for step in batch.steps:
        export, truth = batch.export(stack, step), batch.tensors(step)
        output = _ckptcore("validate", export, "--level", "bytes", "--no-catalog", "--output", "json")
        assert json.loads(output)["ok"]
        found = _read(export)
        assert found.keys() == truth.keys()
        assert all(torch.equal(found[name], truth[name]) for name in truth), export
        assert len(list(export.glob("*.safetensors"))) > 1
    assert left_in_the_middle(stack.exports) == []
    there = [path.name for path in (stack.exports / batch.run).iterdir()]
    assert sorted(there) == sorted(f"step-{step}" for step in batch.steps)
    _in_catalog(stack, batch)


def standing(stack: Stack, batch: Batch) -> str:
    """What there is to know when it does not end well."""
    rows = asked(
        stack, "SELECT uri, state, attempts, flow_run_id, error_message FROM inbox WHERE run = %s", batch.run
    )
    lines = [f"{row}" for row in rows]
    for row in rows:
        if row["state"] != "done" and row["flow_run_id"]:
            states = stack.get(f"/flow_run_states/?flow_run_id={row['flow_run_id']}")
            lines.append(
                f"{row['uri']}: " + " > ".join(f"{s['timestamp'][11:19]} {s['name']}" for s in states)
            )
            lines.append(f"  {stack.run(row['flow_run_id'])['state']['message']}")
    return "\n".join([*lines, *left_in_the_middle(stack.exports)])


def _in_catalog(stack: Stack, batch: Batch) -> None:
    below = f"{stack.exports / batch.run}/%"
    exports = sorted(str(batch.export(stack, step)) for step in batch.steps)
    rows = asked(stack, "SELECT * FROM checkpoint WHERE uri LIKE %s", below)
    assert sorted(row["uri"] for row in rows) == exports
    assert {(row["kind"], row["state"]) for row in rows} == {("derived", "present")}
    assert all(row["verified_at"] is not None for row in rows)
    assert {row["step"] for row in rows} == set(batch.steps)
    assert len({row["fingerprint"] for row in rows} - {None}) == len(batch.steps)

    made = asked(stack, "SELECT * FROM conversion WHERE destination_uri LIKE %s", below)
    assert sorted(row["destination_uri"] for row in made if row["state"] == "succeeded") == exports
    assert [row for row in made if row["state"] == "running"] == []
    claims = asked(stack, "SELECT * FROM claims WHERE destination_uri LIKE %s", below)
    assert sorted(row["destination_uri"] for row in claims) == exports
    assert {row["state"] for row in claims} == {"done"}
    print(
        f"{batch.run}: conversions {Counter((row['state'], row['error_code']) for row in made)}", flush=True
    )

    known = [tuple(row.values()) for row in asked(stack, FILES.format("%s"), f"%/{batch.run}/%")]
    disk = _on_disk(stack, batch)
    # Sources are not read whole for a conversion: the catalog has digests of the files of exports alone.
    assert sorted(row[:-1] for row in known) == sorted(row[:-1] for row in disk)
    of_exports = {row for row in known if row[0] in exports}
    assert of_exports <= disk
    assert all(row[-1] for row in of_exports)


def _on_disk(stack: Stack, batch: Batch) -> set[tuple[Any, ...]]:
    """What a catalog of its own says that is made of the data alone."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "catalog.sqlite"
        places = stack.root / batch.run, stack.exports / batch.run
        _ckptcore("catalog", "rebuild", *places, "--digests", "--catalog", fresh)
        engine = sqlalchemy.create_engine(f"sqlite:///{fresh}")
        with engine.connect() as connection:
            rows = connection.exec_driver_sql(FILES.format("?"), (f"%/{batch.run}/%",)).fetchall()
        engine.dispose()
    return {tuple(row) for row in rows}


def _ckptcore(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "ckptcore", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                found[name] = file.get_tensor(name)
    return found
