"""Restrict the view of newest exports to exports, one per dtype; add a view for all outputs.

No table changes: the views are recreated after the last revision (`ckptcore/catalog/views.py`).
"""

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No table changes."""


def downgrade() -> None:
    """No table changes."""
