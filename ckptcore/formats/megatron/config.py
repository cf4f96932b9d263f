"""Read what Megatron-Core records about a checkpoint: backend, version, digests of its files.

``metadata.json`` is a `CheckpointingConfig` (megatron/core/dist_checkpointing/core.py): backend and
version of the sharded part and, until 0.18, of the common part. ``integrity.json`` (0.17 and
later, optional) has a SHA-256 per file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ckptcore.encodings.json_text import parse
from ckptcore.errors import MalformedCheckpoint, NotComplete, UnsupportedFormat
from ckptcore.formats.base import Source
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import short_repr

CONFIG, INTEGRITY, METADATA = "metadata.json", "integrity.json", ".metadata"
TRACKER = "latest_checkpointed_iteration.txt"  # beside the folders of iterations
# Megatron-LM writes no metadata.json for the last two; tools that rewrite such folders may.
BACKENDS = {"torch_dist": (1,), "zarr": (1,), "fsdp_dtensor": (1,), "torch_dcp": (1,)}
_FIELDS = frozenset(f"{part}_backend{of}" for part in ("sharded", "common") for of in ("", "_version"))
_MAX_JSON, _MAX_INTEGRITY = 1 << 20, 64 << 20
_SCAN, _WINDOW, _EDGE = 64 << 20, 4 << 20, 256
# Keys of sharded objects, and attributes that only Megatron-Core adds.
_SHARD = re.compile(rb"/shard_\d+(\.\d+)*_\d")
_SHARD_WORD = b"/shard_"
_ATTRIBUTES = b"mcore_data", b"all_local_plans"
# A dict of paths and no ``storage_meta`` (opcodes: name, memo, dict or None) mark the plain DCP folder that
# a Megatron-Core checkpoint is converted to. torch < 2.4 has no ``storage_meta``, later versions fill it.
_PATHS = b"planner_data\x94}"
_NO_META = b"storage_meta\x94N"
_HEX = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class MegatronConfig:
    """The sharded part's backend and version, and whether the common state has its own file."""

    backend: str
    version: int
    has_common_file: bool


def read_config(source: Source) -> MegatronConfig | None:
    """Read `metadata.json`; return None when it is missing or another tool's.

    Raises:
        UnsupportedFormat: The backend or version is unknown.
        MalformedCheckpoint: The file is not JSON, or its fields have wrong types.
    """
    if source.listing.get(CONFIG, _MAX_JSON + 1) > _MAX_JSON:  # Megatron-Core's has about 100 bytes
        return None
    try:
        form = _json(source, CONFIG, _MAX_JSON)
    except MalformedCheckpoint:
        if {METADATA, "common.pt"} & source.listing.keys():
            raise
        return None  # many tools write a file of that name
    if not isinstance(form, dict) or "sharded_backend" not in form:
        return None
    backend, version = form["sharded_backend"], form.get("sharded_backend_version", 1)
    if not isinstance(backend, str) or not isinstance(version, int):
        raise MalformedCheckpoint(
            f"{CONFIG} must have a text backend and an integer version (got {short_repr(backend, 40)}, "
            f"{short_repr(version, 40)})",
            file=CONFIG,
        )
    versions = BACKENDS.get(backend)
    if versions is None or version not in versions:
        raise UnsupportedFormat(
            f"cannot read {source.store.url}: unknown Megatron-Core backend {short_repr(backend, 40)}, "
            f"version {version}",
            hint=f"known: {', '.join(f'{b} {v}' for b, vs in BACKENDS.items() for v in vs)}",
        )
    common = form.get("common_backend", "torch"), form.get("common_backend_version", 1)
    if common != ("torch", 1):
        raise UnsupportedFormat(
            f"cannot read the common state of {source.store.url}: unknown backend "
            f"{short_repr(common[0], 40)}, version {short_repr(common[1], 40)}",
            hint="known: torch 1",
        )
    source.explain(CONFIG)
    source.carry(CONFIG, CONFIG, {k: v for k, v in form.items() if k not in _FIELDS})
    return MegatronConfig(backend, version, "common_backend" in form)


def finished_config(source: Source) -> MegatronConfig | None:
    """Read the config of a finished save; return None only for an unfinished one that the user allowed.

    Raises:
        NotComplete: `metadata.json` is missing, and `Source.recover` is false.
    """
    config = read_config(source)
    if config is None and not source.recover:
        raise NotComplete(
            f"{source.store.url} has no {CONFIG}, which Megatron-Core writes last: the save is running, "
            "was aborted, or rank 0 wrote it to another node",
            hint="wait if it is running; read it with --allow-incomplete if every other file is there",
        )
    return config


def digests(source: Source) -> dict[str, str]:
    """Read file -> SHA-256 in hex from `integrity.json`; return {} when there is none."""
    if INTEGRITY not in source.listing:
        return {}
    form = _json(source, INTEGRITY, _MAX_INTEGRITY)
    files = form.get("files") if isinstance(form, dict) else None
    if not isinstance(form, dict) or not isinstance(files, dict):
        raise MalformedCheckpoint(f"{INTEGRITY} has no table of files", file=INTEGRITY)
    if form.get("algorithm") != "sha256":
        raise UnsupportedFormat(
            f"algorithm of {INTEGRITY} must be sha256 (got {short_repr(form.get('algorithm'), 40)})",
            hint="known: sha256",
        )
    for name, value in files.items():
        if "/" in name or name in ("", ".", "..") or not isinstance(value, str) or not _HEX.match(value):
            entry = f"{short_repr(name)}: {short_repr(value)}"
            raise MalformedCheckpoint(
                f"{INTEGRITY} must map file names to SHA-256 in hex (got {entry})", file=INTEGRITY
            )
    source.explain(INTEGRITY)
    source.carry(INTEGRITY, INTEGRITY, {k: v for k, v in form.items() if k not in ("algorithm", "files")})
    return files


def marked(source: Source) -> bool:
    """Return whether `.metadata` has entries that only Megatron-Core writes."""
    if not scan(source, *_ATTRIBUTES, _SHARD_WORD):  # nearly all folders: once is enough
        return False
    if scan(source, *_ATTRIBUTES):
        return True
    return shard_keys(source) and not (scan(source, _PATHS) and scan(source, _NO_META))


def shard_keys(source: Source) -> bool:
    """Return whether `.metadata` has keys of sharded objects, whichever tool wrote it."""
    return scan(source, _SHARD_WORD, pattern=_SHARD)


def scan(source: Source, *terms: bytes, pattern: re.Pattern[bytes] | None = None) -> bool:
    """Return whether the first 64 MiB of `.metadata` have one of the terms, of at most 256 bytes each.

    pattern: What must match, too, in at most 256 bytes. Every match has one of the terms, which are found in
    a tenth of the time.
    """
    size = min(source.listing[METADATA], _SCAN)
    # The end of each window is searched again with the next one's beginning: a match may span both.
    tail = b""
    for offset in range(0, size, _WINDOW):
        block = source.store.read(METADATA, offset, min(_WINDOW, size - offset))
        for part in (tail + block[:_EDGE], block):
            if any(term in part for term in terms) and (pattern is None or pattern.search(part)):
                return True
        tail = block[-_EDGE:]
    return False


def _json(source: Source, name: str, limit: int) -> Any:
    size = source.listing[name]
    if size > limit:
        raise MalformedCheckpoint(f"{name} must have at most {limit} bytes (got {size})", file=name)
    try:
        return parse(source.store.read(name, 0, size), name)
    except InvalidText as error:
        raise MalformedCheckpoint(f"cannot read {name}: {error}", file=name) from error
