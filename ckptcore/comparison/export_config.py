"""Compare an export's config.json with what else says how its model computes.

That is the configs in the source (of its trainer, a config.json), the config.json that the export was made
with or that is beside the source, and the reference's. Tensors show none of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptcore.checking.examine import inspect
from ckptcore.checking.export_proof import CONFIG, Check, Problem, failed, passed
from ckptcore.comparison.export_sides import OpenExport
from ckptcore.errors import CkptError, NameMismatch
from ckptcore.naming.maps.numbers import Config
from ckptcore.naming.worlds import HUB
from ckptcore.planning.compose import model_names
from ckptcore.planning.config_agreement import agreement_of, config_beside, source_configs, unconfirmed_text
from ckptcore.planning.export_source import ExportSource
from ckptcore.planning.hub_files import CONFIG as CONFIG_FILE
from ckptcore.planning.hub_files import read_named
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import listed


def check_config(export: OpenExport, source: ExportSource | None, reference: str | None) -> Check | None:
    """Compare the config.json of an export with itself and with every other config of its model.

    Args:
        export: The export.
        source: What it was exported from, or None.
        reference: A folder whose config.json is right, or None.

    Returns:
        The check; None where there is no config.json that can be read, as the check of names says.
    """
    if export.config is None:
        return None
    try:
        own = Config("the export's config.json", HUB, export.config.form)
    except InvalidText:
        return None
    others = [*_of_source(source), *_of_reference(reference)]
    try:
        found = agreement_of(own, others)
    except NameMismatch as error:
        return failed(CONFIG, [Problem("", error.message)])
    values = {"compared_with": [c.name for c in others], "unconfirmed": list(found.unconfirmed)}
    if found.contradictions:
        return failed(CONFIG, [Problem(c.field, c.text) for c in found.contradictions], **values)
    of = f"no contradiction with {listed([c.name for c in others])}" if others else "no other config is known"
    open_fields = f"; {unconfirmed_text(found.unconfirmed)}" if found.unconfirmed else ""
    return passed(CONFIG, f"{of}{open_fields}", **values)


def _of_source(source: ExportSource | None) -> Iterable[Config]:
    """Yield the configs of the source and beside it; none of one that cannot be read, as other checks say."""
    if source is None:
        return
    request = source.request
    try:
        manifest = inspect(request.source, request.recover, request.keep_quantized, request.weights)
        names = model_names(request, manifest).values()
    except (CkptError, OSError):
        return
    if source.digest is not None and manifest.digest != source.digest and not source.asked:
        return  # another checkpoint
    yield from source_configs(manifest, names)
    beside = config_beside(request, manifest)
    if beside is not None:
        yield beside


def _of_reference(reference: str | None) -> Iterable[Config]:
    form = None if reference is None else read_named("--reference", reference).json(CONFIG_FILE)
    if form is not None:
        yield Config("the reference's config.json", HUB, form)
