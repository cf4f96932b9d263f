"""Record fingerprints of what jobs had in memory, and whether their checkpoints are equal to them."""

import sqlalchemy as sa
from alembic import op

revision = "v3"
down_revision = "v2"
branch_labels = None
depends_on = None

COLUMNS = ("live_fingerprint", "live_model_fingerprint", "live_verdict", "live_compared")
INDEXED = COLUMNS[:2]


def upgrade() -> None:
    with op.batch_alter_table("training_facts", recreate=_recreate()) as batch:
        for name in COLUMNS:
            batch.add_column(sa.Column(name, sa.Text(), nullable=True))
    for name in INDEXED:
        op.create_index(f"ix_training_facts_{name}", "training_facts", [name])


def downgrade() -> None:
    for name in INDEXED:
        op.drop_index(f"ix_training_facts_{name}", table_name="training_facts")
    with op.batch_alter_table("training_facts", recreate=_recreate()) as batch:
        for name in reversed(COLUMNS):
            batch.drop_column(name)


def _recreate():
    # A column that SQLite adds in place is behind the constraints: another schema, to whoever reads it.
    return "always" if op.get_context().dialect.name == "sqlite" else "never"
