"""Name a complete checkpoint that a sweep saw by the word that everything else uses."""

from alembic import op

revision = "v5"
down_revision = "v4"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("UPDATE sightings SET state = 'complete' WHERE state = 'whole'")


def downgrade() -> None:
    op.execute("UPDATE sightings SET state = 'whole' WHERE state = 'complete'")
