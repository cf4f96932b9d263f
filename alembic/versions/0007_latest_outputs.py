"""The newest exports are those that were exported, one per dtype; other outputs have a view of their own.

No table changes: the views are made anew behind the last revision (`ckptcore/catalog/views.py`).
"""

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No table changes."""


def downgrade() -> None:
    """No table changes."""
