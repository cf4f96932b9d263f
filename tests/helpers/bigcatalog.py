"""A large catalog in little time: rows of every table, written past the verbs, as many as asked for."""

import contextlib
import hashlib
import itertools
import random
import sqlite3
import uuid
from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from ckptcore.catalog import open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.database import parse
from ckptcore.fingerprints.step_columns import TensorPoint, pack_points
from ckptcore.naming.optimizer_state import TRAINED

METRICS = (
    "INSERT INTO metric (checkpoint_id, name, value, nonfinite, step, source, updated_at)"
    " SELECT id, '{name}', id % 1000 / 10.0, NULL, step, 'announced', created_at FROM checkpoint"
)
FACTS = (
    "INSERT INTO training_facts (checkpoint_id, git_commit, user_name, config, extra, sources, updated_at)"
    " SELECT id, '3f9a', 'ada', '{}', '{}', '{}', created_at FROM checkpoint"
)
SIGHTINGS = (
    "INSERT INTO sightings (uri, root, step, state, stamp, source_digest, findings, first_seen_at,"
    " last_seen_at, changed_at) SELECT uri, '/runs', step, CASE state WHEN 'present' THEN 'complete' ELSE"
    " 'broken' END, 's', manifest_digest, '[]', created_at, created_at, created_at FROM checkpoint"
    " WHERE kind = 'source'"
)
STATISTICS = (
    "INSERT INTO step_statistics (checkpoint_id, columns, tensors, norm, absmax, nan, inf, zeros, change,"
    " against, updated_at) SELECT id, :columns, :tensors, 9.0, 1.0, 0, 0, 0, 0.5, NULL, created_at"
    " FROM checkpoint WHERE run_id = :run AND kind = 'source'"
)
MEASURED, TENSORS = "run-1", 300  # the run whose steps have statistics, and of how many tensors
START = datetime(2026, 1, 1, tzinfo=UTC)
RUNS = 200


def uuid_of(kind, n):
    return str(uuid.UUID(hashlib.md5(f"{kind}{n}".encode()).hexdigest()))


def digest_of(kind, n):
    return hashlib.sha256(f"{kind}{n}".encode()).hexdigest()


