"""Record facts about trainings and their metrics, and who changed aliases and holds; views over both."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "training_facts",
        sa.Column("checkpoint_id", ID, autoincrement=False, nullable=False),
        sa.Column("git_commit", sa.Text(), nullable=True),
        sa.Column("user_name", sa.Text(), nullable=True),
        sa.Column("dataset", sa.Text(), nullable=True),
        sa.Column("job_url", sa.Text(), nullable=True),
        sa.Column("framework", sa.Text(), nullable=True),
        sa.Column("epoch", sa.Double(), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("extra", sa.Text(), nullable=False),
        sa.Column("sources", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_training_facts_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_training_facts"),
    )
    op.create_index("ix_training_facts_git_commit", "training_facts", ["git_commit"])
    op.create_table(
        "metric",
        sa.Column("checkpoint_id", ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("nonfinite", sa.Text(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_metric_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "name", name="pk_metric"),
    )
    op.create_index("ix_metric_name_value", "metric", ["name", "value"])
    op.create_table(
        "audit",
        sa.Column("id", ID, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_at", "audit", ["at"])
    op.create_index("ix_audit_subject_at", "audit", ["subject", "at"])


def downgrade() -> None:
    op.drop_table("audit")
    op.drop_table("metric")
    op.drop_table("training_facts")
