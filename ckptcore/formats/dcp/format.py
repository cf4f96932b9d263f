"""Recognise, read and write torch.distributed.checkpoint folders: `.metadata` and `__R_I.distcp`.

There may be one per pipeline stage, ``pp0/``, ``pp1/``, each saved by its stage's process group. Each is a
complete checkpoint for torch, and nothing states how many there are. Names must be
those of the whole model. What proves that no stage is missing: their numbers, layers without a gap, and the
last norm or the output layer; or the shapes of all weights against a config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptcore.core.manifest import Blob, Manifest
from ckptcore.errors import Finding, NameMismatch, finding
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Reader,
    Source,
    Thinned,
    Writer,
)
from ckptcore.formats.common.join import Part, join, joined_paths
from ckptcore.formats.common.part_proof import evidence_beside, is_complete_model, lack
from ckptcore.formats.dcp.reader import DATA, RANK_METADATA, dcp_folders, ranges, read_folder
from ckptcore.utils.step_names import stage_of

_LAYER = re.compile(r"^(.*?(?:^|\.)(?:layers|blocks|h)\.)(\d+)\.")
# What comes behind the layers, by the names of torchtitan, transformers, Megatron and GPT-NeoX.
_LAST = re.compile(
    r"(?:^|\.)(?:norm|final_norm|ln_f|final_layer_?norm|output|output_layer|lm_head|embed_out)\.weight$"
)
_STEP = re.compile(r"(?:^|\.)(?:global_)?(?:steps?|iteration)$")
_ADVICE = "name the folder that has all stages, or read what is there with --allow-incomplete"
# Lightning's Trainer numbers its optimizers, and keeps the model under one of two names. Its version is
# in meta.pt, or among the objects of a folder converted from a Lightning checkpoint.
_NUMBERED = re.compile(r"^optimizer_\d+\.")
_MODELS, _VERSION = ("model.", "state_dict."), "pytorch-lightning_version"


def stage_folders(source: Source) -> dict[int, str]:
    """Return the folders of stages in a folder, by number: those with a DCP folder's own files."""
    if source.name is not None:
        return {}
    if not any(path.startswith("pp") for path in source.listing):
        return {}
    numbered = [(stage_of(folder), folder) for folder in dcp_folders(source)]
    return dict(sorted((number, folder) for number, folder in numbered if number is not None))


def read_stages(source: Source) -> Manifest:
    """Read the manifest of all stages.

    Raises:
        NameMismatch: Two stages have a tensor of one name: each numbers its own.
        CkptError: Those of `read_folder`, for a stage.
    """
    folders = stage_folders(source)
    stages = {folder: read_folder(source.below(folder)) for folder in folders.values()}
    _require_apart(stages)
    stages, findings = _merged_objects(stages)
    parts = [Part(m, folder) for folder, m in stages.items()]
    manifest = join("dcp", source.store.url, parts)
    if any(m.order for m in stages.values()):
        manifest = replace(manifest, order=tuple(n for m in stages.values() for n in m.order or _names(m)))
    form = joined_paths(parts).form(_names(manifest), [blob.key for blob in manifest.blobs])
    config = evidence_beside(source, "config.json")
    proof = _unproven(source, manifest, max(folders), len(folders), folders[max(folders)], config)
    return replace(
        manifest, origin={"paths": form} if form else {}, findings=(*manifest.findings, *findings, *proof)
    )


def named_alone(source: Source, manifest: Manifest) -> list[Finding]:
    """Return findings about a folder that is named like one stage, and is read by itself."""
    folder = source.store.url.rstrip("/").rsplit("/", 1)[-1]
    number = stage_of(folder)
    if number is None:
        return []
    config = evidence_beside(source, "config.json")
    return _unproven(source, manifest, number, 1, folder, config)


def _unproven(
    source: Source, manifest: Manifest, last: int, count: int, folder: str, config: Mapping[str, Any]
) -> list[Finding]:
    """Return what says that a stage is missing, or that nothing would show it."""
    shapes = {t.fqn: t.shape for t in manifest.tensors}
    if count == last + 1 and is_complete_model(config, shapes):
        return []
    if count <= last:
        why = f"{folder} is a pipeline stage, and {last + 1 - count} before it are not there"
        return [lack(source, "missing-file", "files", why, file=folder, hint=_ADVICE)]
    layers: dict[str, set[int]] = {}
    outside = []
    for name in shapes:
        match = _LAYER.match(name)
        if match:
            layers.setdefault(match[1], set()).add(int(match[2]))
        else:
            outside.append(name)
    for container, numbers in sorted(layers.items()):
        if len(numbers) <= max(numbers):
            absent = next(n for n in range(len(numbers) + 1) if n not in numbers)
            why = f"{container}{absent} is in no stage up to {folder}, and later layers are: one is missing"
            return [lack(source, "missing-file", "files", why, file=folder, hint=_ADVICE)]
    if layers and any(map(_LAST.search, outside)):
        return []
    message = (
        f"nothing states how many pipeline stages there are: a missing one after {folder} would not be seen"
    )
    return [lack(source, "unproven-parts", "files", message, file=folder, hint=_ADVICE)]


def _names(manifest: Manifest) -> list[str]:
    return [t.fqn for t in manifest.tensors]


def _require_apart(stages: Mapping[str, Manifest]) -> None:
    owner: dict[str, str] = {}
    for folder, manifest in stages.items():
        for name in _names(manifest):
            if name in owner:
                raise NameMismatch(
                    f"{name} is in {owner[name]} and in {folder}: each stage numbers its own layers",
                    hint="name the folder of one stage, or save with names that no two stages share",
                    fqn=name,
                )
            owner[name] = folder


