"""Create the tables of the catalog."""

import sqlalchemy as sa
from alembic import op

revision = "v1"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BIGINT = sa.BigInteger()
TEXT = sa.Text()
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", ID, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("actor", TEXT, nullable=False),
        sa.Column("via", TEXT, nullable=False),
        sa.Column("action", TEXT, nullable=False),
        sa.Column("subject", TEXT, nullable=False),
        sa.Column("detail", TEXT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_subject_at", "audit", ["subject", "at"])
    op.create_table(
        "claims",
        sa.Column("id", ID, nullable=False),
        sa.Column("source_digest", TEXT, nullable=False),
        sa.Column("destination_uri", TEXT, nullable=False),
        sa.Column("options_digest", TEXT, nullable=False),
        sa.Column("source_uri", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("attempts", BIGINT, nullable=False),
        sa.Column("taken_at", TIME, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("error_code", TEXT, nullable=True),
        sa.Column("error_message", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_claims"),
        sa.UniqueConstraint(
            "source_digest",
            "destination_uri",
            "options_digest",
            name="uq_claims_source_digest_destination_uri_options_digest",
        ),
    )
    op.create_index("ix_claims_destination_uri", "claims", ["destination_uri"])
    op.create_index("ix_claims_source_uri", "claims", ["source_uri"])
    op.create_table(
        "conversion",
        sa.Column("id", ID, nullable=False),
        sa.Column("uuid", TEXT, nullable=False),
        sa.Column("verb", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("source_uri", TEXT, nullable=False),
        sa.Column("destination_uri", TEXT, nullable=False),
        sa.Column("request", TEXT, nullable=False),
        sa.Column("plan_digest", TEXT, nullable=True),
        sa.Column("tool_version", TEXT, nullable=False),
        sa.Column("flow_run_id", TEXT, nullable=True),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("bytes_in", BIGINT, nullable=True),
        sa.Column("bytes_out", BIGINT, nullable=True),
        sa.Column("peak_memory", BIGINT, nullable=True),
        sa.Column("error_code", TEXT, nullable=True),
        sa.Column("error_message", TEXT, nullable=True),
        sa.Column("timings", TEXT, nullable=False),
        sa.Column("map_digest", TEXT, nullable=True),
        sa.Column("fingerprint", TEXT, nullable=True),
        sa.Column("source_stamp", TEXT, nullable=True),
        sa.Column("source_ctime", TEXT, nullable=True),
        sa.Column("export_verdict", TEXT, nullable=True),
        sa.Column("export_checks", TEXT, nullable=True),
        sa.Column("export_verified_at", TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_conversion"),
        sa.UniqueConstraint("uuid", name="uq_conversion_uuid"),
    )
    op.create_index("ix_conversion_destination_uri", "conversion", ["destination_uri"])
    op.create_index("ix_conversion_fingerprint", "conversion", ["fingerprint"])
    op.create_index("ix_conversion_flow_run_id", "conversion", ["flow_run_id"])
    op.create_index("ix_conversion_source_uri", "conversion", ["source_uri"])
    op.create_index("ix_conversion_started_at", "conversion", ["started_at"])
    op.create_index("ix_conversion_state_started_at", "conversion", ["state", "started_at"])
    op.create_table(
        "inbox",
        sa.Column("id", ID, nullable=False),
        sa.Column("uuid", TEXT, nullable=False),
        sa.Column("source", TEXT, nullable=False),
        sa.Column("event_id", TEXT, nullable=False),
        sa.Column("type", TEXT, nullable=False),
        sa.Column("uri", TEXT, nullable=False),
        sa.Column("run", TEXT, nullable=False),
        sa.Column("step", BIGINT, nullable=True),
        sa.Column("body", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("attempts", BIGINT, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("received_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("flow_run_id", TEXT, nullable=True),
        sa.Column("error_message", TEXT, nullable=True),
        sa.Column("attempts_before", BIGINT, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_inbox"),
        sa.UniqueConstraint("source", "event_id", name="uq_inbox_source_event_id"),
        sa.UniqueConstraint("uuid", name="uq_inbox_uuid"),
    )
    op.create_index("ix_inbox_flow_run_id", "inbox", ["flow_run_id"])
    op.create_index("ix_inbox_received_at", "inbox", ["received_at"])
    op.create_index("ix_inbox_state_due_at", "inbox", ["state", "due_at"])
    op.create_index("ix_inbox_uri", "inbox", ["uri"])
    op.create_table(
        "outbox",
        sa.Column("id", ID, nullable=False),
        sa.Column("uuid", TEXT, nullable=False),
        sa.Column("endpoint", TEXT, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.Column("type", TEXT, nullable=False),
        sa.Column("body", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("attempts", BIGINT, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("error_message", TEXT, nullable=True),
        sa.Column("attempts_before", BIGINT, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.UniqueConstraint("endpoint", "key", name="uq_outbox_endpoint_key"),
        sa.UniqueConstraint("uuid", name="uq_outbox_uuid"),
    )
    op.create_index("ix_outbox_created_at", "outbox", ["created_at"])
    op.create_index("ix_outbox_state_due_at", "outbox", ["state", "due_at"])
    op.create_table(
        "sightings",
        sa.Column("id", ID, nullable=False),
        sa.Column("uri", TEXT, nullable=False),
        sa.Column("root", TEXT, nullable=False),
        sa.Column("step", BIGINT, nullable=True),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("stamp", TEXT, nullable=False),
        sa.Column("source_digest", TEXT, nullable=True),
        sa.Column("manifest_digest", TEXT, nullable=True),
        sa.Column("findings", TEXT, nullable=False),
        sa.Column("first_seen_at", TIME, nullable=False),
        sa.Column("last_seen_at", TIME, nullable=False),
        sa.Column("changed_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sightings"),
        sa.UniqueConstraint("uri", name="uq_sightings_uri"),
    )
    op.create_index("ix_sightings_root_state", "sightings", ["root", "state"])
    op.create_table(
        "training_run",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_training_run"),
        sa.UniqueConstraint("name", name="uq_training_run_name"),
    )
    op.create_table(
        "watched_roots",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("uri", TEXT, nullable=False),
        sa.Column("include", TEXT, nullable=False),
        sa.Column("target", TEXT, nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("swept_at", TIME, nullable=True),
        sa.Column("swept_note", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_watched_roots"),
        sa.UniqueConstraint("name", name="uq_watched_roots_name"),
    )
    op.create_index("ix_watched_roots_uri", "watched_roots", ["uri"])
    op.create_table(
        "checkpoint",
        sa.Column("id", ID, nullable=False),
        sa.Column("uuid", TEXT, nullable=False),
        sa.Column("run_id", ID, nullable=True),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("format", TEXT, nullable=False),
        sa.Column("uri", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("step", BIGINT, nullable=True),
        sa.Column("total_bytes", BIGINT, nullable=False),
        sa.Column("num_tensors", BIGINT, nullable=False),
        sa.Column("num_files", BIGINT, nullable=False),
        sa.Column("dtypes", TEXT, nullable=False),
        sa.Column("manifest_digest", TEXT, nullable=False),
        sa.Column("content_digest", TEXT, nullable=False),
        sa.Column("origin", TEXT, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("verified_at", TIME, nullable=True),
        sa.Column("verified_level", TEXT, nullable=True),
        sa.Column("replaced_at", TIME, nullable=True),
        sa.Column("fingerprint", TEXT, nullable=True),
        sa.Column("checked_at", TIME, nullable=True),
        sa.Column("deleted_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["training_run.id"], name="fk_checkpoint_run_id_training_run"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoint"),
        sa.UniqueConstraint(
            "uri",
            "manifest_digest",
            "content_digest",
            name="uq_checkpoint_uri_manifest_digest_content_digest",
        ),
        sa.UniqueConstraint("uuid", name="uq_checkpoint_uuid"),
    )
    op.create_index("ix_checkpoint_content_digest", "checkpoint", ["content_digest"])
    op.create_index("ix_checkpoint_created_at", "checkpoint", ["created_at"])
    op.create_index("ix_checkpoint_fingerprint", "checkpoint", ["fingerprint"])
    op.create_index("ix_checkpoint_manifest_digest", "checkpoint", ["manifest_digest"])
    op.create_index(
        "ix_checkpoint_run_id_state_kind_step_total_bytes_created_at",
        "checkpoint",
        ["run_id", "state", "kind", "step", "total_bytes", "created_at"],
    )
    op.create_index("ix_checkpoint_run_id_step", "checkpoint", ["run_id", "step"])
    op.create_index("ix_checkpoint_state_created_at", "checkpoint", ["state", "created_at"])
    op.create_table(
        "conversion_process",
        sa.Column("conversion_id", ID, nullable=False),
        sa.Column("process", TEXT, nullable=False),
        sa.Column("renewed_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(
            ["conversion_id"], ["conversion.id"], name="fk_conversion_process_conversion_id_conversion"
        ),
        sa.PrimaryKeyConstraint("conversion_id", name="pk_conversion_process"),
    )
    op.create_table(
        "aliases",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("version", BIGINT, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_aliases_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_aliases"),
        sa.UniqueConstraint("name", name="uq_aliases_name"),
    )
    op.create_index("ix_aliases_checkpoint_id", "aliases", ["checkpoint_id"])
    op.create_table(
        "checkpoint_file",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("path", TEXT, nullable=False),
        sa.Column("nbytes", BIGINT, nullable=False),
        sa.Column("digest", TEXT, nullable=True),
        sa.Column("role", TEXT, server_default="data", nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_checkpoint_file_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "path", name="pk_checkpoint_file"),
    )
    op.create_index("ix_checkpoint_file_digest", "checkpoint_file", ["digest"])
    op.create_table(
        "conversion_io",
        sa.Column("conversion_id", ID, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("direction", TEXT, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_conversion_io_checkpoint_id_checkpoint"
        ),
        sa.ForeignKeyConstraint(
            ["conversion_id"], ["conversion.id"], name="fk_conversion_io_conversion_id_conversion"
        ),
        sa.PrimaryKeyConstraint("conversion_id", "checkpoint_id", "direction", name="pk_conversion_io"),
    )
    op.create_index(
        "ix_conversion_io_checkpoint_id_direction", "conversion_io", ["checkpoint_id", "direction"]
    )
    op.create_table(
        "finding",
        sa.Column("id", ID, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=True),
        sa.Column("conversion_id", ID, nullable=True),
        sa.Column("code", TEXT, nullable=False),
        sa.Column("level", TEXT, nullable=False),
        sa.Column("severity", TEXT, nullable=False),
        sa.Column("message", TEXT, nullable=False),
        sa.Column("fqn", TEXT, nullable=True),
        sa.Column("file", TEXT, nullable=True),
        sa.Column("hint", TEXT, nullable=False),
        sa.Column("found_at", TIME, nullable=False),
        sa.Column("resolved_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_finding_checkpoint_id_checkpoint"
        ),
        sa.ForeignKeyConstraint(
            ["conversion_id"], ["conversion.id"], name="fk_finding_conversion_id_conversion"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_finding"),
    )
    op.create_index("ix_finding_checkpoint_id_resolved_at", "finding", ["checkpoint_id", "resolved_at"])
    op.create_index("ix_finding_code", "finding", ["code"])
    op.create_index("ix_finding_conversion_id", "finding", ["conversion_id"])
    op.create_table(
        "given_up",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("kind", TEXT, nullable=False),
        sa.Column("nbytes", BIGINT, nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_given_up_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "name", "kind", name="pk_given_up"),
    )
    op.create_table(
        "holdings",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("stamp", TEXT, nullable=True),
        sa.Column("ids", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_holdings_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_holdings"),
    )
    op.create_table(
        "holds",
        sa.Column("id", ID, nullable=False),
        sa.Column("uuid", TEXT, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("reason", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("placed_at", TIME, nullable=False),
        sa.Column("until", TIME, nullable=True),
        sa.Column("released_at", TIME, nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_holds_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_holds"),
        sa.UniqueConstraint("uuid", name="uq_holds_uuid"),
    )
    op.create_index("ix_holds_checkpoint_id_released_at", "holds", ["checkpoint_id", "released_at"])
    op.create_table(
        "metric",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("nonfinite", TEXT, nullable=True),
        sa.Column("step", BIGINT, nullable=True),
        sa.Column("source", TEXT, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_metric_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "name", name="pk_metric"),
    )
    op.create_index("ix_metric_name_value", "metric", ["name", "value"])
    op.create_table(
        "obligation",
        sa.Column("id", ID, nullable=False),
        sa.Column("uuid", TEXT, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=True),
        sa.Column("source", TEXT, nullable=False),
        sa.Column("place", TEXT, nullable=False),
        sa.Column("specs", sa.LargeBinary(), nullable=False),
        sa.Column("contents", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("lost", BIGINT, server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_obligation_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_obligation"),
        sa.UniqueConstraint("uuid", name="uq_obligation_uuid"),
    )
    op.create_index("ix_obligation_checkpoint_id", "obligation", ["checkpoint_id"])
    op.create_index("ix_obligation_place", "obligation", ["place"])
    op.create_index("ix_obligation_source", "obligation", ["source"])
    op.create_table(
        "retirement",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("child", TEXT, nullable=False),
        sa.Column("proof", TEXT, nullable=False),
        sa.Column("fingerprint", TEXT, nullable=True),
        sa.Column("freed", BIGINT, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_retirement_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_retirement"),
    )
    op.create_table(
        "set_aside",
        sa.Column("record", TEXT, nullable=False),
        sa.Column("checkpoint_id", ID, nullable=True),
        sa.Column("uri", TEXT, nullable=False),
        sa.Column("nbytes", BIGINT, nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("digest", TEXT, nullable=False),
        sa.Column("purging", sa.Boolean(), nullable=False),
        sa.Column("folder", TEXT, server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_set_aside_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("record", name="pk_set_aside"),
    )
    op.create_index("ix_set_aside_checkpoint_id", "set_aside", ["checkpoint_id"])
    op.create_index("ix_set_aside_due_at", "set_aside", ["due_at"])
    op.create_index("ix_set_aside_uri", "set_aside", ["uri"])
    op.create_table(
        "tag",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("key", TEXT, nullable=False),
        sa.Column("value", TEXT, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["checkpoint_id"], ["checkpoint.id"], name="fk_tag_checkpoint_id_checkpoint"),
        sa.PrimaryKeyConstraint("checkpoint_id", "key", name="pk_tag"),
    )
    op.create_index("ix_tag_key_value", "tag", ["key", "value"])
    op.create_table(
        "tensor",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("fqn", TEXT, nullable=False),
        sa.Column("dtype", TEXT, nullable=False),
        sa.Column("shape", TEXT, nullable=False),
        sa.Column("nbytes", BIGINT, nullable=False),
        sa.Column("fingerprint", TEXT, nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_tensor_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "fqn", name="pk_tensor"),
    )
    op.create_index("ix_tensor_fingerprint", "tensor", ["fingerprint"])
    op.create_index("ix_tensor_fqn", "tensor", ["fqn"])
    op.create_table(
        "training_facts",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("git_commit", TEXT, nullable=True),
        sa.Column("user_name", TEXT, nullable=True),
        sa.Column("dataset", TEXT, nullable=True),
        sa.Column("job_url", TEXT, nullable=True),
        sa.Column("framework", TEXT, nullable=True),
        sa.Column("epoch", sa.Double(), nullable=True),
        sa.Column("samples", BIGINT, nullable=True),
        sa.Column("tokens", BIGINT, nullable=True),
        sa.Column("config", TEXT, nullable=False),
        sa.Column("extra", TEXT, nullable=False),
        sa.Column("sources", TEXT, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_training_facts_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_training_facts"),
    )
    op.create_index("ix_training_facts_git_commit", "training_facts", ["git_commit"])


def downgrade() -> None:
    for table in (
        "training_facts",
        "tensor",
        "tag",
        "set_aside",
        "retirement",
        "obligation",
        "metric",
        "holds",
        "holdings",
        "given_up",
        "finding",
        "conversion_io",
        "checkpoint_file",
        "aliases",
        "conversion_process",
        "checkpoint",
        "watched_roots",
        "training_run",
        "sightings",
        "outbox",
        "inbox",
        "conversion",
        "claims",
        "audit",
    ):
        op.drop_table(table)
