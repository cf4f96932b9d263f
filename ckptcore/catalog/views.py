"""Views for SQL queries by users, and the comments that PostgreSQL has on tables, views and columns.

The names and columns of views are stable. A column's name means the same in every view: they share one
dictionary of comments. A test compares its names with those of the database.

Views hold no data, so they are never altered: a migration first drops them and last creates those of its
`HEAD` (`migrate.migrating`). A change here needs a revision, or existing catalogs would keep the old views.
The README beside this file describes every column.
"""

from __future__ import annotations

from string import Template
from typing import TYPE_CHECKING

from ckptcore.catalog.models import Base

if TYPE_CHECKING:
    from sqlalchemy import Connection

# What `conversion.timings` is, stage to seconds: PostgreSQL 15 cannot try a text as JSON.
_STAGE = r'\s*"[^"\\]{1,99}"\s*:\s*-?\d{1,15}(\.\d{1,30})?([eE][-+]?\d{1,2})?\s*'
_STAGES = rf"^\{{({_STAGE}(,{_STAGE})*)?\s*\}}$"

# Expressions that differ between the two databases.
_SPELLINGS = {
    "sqlite": {
        "took": "(julianday(v.ended_at) - julianday(v.started_at)) * 86400.0",
        "days": "julianday('now') - julianday(coalesce(c.verified_at, c.created_at))",
        "stages": "json_each(CASE WHEN json_valid(v.timings) THEN v.timings ELSE '{}' END)",
        "seconds": "t.value",
        # A sum above 63 bits is an error: what is very large is summed as a float, as in `query.sum_of`.
        "bytes": "sum(CASE WHEN total_bytes BETWEEN -1125899906842624 AND 1125899906842624 THEN total_bytes"
        " ELSE CAST(total_bytes AS REAL) END)",
    },
    "postgresql": {
        # Numbers are subtracted, not times: the difference of two infinite times is an error.
        "took": "(extract(epoch FROM v.ended_at) - extract(epoch FROM v.started_at))::double precision",
        "days": "(extract(epoch FROM now()) - extract(epoch FROM coalesce(c.verified_at, c.created_at)))"
        "::double precision / 86400",
        "stages": f"json_each_text(CASE WHEN v.timings ~ '{_STAGES}' THEN v.timings::json ELSE '{{}}' END)",
        "seconds": "t.value::double precision",
        "bytes": "sum(total_bytes)",
    },
}