def rows(full, tensors, bare):
    """table -> (columns, its rows). Every second checkpoint was made from the one before it.

    full: checkpoints with `tensors` tensors each, spread among all. bare: checkpoints without any.
    """
    count = full + bare
    every = max(1, count // full)
    # A checkpoint in 50 is damaged, in 20 was replaced; equal fingerprints come in pairs of a conversion.
    states = random.Random(7).choices(("present", "damaged", "replaced"), (93, 2, 5), k=count + 1)
    at = [START + timedelta(minutes=n) for n in range(count + 2)]

    def uri(n):
        side = "runs" if n % 2 else "out"
        return f"/{side}/run-{n % RUNS}/step-{n // RUNS}"

    def content(n):
        return tensors if n % every == 0 and n // every <= full else 0

    numbers = range(1, count + 1)
    with_tensors = [n for n in numbers if n % every == 0][:full]
    yield "training_run", ("id", "name", "created_at"), ((n + 1, f"run-{n}", START) for n in range(RUNS))
    yield (
        "checkpoint",
        (
            "id",
            "uuid",
            "run_id",
            "kind",
            "format",
            "uri",
            "state",
            "step",
            "total_bytes",
            "num_tensors",
            "num_files",
            "dtypes",
            "manifest_digest",
            "content_digest",
            "origin",
            "created_at",
            "verified_at",
            "verified_level",
            "fingerprint",
        ),
        (
            (
                n,
                uuid_of("c", n),
                n % RUNS + 1,
                "source" if n % 2 else "derived",
                "dcp" if n % 2 else "safetensors",
                uri(n),
                states[n],
                n // RUNS,
                10**9 + n,
                content(n),
                2,
                "bfloat16",
                digest_of("m", n),
                "" if n % 2 else digest_of("d", n),
                "{}",
                at[n],
                None if states[n] == "damaged" else at[n],
                None if states[n] == "damaged" else "coverage",
                digest_of("f", (n + 1) // 2) if n % 3 else None,
            )
            for n in numbers
        ),
    )
    yield (
        "checkpoint_file",
        ("checkpoint_id", "path", "nbytes", "digest"),
        (
            (n, f"part-{k}.bin", 10**9, None if n % 2 else digest_of("file", 2 * n + k))
            for n in numbers
            for k in range(2)
        ),
    )
    yield (
        "tensor",
        ("checkpoint_id", "fqn", "dtype", "shape", "nbytes", "fingerprint"),
        (
            (n, f"layers.{k}.mlp.weight", "bfloat16", "[64, 64]", 8192, digest_of("t", n * tensors + k))
            for n in with_tensors
            for k in range(tensors)
        ),
    )
    made = range(1, count // 2 + 1)
    yield (
        "conversion",
        (
            "id",
            "uuid",
            "verb",
            "state",
            "source_uri",
            "destination_uri",
            "request",
            "tool_version",
            "started_at",
            "ended_at",
            "bytes_in",
            "bytes_out",
            "error_code",
            "timings",
        ),
        (
            (
                n,
                uuid_of("v", n),
                "export",
                "failed" if n % 100 == 0 else "succeeded",
                uri(2 * n - 1),
                uri(2 * n),
                "{}",
                "0.1.0",
                at[2 * n],
                at[2 * n] + timedelta(seconds=30),
                10**9,
                10**9,
                "damaged" if n % 100 == 0 else None,
                '{"plan": 1.5, "write": 20.0}',
            )
            for n in made
        ),
    )
    yield (
        "conversion_io",
        ("conversion_id", "checkpoint_id", "direction"),
        itertools.chain(((n, 2 * n - 1, "in") for n in made), ((n, 2 * n, "out") for n in made if n % 100)),
    )
    yield (
        "finding",
        ("id", "checkpoint_id", "code", "level", "severity", "message", "hint", "found_at"),
        (
            (i + 1, n, "hole", "coverage", "error", "rows are missing", "", at[n])
            for i, n in enumerate(n for n in numbers if states[n] == "damaged")
        ),
    )
    yield (
        "tag",
        ("checkpoint_id", "key", "value", "updated_at"),
        ((n, "eval.mmlu", str(n % 100), at[n]) for n in numbers if n % 10 == 0),
    )
    yield (
        "aliases",
        ("id", "name", "checkpoint_id", "version", "updated_at"),
        ((n, f"run-{n}/best", 2 * n, 1, START) for n in range(1, min(RUNS, count // 2) + 1)),
    )


def fill(url, full, tensors, bare):
    """Writes such rows into an empty catalog, and lets the database look at them."""
    parsed = parse(url)
    if parsed.get_backend_name() == "sqlite":
        with contextlib.closing(sqlite3.connect(parsed.database)) as connection:
            for table, columns, values in rows(full, tensors, bare):
                marks = ", ".join("?" * len(columns))
                written = (tuple(_text(v) for v in row) for row in values)
                connection.executemany(
                    f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", written
                )
            connection.commit()
        return
    import psycopg

    with psycopg.connect(
        parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    ) as connection:
        for table, columns, values in rows(full, tensors, bare):
            with connection.cursor().copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy:
                for row in values:
                    copy.write_row(row)
            if columns[0] == "id":
                connection.execute(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"
                )
        connection.execute("ANALYZE")


def fill_with_training(url, count):
    """Writes such rows, metrics and facts of a training for each checkpoint, and a swept root above all.

    One run was measured: each of its steps has the statistics of `TENSORS` tensors.
    """
    full = max(1, count // 100)
    fill(url, full, 500, count - full)
    with open_catalog(url) as catalog, catalog.writing() as conn:
        for name in ("loss", "eval_loss", "grad_norm", "mmlu"):
            conn.execute(sa.text(METRICS.format(name=name)))
        conn.exec_driver_sql(FACTS)
        conn.exec_driver_sql(SIGHTINGS)
        run = conn.execute(sa.text("SELECT id FROM training_run WHERE name = :name"), {"name": MEASURED})
        values = {"columns": _statistics(), "tensors": TENSORS, "run": run.scalar_one()}
        conn.execute(sa.text(STATISTICS), values)
        roots.add(conn, datetime.now(UTC), "all", "/runs", retention={"keep_last": 5, "rest": "weights"})
        conn.exec_driver_sql("ANALYZE")


def _statistics():
    numbers = random.Random(7)
    layers = [(n, part) for n in range(TENSORS // 4) for part in ("q_proj", "o_proj", "up_proj", "down_proj")]
    points = [
        TensorPoint(
            f"model.layers.{layer}.{part}.weight", "bfloat16", TRAINED, 1 << 24,
            numbers.random(), numbers.random(), numbers.random(), 0, 0, 0, numbers.random(),
        )
        for layer, part in layers
    ]  # fmt: skip
    return pack_points(points)


def _text(value):
    """Times as SQLAlchemy writes them into SQLite."""
    return value.strftime("%Y-%m-%d %H:%M:%S.%f") if isinstance(value, datetime) else value
