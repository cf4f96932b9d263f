"""The first views. Those of any revision are made behind the last one, by `ckptcore/catalog/views.py`."""

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No table changes."""


def downgrade() -> None:
    """No table changes."""