# In order of creation: later views may use earlier ones.
VIEWS = {
    # Per verb and dtype: one conversion's output must not hide another's of the same step. By the run's name,
    # not its id: then both databases read one run only, if the query names one.
    "latest_outputs": """
SELECT k.run, c.step, c.format, c.dtypes, k.verb, c.uuid AS checkpoint, c.uri, c.total_bytes AS bytes,
       c.fingerprint, c.verified_level, c.verified_at,
       CASE WHEN k.verb = 'export' AND k.proven = 1 THEN 'yes'
            WHEN k.verb = 'export' THEN 'unproven' END AS loadable
FROM (
  SELECT r.name AS run, d.id, m.verb, m.proven,
         row_number() OVER (PARTITION BY r.name, m.verb, d.format, d.dtypes
                            ORDER BY coalesce(d.step, -1) DESC, d.id DESC) AS place
  FROM checkpoint d
  JOIN training_run r ON r.id = d.run_id
  JOIN (SELECT o.checkpoint_id, v.verb, max(CASE WHEN v.export_verdict = 'ok' THEN 1 ELSE 0 END) AS proven
        FROM conversion_io o JOIN conversion v ON v.id = o.conversion_id
        WHERE o.direction = 'out' AND v.state = 'succeeded'
              AND coalesce(v.export_verdict, '') <> 'failed'
              AND NOT (v.verb = 'export'
                       AND EXISTS (SELECT 1 FROM checkpoint_file f
                                   WHERE f.checkpoint_id = o.checkpoint_id AND f.path = 'README.md')
                       AND NOT EXISTS (SELECT 1 FROM checkpoint_file f
                                       WHERE f.checkpoint_id = o.checkpoint_id
                                             AND f.path IN ('config.json', 'adapter_config.json')))
        GROUP BY o.checkpoint_id, v.verb) m ON m.checkpoint_id = d.id
  WHERE d.kind = 'derived' AND d.state = 'present' AND d.verified_at IS NOT NULL
) k
JOIN checkpoint c ON c.id = k.id
WHERE k.place = 1""",
    "latest_exports": """
SELECT run, step, format, dtypes, checkpoint, uri, bytes, fingerprint, verified_level, verified_at, loadable
FROM latest_outputs
WHERE verb = 'export'""",
    "export_verdicts": """
SELECT r.name AS run, c.step, v.export_verdict AS verdict, v.export_verified_at AS verified_at,
       v.uuid AS conversion, c.uuid AS checkpoint, c.uri, v.source_uri, c.state, v.export_checks AS checks
FROM conversion v
JOIN conversion_io o     ON o.conversion_id = v.id AND o.direction = 'out'
JOIN checkpoint c        ON c.id = o.checkpoint_id
LEFT JOIN training_run r ON r.id = c.run_id
WHERE v.export_verdict IS NOT NULL""",
    # A verdict is about the fingerprint that was compared; another one that arrived since is not compared.
    "live_fingerprints": """
SELECT r.name AS run, c.step, c.kind, c.state, c.uuid AS checkpoint, c.uri,
       f.live_fingerprint, f.live_model_fingerprint,
       CASE WHEN f.live_compared IN (f.live_fingerprint, f.live_model_fingerprint) THEN f.live_verdict
            ELSE 'not compared' END AS live_verdict
FROM training_facts f
JOIN checkpoint c        ON c.id = f.checkpoint_id
LEFT JOIN training_run r ON r.id = c.run_id
WHERE coalesce(f.live_fingerprint, f.live_model_fingerprint) IS NOT NULL""",
    # Alarms are findings of a level of their own: a check of bytes does not resolve them.
    "alarms": """
SELECT r.name AS run, c.step, f.code, f.fqn, f.message, c.kind, c.state, c.uuid AS checkpoint, c.uri,
       f.found_at
FROM finding f
JOIN checkpoint c        ON c.id = f.checkpoint_id
LEFT JOIN training_run r ON r.id = c.run_id
WHERE f.level = 'history' AND f.resolved_at IS NULL""",
    "step_history": """
SELECT r.name AS run, c.step, c.kind, c.state, c.uuid AS checkpoint, c.uri, s.tensors, s.norm, s.absmax,
       s.nan, s.inf, s.zeros, s.change, s.against, coalesce(a.alarms, 0) AS alarms
FROM step_statistics s
JOIN checkpoint c        ON c.id = s.checkpoint_id
LEFT JOIN training_run r ON r.id = c.run_id
LEFT JOIN (SELECT checkpoint_id, count(*) AS alarms FROM finding
           WHERE level = 'history' AND resolved_at IS NULL
           GROUP BY checkpoint_id) a ON a.checkpoint_id = c.id""",
    "lineage_steps": """
SELECT s.uuid AS source, s.uri AS source_uri, v.uuid AS conversion, v.verb, v.ended_at,
       d.uuid AS derived, d.uri AS derived_uri, s.id AS source_id, d.id AS derived_id
FROM conversion_io o
JOIN conversion_io i ON i.conversion_id = o.conversion_id AND i.direction = 'in'
JOIN conversion v    ON v.id = o.conversion_id
JOIN checkpoint s    ON s.id = i.checkpoint_id
JOIN checkpoint d    ON d.id = o.checkpoint_id
WHERE o.direction = 'out'""",
    # UNION, not UNION ALL: a checkpoint that was converted onto itself must not loop forever.
    "lineage_pairs": """
WITH RECURSIVE made (checkpoint_id, ancestor_id) AS (
  SELECT o.checkpoint_id, i.checkpoint_id
  FROM conversion_io o
  JOIN conversion_io i ON i.conversion_id = o.conversion_id AND i.direction = 'in'
  WHERE o.direction = 'out'
  UNION
  SELECT made.checkpoint_id, i.checkpoint_id
  FROM made
  JOIN conversion_io o ON o.checkpoint_id = made.ancestor_id AND o.direction = 'out'
  JOIN conversion_io i ON i.conversion_id = o.conversion_id AND i.direction = 'in'
)
SELECT checkpoint_id, ancestor_id FROM made""",
    "lineage_up": """
SELECT c.uuid AS checkpoint, c.uri, c.state, a.uuid AS ancestor, a.uri AS ancestor_uri,
       a.format AS ancestor_format, a.state AS ancestor_state
FROM lineage_pairs p JOIN checkpoint c ON c.id = p.checkpoint_id JOIN checkpoint a ON a.id = p.ancestor_id""",
    "lineage_down": """
SELECT a.uuid AS checkpoint, a.uri, a.state, c.uuid AS descendant, c.uri AS descendant_uri,
       c.format AS descendant_format, c.state AS descendant_state
FROM lineage_pairs p JOIN checkpoint c ON c.id = p.checkpoint_id JOIN checkpoint a ON a.id = p.ancestor_id""",
    "incomplete": """
SELECT c.uuid AS checkpoint, c.uri, c.kind, c.state, f.code, f.message, coalesce(f.fqn, f.file) AS place,
       f.hint, f.found_at
FROM checkpoint c
JOIN finding f ON f.checkpoint_id = c.id AND f.resolved_at IS NULL AND f.severity = 'error'
WHERE c.state IN ('damaged', 'incomplete')""",
    "unverified": """
SELECT c.uuid AS checkpoint, c.uri, c.kind, c.state, c.total_bytes AS bytes, c.verified_level, c.verified_at,
       $days AS days
FROM checkpoint c
WHERE c.state NOT IN ('replaced', 'gone', 'retired', 'deleted')""",
    "duplicates": """
SELECT fingerprint, copies, checkpoint, uri, format, state, bytes
FROM (
  SELECT c.fingerprint, count(*) OVER (PARTITION BY c.fingerprint) AS copies, c.uuid AS checkpoint, c.uri,
         c.format, c.state, c.total_bytes AS bytes
  FROM checkpoint c
  WHERE c.fingerprint IS NOT NULL AND c.state NOT IN ('replaced', 'gone', 'retired', 'deleted')
) counted
WHERE copies > 1""",
    "storage_by_run": """
SELECT coalesce(r.name, '-') AS run, c.kind, count(*) AS checkpoints, $bytes AS bytes,
       min(c.created_at) AS first_at, max(c.created_at) AS last_at
FROM checkpoint c LEFT JOIN training_run r ON r.id = c.run_id
WHERE c.state NOT IN ('replaced', 'gone', 'deleted')
GROUP BY r.name, c.kind""",
    "conversion_throughput": """
SELECT conversion, verb, source_uri, destination_uri, started_at, ended_at, seconds, bytes_in, bytes_out,
       CASE WHEN seconds > 0 THEN bytes_out / seconds END AS bytes_per_second, peak_memory, flow_run_id
FROM (
  SELECT v.uuid AS conversion, v.verb, v.source_uri, v.destination_uri, v.started_at, v.ended_at,
         $took AS seconds, v.bytes_in, v.bytes_out, v.peak_memory, v.flow_run_id
  FROM conversion v
  WHERE v.state = 'succeeded'
) timed""",
    "conversion_stages": """
SELECT v.uuid AS conversion, v.verb, v.started_at, t.key AS stage, $seconds AS seconds
FROM conversion v CROSS JOIN $stages t
WHERE v.state = 'succeeded'""",
    # Both ends of each metric: whether a low or a high value is good is not in its name.
    "best_by_metric": """
SELECT run, metric, goal, kind, value, step, measured_at_step, checkpoint, uri, state
FROM (
  SELECT r.name AS run, m.name AS metric, g.goal, c.kind, m.value, c.step,
         coalesce(m.step, c.step) AS measured_at_step, c.uuid AS checkpoint, c.uri, c.state,
         row_number() OVER (PARTITION BY c.run_id, c.kind, m.name, g.goal
                            ORDER BY CASE g.goal WHEN 'min' THEN m.value ELSE -m.value END,
                                     coalesce(c.step, -1), c.id) AS place
  FROM metric m
  JOIN checkpoint c        ON c.id = m.checkpoint_id
  CROSS JOIN (SELECT 'min' AS goal UNION ALL SELECT 'max') g
  LEFT JOIN training_run r ON r.id = c.run_id
  WHERE m.value IS NOT NULL AND c.state = 'present'
) ranked
WHERE place = 1""",
    "runs": """
SELECT r.name AS run, k.sources, k.outputs, k.damaged, k.bytes, k.first_step, k.last_step, k.first_at,
       k.last_at, c.uuid AS checkpoint, c.uri, f.git_commit, f.user_name, f.dataset, f.job_url, f.framework,
       f.epoch, f.samples, f.tokens
FROM training_run r
JOIN (
  SELECT run_id, sum(CASE WHEN kind = 'source' THEN 1 ELSE 0 END) AS sources,
         sum(CASE WHEN kind = 'derived' THEN 1 ELSE 0 END) AS outputs,
         sum(CASE WHEN state IN ('damaged', 'incomplete') THEN 1 ELSE 0 END) AS damaged,
         $bytes AS bytes, min(step) AS first_step, max(step) AS last_step,
         min(created_at) AS first_at, max(created_at) AS last_at
  FROM checkpoint
  WHERE state NOT IN ('replaced', 'gone', 'retired', 'deleted') AND run_id IS NOT NULL
  GROUP BY run_id
) k ON k.run_id = r.id
LEFT JOIN (
  SELECT id, run_id, row_number() OVER (PARTITION BY run_id
                                        ORDER BY coalesce(step, -1) DESC, kind DESC, id DESC) AS place
  FROM checkpoint
  WHERE state NOT IN ('replaced', 'gone', 'retired', 'deleted') AND run_id IS NOT NULL
) n ON n.run_id = r.id AND n.place = 1
LEFT JOIN checkpoint c     ON c.id = n.id
LEFT JOIN training_facts f ON f.checkpoint_id = n.id""",
}


