"""Read legacy Megatron-LM checkpoints (`--ckpt-format torch`): one torch file per model-parallel rank.

An iteration's folder has ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` for each tensor, pipeline
and expert-parallel rank (megatron/training/checkpointing.py). The ranks' slices are merged into the
tensors of Megatron-Core's distributed checkpoints. Tensors of several ranks are replicas, compared
while they are moved: norms, routers, and in the last stage the copy of tied embeddings. Unpacked models of
NeMo 1 are read alike (`nemo_ranks`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, Refused, RefusedTensor, encode
from ckptcore.encodings.pickle.torch_globals import StoredView, storages_in
from ckptcore.encodings.torchzip.reader import Objects, refused_in
from ckptcore.errors import finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import leaves_below
from ckptcore.formats.megatron.legacy_merge import Merger, ModelChunk, model_of, unequal
from ckptcore.formats.megatron.legacy_names import NAME
from ckptcore.formats.megatron.legacy_optimizer import add_buffers, add_numbered
from ckptcore.formats.megatron.legacy_places import GROUP_RANKS, misplaced
from ckptcore.formats.megatron.legacy_ranks import RankFile, read_ranks
from ckptcore.formats.megatron.parameter_order import Unregistered
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.formats.torch_save.tree import TorchTree, add_object, note_hidden
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.text import count

FLAT = "distrib_optim.pt"
_MODEL = re.compile(r"model\d*")
_FOLDERS = ("mp_rank_", "tp_rank_")
_RANK_OBJECTS = frozenset({"rng_state", "optimizer"})  # objects that differ by rank
_PER_RANK = frozenset({"rank", "local_rank", *GROUP_RANKS})  # arguments that differ by rank


def read(source: Source) -> Manifest:
    """Read all ranks into one manifest.

    Raises:
        MalformedCheckpoint: A file is not a rank's, or arguments and tensors contradict each other.
        UnsupportedFormat: The folders do not describe how the model is partitioned.
    """
    ranks = read_ranks(source)
    model = model_of(ranks)
    builder = Builder()
    builder.findings += [*ranks.findings, *misplaced(source, ranks, model), *unequal(model.chunks)]
    merger = Merger(builder, model)
    common: dict[str, tuple[RankFile, Any]] = {}
    for file in ranks.files:
        tree = TorchTree(builder, builder.file(file.path, file.size), file.objects, file.path)
        chunks = [c for c in model.chunks if c.file is file]
        for chunk in chunks:
            merger.add(chunk, tree)
        refused: dict[str, Any] = {}
        for key, value in file.tree.items():
            if _MODEL.fullmatch(key) or key in ranks.beside:
                continue
            if key == "optimizer" and _holds_tensor(value):
                value = _numbered(builder, merger, chunks, tree, value, file)
            if key in _RANK_OBJECTS or _holds_tensor(value):
                tree.add(f"{key}/{file.folder}", value)
            else:
                _add_common(builder, common, key, value, file)
                if refused_in(value):
                    refused[key] = value
        _note_hidden(builder, file.objects, file.path, {**tree.refused, **refused}, merger)
        _add_flat(builder, merger, chunks, source, file)
    for path in source.listing:
        if path.startswith(_FOLDERS) and path not in builder.file_names():
            builder.findings.append(finding("stray-file", "files", f"{path} is not read", file=path))
    origin = {
        "iteration": ranks.files[0].tree.get("iteration"),
        "mesh": {"tp": ranks.tp, "pp": ranks.pp, "ep": ranks.ep, "vpp": len(model.first)},
        "ranks": len(ranks.files),
        "empty_extra_states": merger.dropped,
    }
    return builder.build(NAME, source.store.url, origin)


def _numbered(
    builder: Builder,
    merger: Merger,
    chunks: list[ModelChunk],
    tree: TorchTree,
    optimizer: Any,
    file: RankFile,
) -> Any:
    """Add optimizer states under their parameters; return the rest of the optimizer's tree."""
    try:
        return add_numbered(optimizer, chunks, merger, tree)
    except Unregistered as error:
        builder.findings.append(
            finding(
                "flat-buffers",
                "coverage",
                f"cannot name the optimizer states of {file.path}, they stay numbered: {error}",
                file=file.path,
            )
        )
        return optimizer


