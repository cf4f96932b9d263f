"""Read Megatron's DCP folders: Megatron-Core's `torch_dist` (0.6 to 0.19), and two plain ones of Megatron-LM.

Beside the DCP files of `torch_dist` are ``metadata.json``, written last, and until 0.18 ``common.pt``. Keys
are those of the ShardedTensors. Optimizer state may be flattened (`flat_buffers`); `sharded_objects` reads
the non-tensor values (megatron/core/dist_checkpointing/serialization.py).

Megatron-LM saves `fsdp_dtensor` (Megatron-FSDP) and `torch_dcp` (FSDP2) without its own layer. So there is
neither ``metadata.json`` nor ``common.pt``: arguments and iteration are byte items, and only key names
distinguish the two (megatron/training/checkpointing.py). Megatron-FSDP stores fp32 main parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.errors import Finding, UnsupportedFormat, finding
from ckptcore.formats.base import (
    Arrangement,
    Detect,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Read,
    Reader,
    Source,
    Thinned,
    Writer,
)
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.dcp.format import thin as thin_folders
from ckptcore.formats.dcp.reader import DATA, parse_folder, read_folder
from ckptcore.formats.megatron.config import (
    CONFIG,
    INTEGRITY,
    METADATA,
    MegatronConfig,
    digests,
    finished_config,
    marked,
    read_config,
    scan,
    shard_keys,
)
from ckptcore.formats.megatron.sharded_objects import (
    BARE,
    COMMON_FILE,
    COMMON_KEY,
    LISTED,
    add_file,
    common_name,
    grids,
    spread_common,
)
from ckptcore.utils.text import count

NAME = "torch_dist"
_VERSION, _WRAPPED = b"checkpoint_version", b"model.module."


def detect(source: Source) -> Evidence | None:
    """Recognise by `metadata.json`; without it, by entries of `.metadata` that only Megatron-Core writes."""
    if source.name is not None:
        return None
    config = read_config(source)
    data = [p for p in source.listing if DATA.search(p) and "/" not in p]
    if config is not None:
        if config.backend != NAME:
            return None
        because = (f"{CONFIG} says sharded_backend torch_dist, version {config.version}",)
    elif ".metadata" in source.listing and marked(source):
        because = (f"no {CONFIG}, but .metadata is Megatron-Core's",)
    else:
        return None
    return Evidence(NAME, (*because, count(len(data), "*.distcp file")), refines=("dcp",))


def read(source: Source) -> Manifest:
    """Read the manifest of a torch_dist folder, names as stored.

    Raises:
        NotComplete: `metadata.json`, which is written last, is missing.
    """
    from ckptcore.formats.megatron.flat_buffers import (
        map_buckets,
        restore_shapes,
        shape_findings,
        stored_args,
    )

    config = finished_config(source)
    parsed = parse_folder(source)
    extra = parsed[0].extra.get("mcore_data")
    folder = read_folder(source, NAME, LISTED, parsed)
    # Before the join, because `mcore_data` has the keys as stored.
    folder = restore_shapes(folder, extra)
    findings = [*shape_findings(folder, extra)]
    parts = [Part(folder, rename=common_name)]
    inside = any(b.key == COMMON_KEY for b in folder.blobs)
    if COMMON_FILE in source.listing and inside:
        findings.append(_second(config))
    elif COMMON_FILE in source.listing:
        parts.append(Part(_common(source)))
    file_digests = digests(source)
    findings += [
        finding("missing-file", "files", f"{path} is missing, {INTEGRITY} lists it", file=path)
        for path in file_digests
        if path not in source.listing
    ]
    if config is not None and config.has_common_file and COMMON_FILE not in source.listing:
        message = f"{COMMON_FILE} is missing, and {CONFIG} says that the common state was saved in it"
        findings.append(finding("missing-file", "files", message, file=COMMON_FILE))
    manifest = spread_common(
        join(NAME, source.store.url, parts, _folder_origin(folder, config, file_digests))
    )
    manifest = replace(manifest, findings=(*manifest.findings, *findings, *grids(manifest.blobs)))
    # 0.16 and later do not write this entry.
    return map_buckets(manifest, stored_args(manifest), before_016=isinstance(extra, Mapping))


def _second(config: MegatronConfig | None) -> Finding:
    """Return the finding for `common.pt` beside a common state of 0.19, which ignores that file."""
    if config is not None and config.has_common_file:
        message = f"{CONFIG} says that the common state is in {COMMON_FILE}, but .metadata has {COMMON_KEY}"
        return finding("mixed-saves", "files", message, file=COMMON_FILE)
    message = f"{COMMON_FILE} is not read: the common state is the object {COMMON_KEY}"
    return finding("stray-file", "files", message, file=COMMON_FILE)


def _common(source: Source) -> Manifest:
    builder = Builder()
    add_file(builder, source, COMMON_FILE, None)
    return builder.build(NAME, source.store.url, {})


def _folder_origin(folder: Manifest, config: MegatronConfig | None, sha256: dict[str, str]) -> dict[str, Any]:
    origin = dict(folder.origin)
    if config is not None:
        origin |= {"backend": config.backend, "backend_version": config.version}
    return {**origin, "sha256": sha256} if sha256 else origin


def arrange(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out the folder as the ranks of a mesh save it; raise the errors of `arrange_torch_dist`."""
    from ckptcore.formats.megatron.writer import arrange_torch_dist

    return arrange_torch_dist(request)


