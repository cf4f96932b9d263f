"""Record statistics of the tensors of each step, and show the history of a run and its alarms."""

import sqlalchemy as sa
from alembic import op

revision = "v4"
down_revision = "v3"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "step_statistics",
        sa.Column("checkpoint_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("columns", sa.LargeBinary(), nullable=False),
        sa.Column("tensors", sa.BigInteger(), nullable=False),
        sa.Column("norm", sa.Double(), nullable=True),
        sa.Column("absmax", sa.Double(), nullable=True),
        sa.Column("nan", sa.BigInteger(), nullable=False),
        sa.Column("inf", sa.BigInteger(), nullable=False),
        sa.Column("zeros", sa.BigInteger(), nullable=False),
        sa.Column("change", sa.Double(), nullable=True),
        sa.Column("against", sa.Text(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_step_statistics_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_step_statistics"),
    )
    op.create_index(
        "ix_finding_level_resolved_at_checkpoint_id", "finding", ["level", "resolved_at", "checkpoint_id"]
    )


def downgrade() -> None:
    op.drop_index("ix_finding_level_resolved_at_checkpoint_id", table_name="finding")
    op.drop_table("step_statistics")
