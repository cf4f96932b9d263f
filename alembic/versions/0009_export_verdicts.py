"""Record the verdicts of `verify-export` on conversions, and create views that respect them."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

COLUMNS = {
    "export_verdict": sa.Text(),
    "export_checks": sa.Text(),
    "export_verified_at": sa.DateTime(timezone=True),
}


def upgrade() -> None:
    with op.batch_alter_table("conversion", recreate=_recreate()) as batch:
        for name, kind in COLUMNS.items():
            batch.add_column(sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("conversion", recreate=_recreate()) as batch:
        for name in reversed(COLUMNS):
            batch.drop_column(name)


def _recreate():
    # SQLite adds a column after the constraints, so the schema would differ from that of a new catalog.
    return "always" if op.get_context().dialect.name == "sqlite" else "never"
