"""Let odd rows leave the other rows of the views, and show exports that open only; no table changes."""

revision = "v2"
down_revision = "v1"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change nothing here: each migration drops the views, and the last one makes those of `HEAD`."""


def downgrade() -> None:
    """Change nothing here."""
