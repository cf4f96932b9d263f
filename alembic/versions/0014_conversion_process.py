"""Record the process of a conversion that runs: one that is known to have ended runs nothing."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "conversion_process",
        sa.Column("conversion_id", ID, autoincrement=False, nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversion_id"], ["conversion.id"], name="fk_conversion_process_conversion_id_conversion"
        ),
        sa.PrimaryKeyConstraint("conversion_id", name="pk_conversion_process"),
    )


def downgrade() -> None:
    op.drop_table("conversion_process")
