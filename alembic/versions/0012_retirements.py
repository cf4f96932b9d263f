"""Record how deleted sources were proven, and what was given up with them."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "retirement",
        sa.Column("checkpoint_id", ID, autoincrement=False, nullable=False),
        sa.Column("child", sa.Text(), nullable=False),
        sa.Column("proof", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=True),
        sa.Column("freed", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_retirement_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_retirement"),
    )
    op.create_table(
        "given_up",
        sa.Column("checkpoint_id", ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoint.id"], name="fk_given_up_checkpoint_id_checkpoint"
        ),
        sa.PrimaryKeyConstraint("checkpoint_id", "name", "kind", name="pk_given_up"),
    )


def downgrade() -> None:
    op.drop_table("given_up")
    op.drop_table("retirement")
