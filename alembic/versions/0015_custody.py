"""Record what checkpoints hold, what must not go, and what is set aside; conversions show signs of life."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    with op.batch_alter_table("conversion_process", recreate=_recreate()) as batch:
        batch.add_column(sa.Column("renewed_at", TIME, nullable=True))
    op.create_table(
        "holdings",
        sa.Column("checkpoint_id", ID, autoincrement=False, nullable=False),
        sa.Column("stamp", sa.Text(), nullable=True),
        sa.Column("ids", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_holdings_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_holdings"),
    )
    op.create_table(
        "set_aside",
        sa.Column("record", sa.Text(), nullable=False),
        sa.Column("checkpoint_id", ID, nullable=True),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("purging", sa.Boolean(), nullable=False),
        sa.Column("folder", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_set_aside_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("record", name="pk_set_aside"),
    )
    for name in ("checkpoint_id", "due_at", "uri"):
        op.create_index(f"ix_set_aside_{name}", "set_aside", [name])
    op.create_table(
        "obligation",
        sa.Column("id", ID, nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("checkpoint_id", ID, nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("place", sa.Text(), nullable=False),
        sa.Column("specs", sa.LargeBinary(), nullable=False),
        sa.Column("contents", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("lost", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_obligation_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_obligation"),
        sa.UniqueConstraint("uuid", name="uq_obligation_uuid"),
    )
    for name in ("checkpoint_id", "place", "source"):
        op.create_index(f"ix_obligation_{name}", "obligation", [name])


def downgrade() -> None:
    for table in ("obligation", "set_aside", "holdings"):
        op.drop_table(table)
    with op.batch_alter_table("conversion_process", recreate=_recreate()) as batch:
        batch.drop_column("renewed_at")


def _recreate():
    # SQLite adds a column after the constraints, so the schema would differ from that of a new catalog.
    return "always" if op.get_context().dialect.name == "sqlite" else "never"
