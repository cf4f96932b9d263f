"""Run the migrations: Alembic's entry point.

`ckptcore catalog upgrade` passes its own connection. The `alembic` command opens the catalog of
CKPTCORE_CATALOG_URL (or the default one) in the same way. Migrations run in one transaction with foreign keys
off, and the keys are checked before it commits.
"""

from alembic import context

from ckptcore.catalog import default_url
from ckptcore.catalog.database import HEAD, parse
from ckptcore.catalog.migrate import migrating
from ckptcore.catalog.models import Base, UtcDateTime
from ckptcore.catalog.views import comment_statements, create_statements


def render_item(kind, item, _context):
    """Write times in migrations as plain SQLAlchemy types: migrations must outlast today's classes."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    return False


OPTIONS = {
    "target_metadata": Base.metadata,
    "render_as_batch": True,  # SQLite can alter hardly anything in place
    "compare_type": True,
    "render_item": render_item,
}


def run(connection):
    context.configure(connection=connection, **OPTIONS)
    context.run_migrations()


given = context.config.attributes.get("connection")
if context.is_offline_mode():
    context.configure(url=parse(default_url()), literal_binds=True, **OPTIONS)
    with context.begin_transaction():
        context.run_migrations()
        if context.get_revision_argument() in ("head", HEAD):
            dialect = context.get_context().dialect
            comments = comment_statements() if dialect.supports_comments else []
            for statement in [*create_statements(dialect.name), *comments]:
                context.execute(statement)
elif given is not None:
    run(given)
else:
    with migrating(default_url()) as own:
        run(own)
