"""Gaps: which samples and damages are exceptions, and why?

The only lists of exceptions in the conformance tests. Names are globs on a sample's folder name,
``<sample>`` or ``<sample>/<folder inside>``. An entry that no longer holds fails its test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from samples import Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A source that must be refused.

    exit: the exit code. codes: the error code, or for exit 1 the finding codes of which `validate`
    must show at least one. why: one line.
    """

    exit: int
    codes: frozenset[str]
    why: str


def _refusal(code: int, codes: str, why: str) -> Refusal:
    return Refusal(code, frozenset(codes.split()), why)


# Folders of torch.distributed.checkpoint whose data cannot be had, whatever a reader does.
REFUSED_DCP: dict[str, Refusal] = {
    "dcp_aborted_data_partial": _refusal(3, "not-complete", "killed while the data was written"),
    "dcp_aborted_no_metadata": _refusal(3, "not-complete", "killed before .metadata was written"),
    "dcp_aborted_metadata_tmp": _refusal(
        3, "not-complete", "killed before .metadata.tmp was renamed: recovered on request only"
    ),
    "dcp_aborted_overwrite_torn": _refusal(
        1, "truncated-file", "a newer save over this one was killed: half of the data is gone"
    ),
    "dcp_multishard_*/ckpt_safetensors": _refusal(
        1, "lost-at-save hole item-mismatch", "torch wrote one of two chunks of a tensor per rank"
    ),
}

# What .metadata.tmp tells is recoverable here: all data files were finished.
RECOVERABLE: dict[str, bool] = {"dcp_aborted_metadata_tmp": True}

# Samples without a DCP folder. Refused by the name of what they are.
REFUSED_OTHER: dict[str, Refusal] = {
    "fsdp1_local_pt_*": _refusal(5, "unsupported-format", "FSDP1 LOCAL: names and shapes absent"),
}

# The official loader of torch.distributed.checkpoint is no oracle here.
NO_ORACLE: dict[str, str] = {
    "dcp_safetensors_fmt*": "FileSystemReader cannot load safetensors items",
    "dcp_nocollectives*": "it reads rank 0 alone and leaves the rest of each tensor unset",
    "dcp_aborted_*": "there is no .metadata",
    "api_torch_dist_*": "torch knows neither Megatron-Core's flattened shards nor its common state",
    "gpt_*": "torch knows nothing of Megatron-Core's common state",
    "optim_*": "torch knows neither Megatron-Core's flattened shards nor its common state",
    "root_torch_dist_*": "torch knows nothing of Megatron-Core's common state",
}

# Truth files that none of the sample's DCP folders can hold.
UNMATCHED: dict[str, str] = {
    "optim_*_dp_reshardable_*": "one truth has per-layer names; test_mcore_buckets looks at it",
    "accelerate_fsdp1_local_*": "the model part is FSDP1 LOCAL; only the optimizer is DCP",
}

# Folders of safetensors whose stored bytes are not the truth: copies of them are still exact.
STORED_DIFFERS: dict[str, str] = {}

# Damage that no redundancy in the format can show. (damage, what must hold of the source, why)
UNDETECTABLE: dict[str, tuple[str, str]] = {
    "files-swapped": (
        "equal-layout",
        "no data file says which rank or save wrote it: files of equal layout are interchangeable",
    ),
    "file-of-another-step": (
        "no-replicas",
        "`save_id` stands in .metadata only, so a file of another save of the same model fits",
    ),
    "places-swapped": (
        "zip",
        "a torch zip names neither its tensor nor its offset: items of one layout are exchangeable",
    ),
    "flip-unsummed-payload": ("no-crc", "safetensors items carry no checksum"),
    "zeroed-range": ("no-crc", "safetensors items carry no checksum"),
    "tensor-forgotten-everywhere": (
        "between-others",
        ".metadata alone says which tensors there are; a gap between items may be an alignment",
    ),
    "flip-metadata": (
        "names-only",
        ".metadata has no checksum: a flipped letter in a name gives another name",
    ),
}


def lookup(table: Mapping[str, T], sample: str, folder: str = "") -> T | None:
    """The entry for a sample, or for one folder of it."""
    base = sample.rsplit("/", 1)[-1]
    for pattern, entry in table.items():
        if fnmatchcase(base, pattern) or (folder and fnmatchcase(f"{base}/{folder}", pattern)):
            return entry
    return None


def readable(sample: Sample) -> list[Path]:
    """The sample's DCP folders that must be read."""
    return [f for f in sample.dcp_folders if not lookup(REFUSED_DCP, sample.name, f.name)]


def refused(sample: Sample) -> list[tuple[Path, Refusal]]:
    """The sample's DCP folders that must be refused, and how."""
    found = [(f, lookup(REFUSED_DCP, sample.name, f.name)) for f in sample.dcp_folders]
    return [(f, r) for f, r in found if r]
