"""The first views. `ckptcore/catalog/views.py` creates the views of any revision after the last migration."""

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No table changes."""


def downgrade() -> None:
    """No table changes."""