def arrange_start(request: Arrangement) -> Iterable[FileLayout]:
    """Lay out a folder that a job begins from; raise the errors of `arrange_torch_dist`."""
    from ckptcore.formats.megatron.writer import arrange_release

    return arrange_release(request)


def thin(source: Source, manifest: Manifest, drop: frozenset[str]) -> Thinned:
    """Leave names out of the folder; raise `UnsupportedFormat` where a file has the digests of all others."""
    if INTEGRITY in source.listing:
        raise UnsupportedFormat(
            f"cannot thin {source.store.url}: {INTEGRITY} has the digest of every file, which would change",
            hint=f"Megatron-Core loads a folder without {INTEGRITY}: remove it where nothing asks for it",
        )
    return thin_folders(source, manifest, drop)


_LAYOUT = Layout(arrange, values="trainers")
FORMAT = Format(
    name=NAME,
    title="Megatron-Core distributed checkpoint, torch_dist (0.6 to 0.19)",
    recognised_by="`metadata.json` with `sharded_backend` torch_dist, beside `.metadata`",
    detect=detect,
    suffixes=frozenset({"json", "metadata"}),
    reader=Reader(read, checksums="CRC-32 per item, SHA-256 per file", objects=True),
    # VocabParallelEmbedding and the output layer are loaded with `allow_shape_mismatch`.
    writer=Writer(
        _LAYOUT,
        for_mesh=Layout(arrange, repads=True),
        world="megatron",
        starts={"megatron": Layout(arrange_start, values="trainers", repads=True)},
    ),
    thin=thin,
)


def _detect(name: str, wrapped: bool) -> Detect:
    def detect(source: Source) -> Evidence | None:
        if source.name is not None or METADATA not in source.listing:
            return None
        config = read_config(source)
        if config is not None:
            because = (f"{CONFIG} says sharded_backend {config.backend}",)
            return Evidence(name, because, refines=("dcp",)) if config.backend == name else None
        if not scan(source, _VERSION) or scan(source, _WRAPPED) != wrapped:
            return None
        if shard_keys(source):  # a torch_dist or zarr checkpoint that was copied into a plain DCP folder
            return None
        keys = "model.module.*" if wrapped else "no model.module.*"
        reasons = (
            f"found {METADATA}, and no {CONFIG} of Megatron-Core",
            f"its keys: checkpoint_version, {keys}",
        )
        return Evidence(name, reasons, refines=("dcp",))

    return detect


def _reader_of(name: str) -> Read:
    def read(source: Source) -> Manifest:
        return read_folder(source, name, BARE)

    return read


def _format(name: str, title: str, keys: str, wrapped: bool) -> Format:
    return Format(
        name=name,
        title=title,
        recognised_by=f"`.metadata` without `metadata.json`, keys `checkpoint_version` and {keys}",
        detect=_detect(name, wrapped),
        suffixes=frozenset({"metadata"}),
        reader=Reader(_reader_of(name), checksums="CRC-32 per item", objects=True),
    )


FSDP_DTENSOR = _format("fsdp_dtensor", "Megatron-FSDP checkpoint (fsdp_dtensor)", "`model.module.*`", True)
TORCH_DCP = _format("torch_dcp", "Megatron-LM FSDP2 checkpoint (torch_dcp)", "no `model.module.*`", False)
