"""Read the index of weights in several files: which tensor is in which file.

transformers, huggingface_hub, diffusers and torchtune write ``model.safetensors.index.json`` and
``pytorch_model.bin.index.json``, with other stems, and with a variant before ``.json``. An index whose name
does not say what it lists, such as ``model.index.json``, is one of the files that it lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import meter
from ckptcore.encodings.json_text import parse
from ckptcore.errors import Finding, MalformedCheckpoint, UnsafeContent, finding
from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.part_names import absent_parts, series
from ckptcore.store import inner_path
from ckptcore.utils.foreign_text import InvalidText, parsing

INDEX = "model.safetensors.index.json"
_FILES, _ABOUT, _TOTAL, _PARAMETERS = "weight_map", "metadata", "total_size", "total_parameters"
_NAME = re.compile(r"^[^/]+?(?:\.(?P<kind>safetensors|bin|h5|msgpack))?\.index(?:\.[^./]+)?\.json$")


def index_name(stem: str) -> str:
    """Return the name of the index of files with a stem.

    >>> index_name("model") == INDEX
    True
    """
    return f"{stem}.safetensors.index.json"


def indexes_of(source: Source, kind: str) -> list[str]:
    """Return the indexes of a folder's files of one suffix, ``safetensors`` or ``bin``."""
    if source.name is not None:
        return []
    named = ((p, _NAME.match(p)) for p in source.listing if ".index." in p)
    return sorted((p for p, m in named if m and kind == (m["kind"] or _kind_listed(source, p))), key=natural)


def _kind_listed(source: Source, path: str) -> str | None:
    """Return the suffix of the files that an index lists, None where it is no index."""
    with suppress(MalformedCheckpoint, UnsafeContent):
        files = read_index(source, path).files
        return next((file.rpartition(".")[2] for file in files.values()), None)
    return None


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The content of a `model.safetensors.index.json`.

    Attributes:
        files: Tensor -> file.
        metadata: Its entry ``metadata``.
        other_entries: The entries beside these two.
    """

    files: Mapping[str, str]
    metadata: Mapping[str, Any]
    other_entries: Mapping[str, Any]

    @property
    def total(self) -> int | None:
        """Return the bytes of all tensors, or None if it does not record them.

        transformers and huggingface_hub write the number (`split_torch_state_dict_into_shards`), and no
        loader reads it.
        """
        total = self.metadata.get(_TOTAL)
        return total if type(total) is int else None

    @property
    def odd(self) -> tuple[str, ...]:
        """Return the known entry that is no dict, or has a number that is none."""
        numbers = (self.metadata.get(key, 0) for key in (_TOTAL, _PARAMETERS))
        odd = _ABOUT in self.other_entries or any(type(n) not in (int, float) for n in numbers)
        return (_ABOUT,) if odd else ()

    def carried(self, parameters: int) -> dict[str, Any]:
        """Return what is not computed from tensors: a count of other than ``parameters`` is not, either."""
        metadata = dict(self.metadata)
        if self.total is not None:
            del metadata[_TOTAL]
        if type(metadata.get(_PARAMETERS)) is int and metadata[_PARAMETERS] == parameters:
            del metadata[_PARAMETERS]
        return {**self.other_entries, **({_ABOUT: metadata} if metadata else {})}


def fits_index(entries: Mapping[str, Any]) -> bool:
    """Report whether an index may have these entries beside its own: none is one that it has itself."""
    metadata = entries.get(_ABOUT, {})
    return _FILES not in entries and type(metadata) is dict and not {_TOTAL, _PARAMETERS} & metadata.keys()


def read_index(source: Source, path: str = INDEX) -> WeightIndex:
    """Read an index.

    Raises:
        MalformedCheckpoint: The file is not an index.
        UnsafeContent: A path leaves the folder.
        MetadataTooLarge: It is over the budget of metadata.
    """
    meter().require(source.listing[path], path)
    raw = source.store.read(path, 0, source.listing[path])
    try:
        with parsing("an index"):
            form = parse(raw, path)
            rows = form[_FILES]
            inner = {file: inner_path(file, origin=path) for file in set(rows.values())}
            files = {str(name): inner[file] for name, file in rows.items()}
    except InvalidText as error:
        raise MalformedCheckpoint(f"{path} is not an index: {error}", file=path) from error
    metadata = form.get(_ABOUT)
    is_dict = type(metadata) is dict
    other_entries = {k: v for k, v in form.items() if k != _FILES and not (is_dict and k == _ABOUT)}
    return WeightIndex(files, metadata if is_dict else {}, other_entries)


def take_index(source: Source, path: str, index: WeightIndex, tensors: Iterable[TensorSpec]) -> None:
    """Record an index as read: what is not computed from the tensors becomes an object."""
    source.explain(path)
    carried = index.carried(sum(t.numel for t in tensors))
    source.carry(path, INDEX, carried, [key for key in index.odd if key in carried])


def files_of(index: WeightIndex) -> dict[str, set[str]]:
    """Return file -> its tensors, as an index lists them."""
    files: dict[str, set[str]] = {}
    for name, path in index.files.items():
        files.setdefault(path, set()).add(name)
    return files


def unlike_index(names: set[str], listed: set[str], path: str, index: str) -> list[Finding]:
    """Return findings about the tensors of a file that are not those which the index lists."""
    holes = [
        finding(
            "hole", "coverage", f"{name} is missing in {path}, where {index} lists it", fqn=name, file=path
        )
        for name in sorted(listed - names)
    ]
    return holes + [
        finding(
            "unlisted-tensor",
            "coverage",
            f"{path} contains {name}, which {index} does not list",
            fqn=name,
            file=path,
        )
        for name in sorted(names - listed)
    ]


def unlisted_parts(index: WeightIndex, path: str) -> list[Finding]:
    """Return the finding that an index lists fewer files than their names count."""
    for parts in series(set(index.files.values())).values():
        if all(part.is_run for part in parts):
            missing, total = absent_parts(parts, 1)
            if total:
                message = (
                    f"{path} lists {len(parts)} of {parts[0].count} files: {missing[0]} is not one of them"
                )
                return [finding("unproven-whole", "files", message, file=missing[0])]
    return []


def unlike_total(builder: Builder, index: WeightIndex, path: str) -> list[Finding]:
    """Return the finding that the files hold other bytes than the index records, if nothing else is wrong."""
    stored, total = builder.item_bytes, index.total  # as the writer counts: of every dtype
    # A missing or short file changes the sum, too, and has its own finding.
    if total in (None, stored) or any(f.severity == "error" for f in builder.findings):
        return []
    message = f"{path} records {total} bytes of tensors, but the files contain {stored}"
    return [finding("total-mismatch", "coverage", message, file=path)]
