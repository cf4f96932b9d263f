"""Count the attempts of a retried row of a queue from zero; create the views of this revision.

The views of lineage were changed after 0005: a catalog that was created in between has the slow ones until a
migration runs (`ckptcore/catalog/views.py`).
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

QUEUES = ("inbox", "outbox")
BEFORE = ("attempts_before", sa.BigInteger())


def upgrade() -> None:
    for table in QUEUES:
        with op.batch_alter_table(table, recreate=_recreate()) as batch:
            batch.add_column(sa.Column(*BEFORE, nullable=False, server_default="0"))


def downgrade() -> None:
    for table in QUEUES:
        with op.batch_alter_table(table, recreate=_recreate()) as batch:
            batch.drop_column("attempts_before")


def _recreate():
    # SQLite adds a column after the constraints, so the schema would differ from that of a new catalog.
    return "always" if op.get_context().dialect.name == "sqlite" else "never"
