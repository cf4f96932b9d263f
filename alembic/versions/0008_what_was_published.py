"""Record the stamps of a conversion's source files, and which published files contain tensors.

`source_stamp` and `source_ctime` are digests over the stamps of the source's files
(`ckptcore/execution/source_stamps.py`); `role` separates files with tensors from the other published files:
config, tokenizer, index, card.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

STAMPS = ("source_stamp", "source_ctime")


def upgrade() -> None:
    with op.batch_alter_table("conversion", recreate=_recreate()) as batch:
        for name in STAMPS:
            batch.add_column(sa.Column(name, sa.Text(), nullable=True))
    with op.batch_alter_table("checkpoint_file", recreate=_recreate()) as batch:
        batch.add_column(sa.Column("role", sa.Text(), nullable=False, server_default="data"))


def downgrade() -> None:
    # Rows of other files stay: an older version verifies every file whose digest is known.
    with op.batch_alter_table("checkpoint_file", recreate=_recreate()) as batch:
        batch.drop_column("role")
    with op.batch_alter_table("conversion", recreate=_recreate()) as batch:
        for name in reversed(STAMPS):
            batch.drop_column(name)


def _recreate():
    # SQLite adds a column after the constraints, so the schema would differ from that of a new catalog.
    return "always" if op.get_context().dialect.name == "sqlite" else "never"
