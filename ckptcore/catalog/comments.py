"""Comments on every table, view and column. PostgreSQL stores them; SQLite has none.

The columns of views share one dictionary: a name means the same in every view. A test compares the names here
with those of the database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptcore.catalog.models import Base

if TYPE_CHECKING:
    from sqlalchemy import Connection

# table -> (comment, column -> comment)
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "training_run": (
        "A training run that checkpoints come from.",
        {
            "id": "Row id.",
            "name": "Name of the run: its folder, or as announced.",
            "created_at": "When the run was first recorded.",
        },
    ),
    "checkpoint": (
        "One content at one URI. Other content at the same URI is another row.",
        {
            "id": "Row id.",
            "uuid": "Public id.",
            "run_id": "Training run, if known.",
            "kind": "source (a trainer wrote it) or derived (a conversion wrote it).",
            "format": "On-disk format.",
            "uri": "Folder or file, in one spelling and without credentials.",
            "state": "present, damaged, incomplete, replaced, gone, retired or deleted.",
            "step": "Training step, if known.",
            "total_bytes": "Bytes of all tensors.",
            "num_tensors": "Number of tensors.",
            "num_files": "Number of files with data that the manifest names.",
            "dtypes": "Comma-separated dtypes, the one with the most bytes first.",
            "manifest_digest": "Digest of the manifest: names, shapes and places of all tensors.",
            "content_digest": "Digest over the digests of all files; empty while unknown.",
            "origin": "JSON: what the checkpoint records about its writer.",
            "created_at": "When the row was recorded.",
            "verified_at": "When it was last proven.",
            "verified_level": "Check level of that proof: files, coverage, bytes or values.",
            "replaced_at": "When other content was found at the URI.",
            "fingerprint": "Digest of all tensor values in any format and topology, if computed.",
            "checked_at": "When scrub last looked at it.",
            "deleted_at": "When it was purged after retire.",
        },
    ),
    "checkpoint_file": (
        "A file of a checkpoint.",
        {
            "checkpoint_id": "Checkpoint.",
            "path": "Path below the checkpoint's URI.",
            "nbytes": "Size in bytes.",
            "digest": "BLAKE3 in hex, or crc64nvme:HEX of a source's file, if known.",
            "role": "data (tensors and objects) or extra (config, tokenizer, index, card).",
        },
    ),
    "tensor": (
        "A logical tensor of a checkpoint.",
        {
            "checkpoint_id": "Checkpoint.",
            "fqn": "Fully qualified name.",
            "dtype": "Stored dtype.",
            "shape": "JSON list of sizes, in elements.",
            "nbytes": "Bytes of its elements.",
            "fingerprint": "Digest of its values, if computed.",
        },
    ),
    "conversion": (
        "One run of consolidate, export or reshard, also a failed one.",
        {
            "id": "Row id.",
            "uuid": "Public id.",
            "verb": "Command: consolidate, export, reshard, thin, push or rebuilt.",
            "state": "running, succeeded or failed.",
            "source_uri": "What was read.",
            "destination_uri": "What was, or would be, written.",
            "request": "JSON: the options; of a push that succeeded also its commit.",
            "plan_digest": "Digest of the executed plan.",
            "tool_version": "Version of ckptcore.",
            "flow_run_id": "Prefect flow run, if any.",
            "started_at": "Start.",
            "ended_at": "End; null while it runs.",
            "bytes_in": "Bytes read.",
            "bytes_out": "Bytes written.",
            "peak_memory": "Peak resident memory in bytes.",
            "error_code": "Code of the error, if it failed.",
            "error_message": "Message of the error, if it failed.",
            "timings": "JSON: stage to seconds.",
            "map_digest": "Digest of the renaming, if a fingerprint was computed.",
            "fingerprint": "Digest of the converted tensors before any cast, if computed.",
            "source_stamp": "Digest over sizes, times and identities of the source's files.",
            "source_ctime": "The same over status times.",
            "export_verdict": "Verdict of verify-export: ok, failed or unproven; null if it never ran.",
            "export_checks": "JSON: check to verdict, summary and time.",
            "export_verified_at": "Time of the last check.",
        },
    ),
    "conversion_process": (
        "The process of a conversion that runs, where it is known: one that has ended runs nothing.",
        {
            "conversion_id": "Conversion.",
            "process": "Pid, start time, namespaces, and boot id with a mark, separated by spaces.",
            "renewed_at": "When it last showed a sign of life, by the clock of the database.",
        },
    ),
    "conversion_io": (
        "An edge of lineage: a checkpoint that a conversion read or wrote.",
        {"conversion_id": "Conversion.", "checkpoint_id": "Checkpoint.", "direction": "in or out."},
    ),
    "finding": (
        "A finding of a check. It is open until a check at least as deep no longer reports it.",
        {
            "id": "Row id.",
            "checkpoint_id": "Checkpoint, if any.",
            "conversion_id": "Conversion that found it, if any.",
            "code": "Stable code of the finding.",
            "level": "Check level that finds it.",
            "severity": "error, warning or info.",
            "message": "Message for people.",
            "fqn": "Tensor, if it is about one.",
            "file": "File, if it is about one.",
            "hint": "Next step.",
            "found_at": "When it was found.",
            "resolved_at": "When it was no longer found; null while open.",
        },
    ),
    "tag": (
        "A key and a value that a user sets on a checkpoint.",
        {"checkpoint_id": "Checkpoint.", "key": "Key.", "value": "Value.", "updated_at": "When it was set."},
    ),
    "watched_roots": (
        "A folder that is swept for new checkpoints.",
        {
            "id": "Row id.",
            "name": "Name.",
            "uri": "Folder.",
            "include": "JSON list of globs; empty for all.",
            "target": "JSON: what is made of what is found.",
            "enabled": "False while paused.",
            "created_at": "When it was added.",
            "swept_at": "Last sweep.",
            "swept_note": "Result of the last sweep.",
        },
    ),
    "sightings": (
        "What a sweep saw at a URI.",
        {
            "id": "Row id.",
            "uri": "Place of the checkpoint.",
            "root": "Watched root.",
            "step": "Step in its name.",
            "state": "complete, writing, broken or unread.",
            "stamp": "Changes when a file there is written again.",
            "source_digest": "Identity of the complete content.",
            "manifest_digest": "Digest of its manifest.",
            "findings": "JSON: findings of the look.",
            "first_seen_at": "First sweep that saw it.",
            "last_seen_at": "Last sweep that saw it.",
            "changed_at": "When a file there last changed.",
        },
    ),
    "claims": (
        "A lease on making one output of one content, or the record that it was made.",
        {
            "id": "Row id.",
            "source_digest": "Identity of the source's content.",
            "destination_uri": "Destination.",
            "options_digest": "Digest of the options that change the output.",
            "source_uri": "Source.",
            "state": "taken, done or failed.",
            "owner": "Process that has the claim.",
            "attempts": "How often it was taken.",
            "taken_at": "When it was last taken.",
            "due_at": "When the lease ends.",
            "ended_at": "When it was done or failed.",
            "error_code": "Code of the last error.",
            "error_message": "Message of the last error.",
        },
    ),
    "inbox": (
        "An accepted event, processed until it is done or has failed.",
        {
            "id": "Row id.",
            "uuid": "Public id.",
            "source": "Configured source of the receiver.",
            "event_id": "Id of the event, unique in its source.",
            "type": "What happened.",
            "uri": "Announced checkpoint.",
            "run": "Announced run, or empty.",
            "step": "Announced step.",
            "body": "Body as received.",
            "state": "waiting, taken, done or failed.",
            "attempts": "How often it was taken.",
            "due_at": "When it is taken next, or its lease ends.",
            "received_at": "When it was accepted.",
            "ended_at": "When it was done or failed.",
            "flow_run_id": "Prefect flow run.",
            "error_message": "Last error.",
            "attempts_before": "Attempts before the last retry by a user.",
        },
    ),
    "outbox": (
        "A message to an endpoint.",
        {
            "id": "Row id.",
            "uuid": "Public id.",
            "endpoint": "Configured target.",
            "key": "Key, unique for its endpoint.",
            "type": "Kind of message.",
            "body": "JSON body.",
            "state": "waiting, taken, done or failed.",
            "attempts": "How often it was taken.",
            "due_at": "When it is taken next, or its lease ends.",
            "created_at": "When it was put here.",
            "ended_at": "When it was delivered or failed.",
            "error_message": "Last error.",
            "attempts_before": "Attempts before the last retry by a user.",
        },
    ),
    "aliases": (
        "A name for one checkpoint at a time.",
        {
            "id": "Row id.",
            "name": "Name.",
            "checkpoint_id": "Checkpoint.",
            "version": "How often the name was set.",
            "updated_at": "When it was last set.",
        },
    ),
    "holds": (
        "A reason why a checkpoint must not be deleted.",
        {
            "id": "Row id.",
            "uuid": "Public id.",
            "checkpoint_id": "Checkpoint.",
            "reason": "Reason.",
            "owner": "Who asked for it.",
            "placed_at": "When it was placed.",
            "until": "When it expires; null for never.",
            "released_at": "When it was released; null while in force.",
        },
    ),
    "training_facts": (
        "What is known about the training that wrote a checkpoint.",
        {
            "checkpoint_id": "Checkpoint.",
            "git_commit": "Commit of the training code.",
            "user_name": "Who trained.",
            "dataset": "Dataset.",
            "job_url": "Page about the job.",
            "framework": "Trainer.",
            "epoch": "Epochs so far.",
            "samples": "Training samples so far.",
            "tokens": "Training tokens so far.",
            "live_fingerprint": "Fingerprint of everything that the job saved, taken in its memory.",
            "live_model_fingerprint": "Fingerprint of the model in memory, under the names of its module.",
            "live_verdict": "equal or different: whether the checkpoint has what the job had.",
            "live_compared": "The fingerprint that the verdict is about.",
            "config": "JSON: config or hyperparameters, without secrets.",
            "extra": "JSON: other facts.",
            "sources": "JSON: column to its origin (user, announced, stored, inherited).",
            "updated_at": "When it was last changed.",
        },
    ),
    "metric": (
        "A metric of the training at a checkpoint.",
        {
            "checkpoint_id": "Checkpoint.",
            "name": "Name of the metric.",
            "value": "Value; null if it is not finite.",
            "nonfinite": "nan, inf or -inf; null for a finite value.",
            "step": "Step of the measurement, if not that of the checkpoint.",
            "source": "Origin: user, announced, stored or inherited.",
            "updated_at": "When it was last changed.",
        },
    ),
    "step_statistics": (
        "Statistics of the tensors of a checkpoint, where they were computed.",
        {
            "checkpoint_id": "Checkpoint.",
            "columns": "Packed: name, norm, mean, largest value and counts of each tensor.",
            "tensors": "Number of tensors.",
            "norm": "Norm of all weights; null if it is not finite.",
            "absmax": "Largest absolute value of a weight; null if it is not finite.",
            "nan": "NaN in all tensors.",
            "inf": "Inf in all tensors.",
            "zeros": "Zeros in weights.",
            "change": "Norm of the change of all weights, relative to theirs before; null if not measured.",
            "against": "Public id of the checkpoint before.",
            "updated_at": "When they were recorded.",
        },
    ),
    "holdings": (
        "The content ids that a checkpoint holds, as far as they are known.",
        {
            "checkpoint_id": "Checkpoint.",
            "stamp": "Digest over the identity of its files when it was published; null if unknown.",
            "ids": "Content ids of 16 bytes each, sorted; null until something needs them.",
        },
    ),
    "set_aside": (
        "A checkpoint that was retired or replaced, and is not removed yet.",
        {
            "record": "Path or URL of the folder with its record.",
            "checkpoint_id": "Checkpoint, if it is known.",
            "uri": "Its place.",
            "nbytes": "Bytes of files that a purge frees.",
            "at": "When it was set aside.",
            "due_at": "When it may be purged.",
            "digest": "BLAKE3 of its record, which lists its files.",
            "purging": "Whether its removal is decided, and may have begun.",
            "folder": "Inode of the folder around it, on the machine that set it aside.",
        },
    ),
    "obligation": (
        "Contents that must not go, because what held them was deleted in favour of a copy.",
        {
            "id": "Row id.",
            "uuid": "Public id.",
            "checkpoint_id": "What was deleted, if it is known.",
            "source": "URI of what was deleted.",
            "place": "URI of the copy that it counts on.",
            "specs": "Short digests of dtypes and shapes, 8 bytes each.",
            "contents": "Content ids, names and dtypes with shapes, packed.",
            "created_at": "When the deletion was.",
            "lost": "How many contents no recorded checkpoint held when that was last looked at.",
        },
    ),
    "retirement": (
        "How a source that retire deleted was proven.",
        {
            "checkpoint_id": "The deleted source.",
            "child": "Public id of the checkpoint that proved it.",
            "proof": "full, model part or thinned: of these, given_up lists the rest.",
            "fingerprint": "Of the child's tensors when it was last read; NULL if its digests proved it.",
            "freed": "Bytes of files, except those with other names.",
            "at": "When it was deleted.",
        },
    ),
    "given_up": (
        "What was deleted with a source without proof, because a user allowed it by name.",
        {
            "checkpoint_id": "The deleted source.",
            "name": "Tensor, object, file or folder.",
            "kind": "optimizer, scheduler, random state, progress, cast, object, file, or a finding's code.",
            "nbytes": "Bytes; of a cast, those that the copy lacks. NULL if unknown.",
        },
    ),
    "audit": (
        "Who changed what, and when.",
        {
            "id": "Row id.",
            "at": "When.",
            "actor": "Who: a user of the page, or of the operating system.",
            "via": "page or cli.",
            "action": "What was done, as in alias.set.",
            "subject": "Id or name of what was changed.",
            "detail": "JSON: values before and after.",
        },
    ),
}

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


def annotate_models() -> None:
    """Add the comments to the models, so that Alembic compares them with the database."""
    for name, (text, columns) in TABLES.items():
        table = Base.metadata.tables[name]
        table.comment = text
        for column, comment in columns.items():
            table.columns[column].comment = comment


def comment_statements() -> list[str]:
    """Return the statements for the comments on tables and their columns."""
    statements = []
    for table, (text, columns) in TABLES.items():
        statements.append(f"COMMENT ON TABLE {table} IS {_quoted(text)}")
        statements += [f"COMMENT ON COLUMN {table}.{name} IS {_quoted(c)}" for name, c in columns.items()]
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


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


annotate_models()
