"""Fingerprints: of checkpoints, of their tensors, and of what a conversion carried."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

COLUMNS = {
    "checkpoint": ("fingerprint",),
    "tensor": ("fingerprint",),
    "conversion": ("map_digest", "fingerprint"),
}


def upgrade() -> None:
    for table, columns in COLUMNS.items():
        with op.batch_alter_table(table, recreate=_recreate()) as batch:
            for column in columns:
                batch.add_column(sa.Column(column, sa.Text(), nullable=True))
        op.create_index(f"ix_{table}_fingerprint", table, ["fingerprint"])


def downgrade() -> None:
    for table, columns in COLUMNS.items():
        op.drop_index(f"ix_{table}_fingerprint", table)
        with op.batch_alter_table(table, recreate=_recreate()) as batch:
            for column in columns:
                batch.drop_column(column)


def _recreate():
    # SQLite adds a column after the constraints, so the schema would differ from that of a new catalog.
    return "always" if op.get_context().dialect.name == "sqlite" else "never"