def create_statements(dialect: str) -> list[str]:
    """Return the statements that create the views. dialect: sqlite or postgresql."""
    spelled = _SPELLINGS[dialect]
    return [f"CREATE VIEW {name} AS{Template(query).substitute(spelled)}" for name, query in VIEWS.items()]


def drop_views(conn: Connection) -> None:
    """Drop every view, if it exists."""
    for name in reversed(VIEWS):
        conn.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")


def make_views(conn: Connection) -> None:
    """Create the views in a database with all tables of `HEAD` and no views."""
    for statement in create_statements(conn.dialect.name):
        conn.exec_driver_sql(statement)


VIEW_TEXTS: dict[str, str] = {
    "latest_outputs": "Newest proven output of each training run, verb, format and dtypes.",
    "latest_exports": "Newest proven export of each training run, format and dtypes.",
    "export_verdicts": "Exports that were verified, and their verdicts.",
    "live_fingerprints": "Checkpoints whose job sent a fingerprint, and whether they are equal to it.",
    "alarms": "What the history of a run says against its steps.",
    "step_history": "Checkpoints whose statistics were computed.",
    "lineage_steps": "Source and output of each conversion.",
    "lineage_pairs": "Each checkpoint and everything it was made from, by row ids.",
    "lineage_up": "Each checkpoint and everything it was made from.",
    "lineage_down": "Each checkpoint and everything that was made from it.",
    "incomplete": "Open errors of checkpoints that are damaged or not complete.",
    "unverified": "Checkpoints, with the days since they were proven.",
    "duplicates": "Checkpoints whose values another one also has, in any format.",
    "storage_by_run": "Checkpoints and bytes by training run and kind.",
    "conversion_throughput": "Conversions that succeeded, with their rates.",
    "conversion_stages": "Stages of conversions that succeeded.",
    "best_by_metric": "By run, metric and kind: the checkpoints with the lowest and the highest value.",
    "runs": "Training runs: their checkpoints, and the facts of the newest one.",
}

