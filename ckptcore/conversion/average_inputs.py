"""Look at the inputs of an average one by one: each is a checkpoint of the catalog, the average is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptcore.checking.examine import inspect
from ckptcore.conversion.source_digests import require_as_recorded
from ckptcore.core.manifest import Manifest
from ckptcore.planning.request import Request
from ckptcore.utils.average_url import folder_of_input, is_of_last, split_average

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog


@dataclass(frozen=True, slots=True)
class AverageInput:
    """One input of an average.

    Attributes:
        url: Its path or URL.
        weight: As it was given.
        manifest: The input as it is now.
        digests: Path -> digest of those of its files that were read completely.
    """

    url: str
    weight: float
    manifest: Manifest
    digests: Mapping[str, str]


def inputs_of(request: Request, digests: Mapping[str, str]) -> Iterator[AverageInput]:
    """Yield the inputs of the average that a request reads, in the order of the sum.

    Args:
        request: Its source is an average.
        digests: Path in the average -> digest of a file that was read completely.

    Raises:
        CkptError: An input cannot be read any more.
    """
    roots, weights = split_average(request.source)
    for place, (root, weight) in enumerate(zip(roots, weights, strict=True)):
        folder = folder_of_input(place, len(roots))
        own = {
            path.removeprefix(folder): digest
            for path, digest in digests.items()
            if (path.startswith(folder) if folder else is_of_last(path))
        }
        manifest = inspect(root, request.recover, request.keep_quantized, request.weights)
        yield AverageInput(root, weight, manifest, own)


def require_inputs_as_recorded(request: Request, digests: Mapping[str, str], catalog: Catalog) -> None:
    """Require of every input what `require_as_recorded` requires of a source.

    Raises:
        DamagedCheckpoint: A file of an input has other bytes than the catalog recorded.
    """
    for each in inputs_of(request, digests):
        require_as_recorded(each.manifest, each.digests, catalog.at(each.url))
