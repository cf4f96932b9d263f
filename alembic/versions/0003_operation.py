"""What runs by itself: watched roots, inbox, outbox, aliases, holds."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BIGINT = sa.BigInteger()
TEXT = sa.Text()
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
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
        sa.PrimaryKeyConstraint("id", name="pk_outbox"),
        sa.UniqueConstraint("endpoint", "key", name="uq_outbox_endpoint_key"),
        sa.UniqueConstraint("uuid", name="uq_outbox_uuid"),
    )
    op.create_index("ix_outbox_created_at", "outbox", ["created_at"])
    op.create_index("ix_outbox_state_due_at", "outbox", ["state", "due_at"])
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


def downgrade() -> None:
    for table in ("holds", "aliases", "outbox", "inbox", "watched_roots"):
        op.drop_table(table)