def _add_flat(
    builder: Builder, merger: Merger, chunks: list[ModelChunk], source: Source, file: RankFile
) -> None:
    """Add the distributed optimizer's file beside a rank's file, if there is one."""
    path = f"{file.folder}/{FLAT}"
    if path not in source.listing:
        return
    size = source.listing[path]
    objects = read_megatron(FileRange(source.store, path, 0, size), path)
    tree = TorchTree(builder, builder.file(path, size), objects, path)
    try:
        add_buffers(objects.tree, chunks, merger, tree)
    except Unregistered as error:
        builder.findings.append(
            finding("flat-buffers", "coverage", f"cannot split {path} by parameter: {error}", file=path)
        )
        tree.add(f"distrib_optim/{file.folder}", objects.tree)
    _note_hidden(builder, objects, path, tree.refused, merger)


def _holds_tensor(value: Any) -> bool:
    tensor_types = (StoredView, RefusedTensor)
    return any(isinstance(leaf, tensor_types) for _, _, leaf in leaves_below(value, "", StoredView))


def _add_common(
    builder: Builder, common: dict[str, tuple[RankFile, Any]], key: str, value: Any, file: RankFile
) -> None:
    """Add an object that all ranks have, once; add a finding where they differ."""
    if isinstance(value, Named) and value.kind == "namespace":
        value = Named("namespace", _without_refused(builder, key, value.value, file, key not in common))
    if key not in common:
        common[key] = file, value
        add_object(builder, key, value, file.path)
        return
    first = common[key][1]
    if value != first and _without_rank_parts(value) != _without_rank_parts(first):
        builder.findings.append(
            finding(
                "rank-object",
                "files",
                f"{key} differs between {file.path} and {common[key][0].path}",
                fqn=key,
                file=file.path,
            )
        )


def _without_refused(
    builder: Builder, key: str, values: Mapping[str, Any], file: RankFile, report: bool
) -> dict[str, Any]:
    lost = {name: refused for name, value in values.items() if (refused := refused_in(value))}
    if lost and report:
        names = ", ".join(f"{key}.{n} ({', '.join(r)})" for n, r in lost.items())
        builder.findings.append(
            finding("refused-global", "files", f"left out of {file.path}: {names}", fqn=key, file=file.path)
        )
    return {name: value for name, value in values.items() if name not in lost}


def _without_rank_parts(value: Any) -> Any:
    """Return a value without its per-rank parts, in a comparable form."""
    if isinstance(value, Named) and value.kind == "namespace":
        value = {k: v for k, v in value.value.items() if k not in _PER_RANK}
    try:
        return encode(value)
    except TypeError:
        return repr(value)


def _note_hidden(
    builder: Builder, objects: Objects, path: str, refused: Mapping[str, Any], merger: Merger
) -> None:
    """Add findings for tensors inside refused classes, one for each value that may hold them.

    Args:
        builder: Gets the findings.
        objects: What was read from the file.
        path: The file.
        refused: Name -> value, of those that became objects.
        merger: Knows the files with refused weights.
    """
    used = storages_in(objects.tree, refused=True)
    hidden = sum(n for k, (_, n, _) in objects.storages.items() if k not in used)
    if not hidden:
        return
    note_hidden(
        builder, {n: (isinstance(v, Refused), refused_in(v), path) for n, v in refused.items()}, hidden
    )
    if not refused and path not in merger.lost:
        classes = ", ".join(objects.refused) or "an unknown class"
        message = f"cannot read {count(hidden, 'byte')} of tensors in {path}: they are inside {classes}"
        builder.findings.append(finding("refused-tensors", "coverage", message, file=path))
