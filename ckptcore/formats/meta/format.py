"""Recognise the model-parallel files of Meta's Llama."""

from __future__ import annotations

from ckptcore.core.manifest import Manifest
from ckptcore.encodings.torchzip.archive import is_zip
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.common.trainer_files import without_links
from ckptcore.utils.late_pattern import late_pattern

NAME = "meta"
_FILE = late_pattern(r"^consolidated\.(?P<rank>\d{2,4})\.pth$")


def rank_paths(source: Source) -> dict[int, str]:
    """Return rank -> file, of files that are no links to each other."""
    paths = [p for p in source.listing if p.startswith("consolidated.") and _FILE.match(p)]
    ranks = {int(p.split(".")[1]): p for p in without_links(source, paths)}
    return {rank: ranks[rank] for rank in sorted(ranks)}


def detect(source: Source) -> Evidence | None:
    """Recognise several ``consolidated.NN.pth`` of a folder, at least one of them a torch zip."""
    if source.name is not None:
        return None
    paths = [p for p in source.listing if p.startswith("consolidated.") and _FILE.match(p)]
    if len(paths) < 2 or not any(_is_zip(source, path) for path in paths[:8]):
        return None
    return Evidence(NAME, (f"{len(paths)} files like {min(paths)}",), ("torch_save",))


def read(source: Source) -> Manifest:
    """Read the manifest of all ranks' files; raise the errors of `reader.read_ranks`."""
    from ckptcore.formats.meta.reader import read_ranks

    return read_ranks(source, rank_paths(source), NAME)


def _is_zip(source: Source, path: str) -> bool:
    return source.listing[path] >= 4 and is_zip(source.store.read(path, 0, 4))


FORMAT = Format(
    name=NAME,
    title="model-parallel files of Meta's Llama (generations 1 to 4)",
    recognised_by="two or more `consolidated.NN.pth`",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per record", objects=True),
)