# The columns of all views.
VIEW_COLUMNS: dict[str, str] = {
    "run": "Name of the training run.",
    "step": "Training step.",
    "format": "On-disk format.",
    "dtypes": "Comma-separated dtypes, the one with the most bytes first.",
    "verb": "Command that wrote it.",
    "checkpoint": "Public id of the checkpoint.",
    "uri": "URI of the checkpoint.",
    "bytes": "Bytes of tensors.",
    "fingerprint": "Digest of all tensor values.",
    "verified_level": "Check level of the last proof.",
    "verified_at": "Time of the last proof.",
    "loadable": "yes for an export that verify-export proved, else unproven; NULL for other outputs.",
    "verdict": "ok, failed or unproven.",
    "live_fingerprint": "Fingerprint of everything that the job saved, taken in its memory.",
    "live_model_fingerprint": "Fingerprint of the model in the job's memory.",
    "live_verdict": "equal, different or not compared.",
    "fqn": "Name of the tensor.",
    "tensors": "Number of tensors.",
    "norm": "Norm of all weights.",
    "absmax": "Largest absolute value of a weight.",
    "nan": "NaN in all tensors.",
    "inf": "Inf in all tensors.",
    "zeros": "Zeros in weights.",
    "change": "Norm of the change of all weights, relative to theirs before.",
    "against": "Public id of the checkpoint before.",
    "alarms": "Number of open alarms.",
    "conversion": "Public id of the conversion.",
    "source_uri": "URI of what was read.",
    "state": "State of the checkpoint.",
    "checks": "JSON: check to verdict, summary and time.",
    "source": "Public id of the source.",
    "ended_at": "End of the conversion.",
    "derived": "Public id of the output.",
    "derived_uri": "URI of the output.",
    "source_id": "Row id of the source.",
    "derived_id": "Row id of the output.",
    "checkpoint_id": "Row id of the checkpoint.",
    "ancestor_id": "Row id of what it was made from.",
    "ancestor": "Public id of what it was made from.",
    "ancestor_uri": "URI of what it was made from.",
    "ancestor_format": "Format of what it was made from.",
    "ancestor_state": "State of what it was made from.",
    "descendant": "Public id of what was made from it.",
    "descendant_uri": "URI of what was made from it.",
    "descendant_format": "Format of what was made from it.",
    "descendant_state": "State of what was made from it.",
    "kind": "source or derived.",
    "code": "Code of the finding.",
    "message": "Message of the finding.",
    "place": "Tensor or file of the finding.",
    "hint": "Next step.",
    "found_at": "When it was found.",
    "days": "Days since the last proof, or since it was recorded.",
    "copies": "How many checkpoints have these values.",
    "checkpoints": "Number of checkpoints.",
    "first_at": "When the first checkpoint was recorded.",
    "last_at": "When the last checkpoint was recorded.",
    "destination_uri": "URI of the output.",
    "started_at": "Start of the conversion.",
    "seconds": "Duration in seconds.",
    "bytes_in": "Bytes read.",
    "bytes_out": "Bytes written.",
    "bytes_per_second": "Bytes written per second.",
    "peak_memory": "Peak resident memory in bytes.",
    "flow_run_id": "Prefect flow run.",
    "stage": "Stage of the conversion.",
    "metric": "Name of the metric.",
    "goal": "min for the lowest value, max for the highest.",
    "value": "Value of the metric.",
    "measured_at_step": "Step of the measurement.",
    "sources": "Number of sources.",
    "outputs": "Number of outputs.",
    "damaged": "Number of damaged or incomplete checkpoints.",
    "first_step": "Lowest step.",
    "last_step": "Highest step.",
    "git_commit": "Commit of the training code.",
    "user_name": "Who trained.",
    "dataset": "Dataset.",
    "job_url": "Page about the job.",
    "framework": "Trainer.",
    "epoch": "Epochs so far.",
    "samples": "Training samples so far.",
    "tokens": "Training tokens so far.",
}