def _merged_objects(stages: Mapping[str, Manifest]) -> tuple[dict[str, Manifest], list[Finding]]:
    """Return the stages so that no object is in two of them, and findings about objects that differ.

    Equal ones are one, lists of different names (the parameters of a group) become one list, and others are
    kept for each stage.
    """
    saved: dict[str, dict[str, Blob]] = {}
    for folder, manifest in stages.items():
        for blob in manifest.blobs:
            saved.setdefault(blob.key, {})[folder] = blob
    findings: list[Finding] = []
    stage_blobs: dict[str, list[Blob]] = {folder: [] for folder in stages}
    for key, blobs in saved.items():
        (folder, first), *rest = blobs.items()
        if all(_same(first, blob) for _, blob in rest):
            stage_blobs[folder].append(first)
            continue
        names = _join_name_lists([blob.tree for blob in blobs.values()])
        if names is not None:
            stage_blobs[folder].append(replace(first, tree=names))
            continue
        differing = next(f for f, blob in rest if not _same(first, blob))
        if _STEP.search(key) and all(type(blob.tree) is int for blob in blobs.values()):
            message = f"{key} is {first.tree} in {folder}, and {blobs[differing].tree} in {differing}"
            findings.append(finding("mixed-saves", "files", message, fqn=key, file=f"{differing}/.metadata"))
        else:
            message = f"object {key} differs between {folder} and {differing}: each stage's is kept"
            findings.append(finding("rank-object", "files", message, fqn=f"{key}/{folder}"))
        for of, blob in blobs.items():
            stage_blobs[of].append(replace(blob, key=f"{key}/{of}"))
    merged = {folder: replace(m, blobs=tuple(stage_blobs[folder])) for folder, m in stages.items()}
    return merged, findings


def _same(first: Blob, second: Blob) -> bool:
    forms = [(blob.tree, blob.refused, blob.known) for blob in (first, second)]
    return forms[0] == forms[1] and first.known


def _join_name_lists(trees: Sequence[Any]) -> list[str] | None:
    """Return all names of lists of names, None for other values, or where two lists have one name."""
    if not all(type(tree) is list and all(type(n) is str for n in tree) for tree in trees):
        return None
    names = [name for tree in trees for name in tree]
    return names if len(set(names)) == len(names) else None


def detect(source: Source) -> Evidence | None:
    """Recognise a DCP folder by its metadata file, finished or not."""
    if source.name is not None:
        return None
    data = [p for p in source.listing if DATA.search(p) and "/" not in p]
    files = [f"{len(data)} *.distcp file(s)"] if data else []
    if ".metadata" in source.listing:
        return Evidence("dcp", ("found .metadata", *files))
    ranks = sorted(int(m[1]) for p in source.listing if (m := RANK_METADATA.match(p)))
    if ranks:
        return Evidence("dcp", (f"found rank-local metadata of ranks {ranges(ranks)}", *files))
    if ".metadata.tmp" in source.listing and (data or source.recover):
        return Evidence("dcp", ("found .metadata.tmp of a save that did not finish", *files))
    if data:
        return Evidence("dcp", (*files, "but no .metadata"))
    stages = list(stage_folders(source).values())
    if stages:
        return Evidence("dcp", (f"found a folder of each pipeline stage: {', '.join(stages[:8])}",))
    return None


def read(source: Source) -> Manifest:
    """Read the manifest of a DCP folder, or of one per pipeline stage; raise the errors of `read_folder`."""
    has_own_files = any(p == ".metadata" or DATA.match(p) or RANK_METADATA.match(p) for p in source.listing)
    if not has_own_files and stage_folders(source):
        return read_stages(source)
    manifest = read_folder(source)
    alone = named_alone(source, manifest)
    manifest = replace(manifest, findings=(*manifest.findings, *alone)) if alone else manifest
    names = [*(t.fqn for t in manifest.tensors), *(b.key for b in manifest.blobs)]
    of_trainer = any(n.startswith(_MODELS) for n in names) and any(_NUMBERED.match(n) for n in names)
    if of_trainer and _VERSION not in names:
        message = "meta.pt is missing: Lightning's Trainer keeps everything but model and optimizers in it"
        hint = "copy meta.pt from where it was saved: Lightning cannot resume without it"
        missing = finding("missing-part", "files", message, file="meta.pt", hint=hint)
        manifest = replace(manifest, findings=(*manifest.findings, missing))
    return manifest


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out a folder as `torch.distributed.checkpoint.save` writes it on the requested mesh."""
    from ckptcore.formats.dcp.writer import arrange_folder

    return tuple(arrange_folder(request))


def thin(source: Source, manifest: Manifest, drop: frozenset[str]) -> Thinned:
    """Leave names out of the DCP folders of a checkpoint; raise the errors of `thinning.thin_folders`."""
    from ckptcore.formats.dcp.thinning import thin_folders

    return thin_folders(source, manifest, drop)


_LAYOUT = Layout(arrange, nests=True, values="libraries", flattens=True)
FORMAT = Format(
    name="dcp",
    title="PyTorch Distributed Checkpoint (torch.distributed.checkpoint)",
    recognised_by="`.metadata` (or `__R.metadata` per rank) beside `__R_I.distcp`, or `pp0/`, ... with them",
    detect=detect,
    suffixes=frozenset({"metadata", "distcp", "tmp"}),
    reader=Reader(read, checksums="CRC-32 per item", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT, serializations=("torch_save", "safetensors")),
    thin=thin,
)
