"""The first tables: training runs, checkpoints, files, tensors, conversions, findings, tags."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BIGINT = sa.BigInteger()
TEXT = sa.Text()
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
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
        sa.PrimaryKeyConstraint("id", name="pk_conversion"),
        sa.UniqueConstraint("uuid", name="uq_conversion_uuid"),
    )
    op.create_index("ix_conversion_destination_uri", "conversion", ["destination_uri"])
    op.create_index("ix_conversion_flow_run_id", "conversion", ["flow_run_id"])
    op.create_index("ix_conversion_source_uri", "conversion", ["source_uri"])
    op.create_index("ix_conversion_started_at", "conversion", ["started_at"])
    op.create_index("ix_conversion_state_started_at", "conversion", ["state", "started_at"])
    op.create_table(
        "training_run",
        sa.Column("id", ID, nullable=False),
        sa.Column("name", TEXT, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_training_run"),
        sa.UniqueConstraint("name", name="uq_training_run_name"),
    )
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
    op.create_index("ix_checkpoint_manifest_digest", "checkpoint", ["manifest_digest"])
    op.create_index("ix_checkpoint_run_id_step", "checkpoint", ["run_id", "step"])
    op.create_index("ix_checkpoint_state_created_at", "checkpoint", ["state", "created_at"])
    op.create_table(
        "checkpoint_file",
        sa.Column("checkpoint_id", ID, nullable=False),
        sa.Column("path", TEXT, nullable=False),
        sa.Column("nbytes", BIGINT, nullable=False),
        sa.Column("digest", TEXT, nullable=True),
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
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_tensor_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "fqn", name="pk_tensor"),
    )
    op.create_index("ix_tensor_fqn", "tensor", ["fqn"])


def downgrade() -> None:
    for table in (
        "tensor",
        "tag",
        "finding",
        "conversion_io",
        "checkpoint_file",
        "checkpoint",
        "training_run",
        "conversion",
    ):
        op.drop_table(table)
