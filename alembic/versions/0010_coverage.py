"""The check level `cover` is called `coverage`, in checkpoints, findings and sightings.

No table changes. Release 0.1 wrote `cover`.
"""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

COLUMNS = (("checkpoint", "verified_level"), ("finding", "level"))


def upgrade() -> None:
    _rename("cover", "coverage")


def downgrade() -> None:
    _rename("coverage", "cover")


def _rename(before: str, after: str) -> None:
    for table, column in COLUMNS:
        op.execute(f"UPDATE {table} SET {column} = '{after}' WHERE {column} = '{before}'")
    # The findings of a sighting are compact JSON (`clean_json`), where quotes inside of texts are escaped.
    replaced = f"""replace(findings, '"level":"{before}"', '"level":"{after}"')"""
    op.execute(f"UPDATE sightings SET findings = {replaced} WHERE findings <> {replaced}")
