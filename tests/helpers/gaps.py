"""List the samples and damages that are exceptions, with the reason for each.

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


# Folders of torch.distributed.checkpoint whose data no reader can get.
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
    "z2_fp32_rr_ws4_universal": _refusal(1, "damaged", "DeepSpeed's converter mixed up its parameters"),
    "moe_ep2_z2_ws2_universal": _refusal(3, "not-complete", "DeepSpeed's converter ended with an error"),
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


# What comes out of a writer in other words: (format, glob on values, how they differ, why).
RESTATED: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("olmo_core", "train.world_size", ("values",), "a trainer restores random states where it is its own: 0"),
    (
        "olmo_v01",
        "optim.*param_groups*",
        ("only-in-a", "only-in-b", "values"),
        "OLMo-core 0.1 numbers the parameters of its groups and names them beside",
    ),
    ("olmo_v01", "optim.state_keys.*", ("only-in-b",), "OLMo-core 0.1 tells which states there are"),
    (
        "torch_dist",
        "args.no_save_rng",
        ("only-in-b", "values"),
        "random states stay behind, and an argument tells Megatron-LM",
    ),
    (
        "torch_ranks",
        "*.param_groups.*.param_names.*",
        ("only-in-b",),
        "optimizers of torch number their states: names are given where order and shapes do not prove them",
    ),
)


@dataclass(frozen=True, slots=True)
class Blind:
    """A damage that no redundancy in the format can show.

    damage: glob on names of rows. when: what must hold of the source at the place of the damage: a key of
    `test_damage.CONDITIONS`, or a fact that the row finds there. why: one line. sometimes: whether more
    than ``when`` decides, so that some of these are noticed (a replica elsewhere, a bit that counts for
    nothing); all others fail their test when they are noticed. Those that are never silent fail theirs.
    """

    damage: str
    when: str
    why: str
    sometimes: bool = False


# What may pass in silence: nothing else may.
UNDETECTABLE: tuple[Blind, ...] = (
    # torch.distributed.checkpoint, rows of damage.TABLE
    Blind(
        "files-swapped",
        "equal-layout",
        "no data file says which rank or save wrote it: files of equal layout are interchangeable",
    ),
    Blind(
        "file-of-another-step",
        "no-replicas",
        "`save_id` is in .metadata only, so a file of another save of the same model fits",
    ),
    Blind(
        "places-swapped",
        "zip",
        "a torch zip names neither its tensor nor its offset: items of one layout are exchangeable",
    ),
    Blind("flip-unsummed-payload", "no-crc", "safetensors items carry no checksum"),
    Blind("zeroed-range", "no-crc", "safetensors items carry no checksum"),
    Blind(
        "tensor-forgotten-everywhere",
        "between-others",
        ".metadata alone says which tensors there are; a gap between items may be an alignment",
    ),
    Blind(
        "flip-metadata*",
        "names-only",
        ".metadata has no checksum: a flipped letter in a name gives another name",
        sometimes=True,
    ),
    # every format, rows of damage.EVERYWHERE
    Blind(
        "*bit-flipped",
        "unsummed",
        "safetensors, zarr and torch.save before 1.6 carry no checksum",
        sometimes=True,
    ),
    Blind(
        "*bit-flipped",
        "text",
        "headers and metadata have no checksum: another letter is another name",
        sometimes=True,
    ),
    Blind("file-zeroed", "unsummed", "a zarr chunk is bytes and nothing else"),
    Blind("file-first-page-lost", "unsummed", "a zarr chunk is bytes and nothing else"),
    Blind(
        "file-of-a-peer",
        "like",
        "no file of the two tells its rank, place or save; parts that are cut show that two are equal",
        sometimes=True,
    ),
    Blind("files-swapped-by-name", "like", "no file of the two tells its rank, place or save"),
    Blind("file-of-a-peer", "zero", "ZeRO's files name no rank: values decide", sometimes=True),
    Blind("files-swapped-by-name", "zero", "ZeRO's files name no rank: values decide", sometimes=True),
    Blind(
        "files-swapped-by-name",
        "unranked",
        "a converter writes one rank into the arguments of all",
        sometimes=True,
    ),
    Blind("ranks-swapped", "like", "no file of the two ranks tells its rank, place or save", sometimes=True),
    Blind("ranks-swapped", "zero", "ZeRO's files name no rank: values decide", sometimes=True),
    Blind(
        "ranks-swapped", "unranked", "a converter writes one rank into the arguments of all", sometimes=True
    ),
    Blind("ranks-swapped", "rankless", "a rank's random state does not tell its rank", sometimes=True),
    Blind("file-of-a-peer", "rankless", "a rank's random state does not tell its rank", sometimes=True),
    Blind(
        "file-of-another-checkpoint",
        "rankless",
        "a trainer's state tells neither rank nor model, nor does a file of a universal folder",
        sometimes=True,
    ),
    Blind(
        "files-swapped-by-name", "rankless", "a rank's random state does not tell its rank", sometimes=True
    ),
    Blind("file-removed", "optional", "a job may have no scheduler"),
    Blind(
        "file-removed",
        "own-names",
        "Fabric's meta.pt holds what the user named, and .metadata tells nothing of it",
    ),
    Blind("trainer-states-exchanged", "rankless", "a trainer's state does not tell its rank"),
    Blind(
        "values-of-another-save",
        "values",
        "no file tells its save; its own checksums are right",
        sometimes=True,
    ),
    Blind(
        "pickle-number-changed",
        "one-witness",
        "one file tells the number, and it is well-formed",
        sometimes=True,
    ),
    Blind("json-*", "one-witness", "one file tells the counters of a run", sometimes=True),
    Blind("pickle-name-changed", "text", "a whole file is the only witness of its names", sometimes=True),
    Blind("header-dtype-of-the-same-width", "bare", "the header alone tells dtypes", sometimes=True),
    Blind("header-dtype-of-the-same-width", "listed", "an index tells no dtypes", sometimes=True),
    Blind("header-shape-transposed", "bare", "the header alone tells shapes", sometimes=True),
    Blind("header-shape-transposed", "listed", "an index tells no shapes", sometimes=True),
    Blind("header-name-changed", "bare", "the header alone tells names", sometimes=True),
    Blind("header-tensor-left-out", "bare", "the header alone tells names", sometimes=True),
    Blind(
        "header-metadata-left-out",
        "bare",
        "the header alone tells the values beside the tensors",
        sometimes=True,
    ),
    Blind("header-last-row-left-out", "bare", "the header alone tells shapes", sometimes=True),
    Blind(
        "header-last-row-left-out", "untotalled", "an index without a total tells no sizes", sometimes=True
    ),
    Blind(
        "header-last-row-left-out",
        "shard",
        "torch.chunk leaves more than one length for a last part",
        sometimes=True,
    ),
    Blind("header-two-exchanged", "places", "the header alone tells which bytes are whose", sometimes=True),
    Blind("array-dtype", "array", "`.zarray` alone tells the dtype"),
    Blind(
        "array-shape-inside-the-last-chunk",
        "padded",
        "padded vocabularies and buckets may end inside a chunk, and `.zarray` alone tells where",
    ),
    Blind(
        "array-folder-gone", "array", "the folder alone tells that there was such a tensor", sometimes=True
    ),
    Blind(
        "foreign-meta.pt", "dcp-root", "a meta.pt beside a DCP folder is what Fabric leaves", sometimes=True
    ),
    Blind(
        "foreign-train-rank0.pt",
        "trainless",
        "a train/rank0.pt beside a state dict is what OLMo leaves",
        sometimes=True,
    ),
)


def blind(damage: str) -> tuple[Blind, ...]:
    """The entries of `UNDETECTABLE` for a row."""
    return tuple(b for b in UNDETECTABLE if fnmatchcase(damage, b.damage))


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
