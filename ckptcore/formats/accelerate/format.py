"""Read Accelerate and Hugging Face Trainer checkpoints of FSDP jobs: model, optimizer and trainer state.

Model and optimizer are each a DCP folder (sharded), a file per rank (``use_dcp=False``) or one file
(full). Names: ``model.<fqn>``, ``optimizer.state.<fqn>.<key>``, ``scheduler.<key>``,
``random_states.<key>``; a second model is ``model_1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import encode
from ckptcore.core.tree_paths import Path, Paths
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.limits import absent
from ckptcore.errors import (
    AmbiguousModel,
    CkptError,
    MalformedCheckpoint,
    MetadataTooLarge,
    UnsupportedFormat,
    finding,
)
from ckptcore.formats.accelerate import file_names as names
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Reader, Source, Writer
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.dcp.format import thin
from ckptcore.formats.dcp.reader import read_folder
from ckptcore.utils.foreign_text import InvalidText

_NAME = "accelerate"
_TRAINER = "trainer_state.json"
_MAX_JSON = 64 << 20
_MAX_LISTED = 100


def detect(source: Source) -> Evidence | None:
    """Recognise a model by Accelerate's name, unless a *.safetensors beside it is what loaders read."""
    if not names.has_model(source):
        return None
    parts = names.parts(source)
    folders = any(p.folder for p in parts if p.role.startswith("model"))
    if not folders and any(p.endswith(".safetensors") and "/" not in p for p in source.listing):
        return None
    return Evidence(_NAME, (f"found {', '.join(p.label for p in parts)}",), ("torch_ranks", "torch_save"))


def read(source: Source) -> Manifest:
    """Read the manifest of all parts together; a missing part is a finding.

    Raises:
        NotComplete: A DCP folder has no metadata.
        UnsupportedFormat: The ranks saved local state dicts.
        AmbiguousModel: A part exists twice.
    """
    from ckptcore.formats.torch_ranks.reader import RankReader

    builder = Builder()
    reader = RankReader(source, builder)
    parts: list[Part] = []
    by_role: dict[str, names.SavedPart] = {}
    for part in names.parts(source):
        if part.role in by_role:
            raise AmbiguousModel(
                f"{by_role[part.role].label} and {part.label} are both the {part.role}: "
                "two saves in one folder",
                hint="move one of them away, or name the folder to read",
            )
        by_role[part.role] = part
        if part.folder:
            inner = read_folder(source.below(part.folder), _NAME)
            parts.append(Part(inner, part.folder, _renaming(part.role)))
        else:
            reader.add(part.files, part.role)
    # After all parts: the files of each show ranks that took part.
    for part in by_role.values():
        builder.findings += () if part.folder else reader.missing(part.files)
    if not any(role.startswith("optimizer") for role in by_role):
        message = "there is no optimizer beside the model"
        builder.findings.append(finding("missing-part", "files", message, file="optimizer_0"))
    world = max(names.writers(source), default=-1) + 1
    for part in names.states(source):
        try:
            reader.add(part.files, part.role, optional=True)
        except MalformedCheckpoint as error:
            builder.findings.append(finding("malformed-item", "coverage", error.message, file=part.label))
        highest = max(part.files.paths)
        ranks = max(highest + 1, world if names.of_a_rank(part) else 0)
        for rank in absent(part.files.paths, ranks, _MAX_LISTED):
            path = part.files.name_of(rank)
            message = f"{path} is missing; other ranks have theirs"
            builder.findings.append(finding("missing-part", "files", message, file=path))
        if names.of_a_rank(part) and 0 < world <= highest:
            path = part.files.paths[highest]
            message = (
                f"{path} is the only file of its rank: rank {world - 1} is the last rank with other files"
            )
            builder.findings.append(finding("missing-part", "files", message, file=path))
    origin: dict[str, Any] = {"parts": list(by_role)}
    _trainer_state(source, builder, origin)
    if reader.world:
        origin["world_size"] = reader.world
    paths = reader.paths
    for folder in parts:
        for name, where in Paths.of(folder.manifest).items():
            renamed = folder.rename(name)
            paths.add(renamed, where if renamed == name else (renamed.split(".", 1)[0], *where[1:]))
    parts.append(Part(builder.build(_NAME, source.store.url, {})))
    joined = join(_NAME, source.store.url, parts, origin)
    form = paths.form([t.fqn for t in joined.tensors], [b.key for b in joined.blobs])
    return replace(joined, origin={**origin, "paths": form}) if form else joined


def _renaming(role: str) -> Callable[[str], str]:
    """Return the renaming of a DCP part's keys, which begin with ``model`` or ``optimizer`` in every part."""
    plain = role.rstrip("0123456789").rstrip("_")
    if plain == role:
        return str
    return lambda name: role + name.removeprefix(plain) if name.startswith(plain + ".") else f"{role}.{name}"


def _trainer_state(source: Source, builder: Builder, origin: dict[str, Any]) -> None:
    """Add the Trainer's ``trainer_state.json`` as an object of its own."""
    size = source.listing.get(_TRAINER, 0)
    if not 0 < size <= _MAX_JSON:
        return
    try:
        state = parse(source.store.read(_TRAINER, 0, size), _TRAINER)
        tree = encode(state)
    except MetadataTooLarge:
        raise
    except (CkptError, InvalidText, TypeError) as error:
        builder.findings.append(
            finding("malformed-metadata", "files", f"{_TRAINER}: {error}", file=_TRAINER, hint="")
        )
        return
    source.explain(_TRAINER)
    builder.blobs.append(Blob("trainer_state", -1, tree))
    if isinstance(state, dict) and type(state.get("global_step")) is int:
        origin["step"] = state["global_step"]


def keeps_its_place(source: Manifest) -> Callable[[Path], Path]:
    """Return the mapping of paths: every path stays as it is.

    Raises:
        UnsupportedFormat: The source is not of a job under Accelerate's FSDP.
    """
    if not (source.origin.get("parts") and Paths.of(source)):
        raise UnsupportedFormat(
            f"{source.root} must be a folder of Accelerate or the Trainer (got {source.format}, without "
            "pytorch_model_fsdp_0 beside its optimizer)",
            hint="--to dcp writes rank files from any source",
        )
    return lambda path: path


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out the folder that `load_state` opens, on the requested mesh."""
    from ckptcore.formats.accelerate.writer import arrange as arrange_parts

    return arrange_parts(request)


_LAYOUT = Layout(arrange, nests=True, place=keeps_its_place, values="libraries", flattens=True)
FORMAT = Format(
    name=_NAME,
    title="Accelerate or Hugging Face Trainer checkpoint of an FSDP job",
    recognised_by="`pytorch_model_fsdp_N/` or `pytorch_model_fsdp*.bin`, beside `optimizer_N/`",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per item", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT),
    thin=thin,
)
