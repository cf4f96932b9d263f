"""Sum the checkpoints of runs from an index; views say which exports no engine opens."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

NAME = "ix_checkpoint_run_id_state_kind_step_total_bytes_created_at"
COLUMNS = ["run_id", "state", "kind", "step", "total_bytes", "created_at"]


def upgrade() -> None:
    op.create_index(NAME, "checkpoint", COLUMNS)


def downgrade() -> None:
    op.drop_index(NAME, "checkpoint")
