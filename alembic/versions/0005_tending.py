"""State of sweep, scrub and retire: sightings, claims, when a checkpoint was checked or deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
BIGINT = sa.BigInteger()
TEXT = sa.Text()
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "sightings",
        sa.Column("id", ID, nullable=False),
        sa.Column("uri", TEXT, nullable=False),
        sa.Column("root", TEXT, nullable=False),
        sa.Column("step", BIGINT, nullable=True),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("stamp", TEXT, nullable=False),
        sa.Column("source_digest", TEXT, nullable=True),
        sa.Column("manifest_digest", TEXT, nullable=True),
        sa.Column("findings", TEXT, nullable=False),
        sa.Column("first_seen_at", TIME, nullable=False),
        sa.Column("last_seen_at", TIME, nullable=False),
        sa.Column("changed_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sightings"),
        sa.UniqueConstraint("uri", name="uq_sightings_uri"),
    )
    op.create_index("ix_sightings_root_state", "sightings", ["root", "state"])
    op.create_table(
        "claims",
        sa.Column("id", ID, nullable=False),
        sa.Column("source_digest", TEXT, nullable=False),
        sa.Column("destination_uri", TEXT, nullable=False),
        sa.Column("options_digest", TEXT, nullable=False),
        sa.Column("source_uri", TEXT, nullable=False),
        sa.Column("state", TEXT, nullable=False),
        sa.Column("owner", TEXT, nullable=False),
        sa.Column("attempts", BIGINT, nullable=False),
        sa.Column("taken_at", TIME, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("error_code", TEXT, nullable=True),
        sa.Column("error_message", TEXT, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_claims"),
        sa.UniqueConstraint(
            "source_digest",
            "destination_uri",
            "options_digest",
            name="uq_claims_source_digest_destination_uri_options_digest",
        ),
    )
    op.create_index("ix_claims_destination_uri", "claims", ["destination_uri"])
    op.create_index("ix_claims_source_uri", "claims", ["source_uri"])
    with op.batch_alter_table("checkpoint", recreate=_recreate()) as batch:
        batch.add_column(sa.Column("checked_at", TIME, nullable=True))
        batch.add_column(sa.Column("deleted_at", TIME, nullable=True))


def downgrade() -> None:
    # Older versions have no such states: to them, a missing checkpoint was replaced.
    op.execute("UPDATE checkpoint SET state = 'replaced' WHERE state IN ('gone', 'deleted')")
    with op.batch_alter_table("checkpoint", recreate=_recreate()) as batch:
        batch.drop_column("deleted_at")
        batch.drop_column("checked_at")
    op.drop_table("claims")
    op.drop_table("sightings")


def _recreate():
    # SQLite adds a column after the constraints, so the schema would differ from that of a new catalog.
    return "always" if op.get_context().dialect.name == "sqlite" else "never"