def comment_statements() -> list[str]:
    """Return the statements for the comments on tables and their columns, and on views."""
    statements = []
    for table in Base.metadata.tables.values():
        statements.append(f"COMMENT ON TABLE {table.name} IS {_quoted(table.comment)}")
        statements += [
            f"COMMENT ON COLUMN {table.name}.{column.name} IS {_quoted(column.comment)}"
            for column in table.columns
        ]
    statements += [f"COMMENT ON VIEW {view} IS {_quoted(text)}" for view, text in VIEW_TEXTS.items()]
    return statements


def put_comments(conn: Connection) -> None:
    """Write the comments into a PostgreSQL catalog of `HEAD`, with its views."""
    if conn.dialect.name != "postgresql":
        return
    names = conn.exec_driver_sql(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = current_schema()"
    )
    existing_columns = {tuple(row) for row in names}
    for statement in comment_statements():
        column = statement.split()[3] if statement.startswith("COMMENT ON COLUMN") else None
        # A column that was dropped by hand is found by `alembic check`, and not here.
        if column is None or tuple(column.split(".")) in existing_columns:
            conn.exec_driver_sql(statement)
    for view, name in sorted(existing_columns):
        if view in VIEW_TEXTS:
            comment = _quoted(VIEW_COLUMNS[name])
            conn.exec_driver_sql(f"COMMENT ON COLUMN {view}.{name} IS {comment}")


def _quoted(text: str | None) -> str:
    return "'" + (text or "").replace("'", "''") + "'"
