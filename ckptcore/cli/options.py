"""Options: what does each one mean, and which ones do commands share?

An option is a type with its words; a table of options is a name and a default for each. `takes` gives a
command the options of a table, so that two commands that share an option say the same of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer

Table = Mapping[str, tuple[Any, Any]]  # parameter -> (type, default), in the order of the help
_F = TypeVar("_F", bound=Callable[..., None])


class Output(StrEnum):
    """How an answer is written."""

    TEXT = "text"
    JSON = "json"


class Level(StrEnum):
    """How deep to check."""

    FILES = "files"
    COVER = "cover"
    BYTES = "bytes"
    VALUES = "values"


Src = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: a path or any fsspec URL.")]
Dst = Annotated[
    str,
    typer.Argument(metavar="DST", help="A new folder; or one file: .safetensors, .pt, .pth, .bin, .ckpt."),
]
One = Annotated[str, typer.Argument(metavar="A", help="A checkpoint: a path or any fsspec URL.")]
Other = Annotated[str, typer.Argument(metavar="B", help="Another, of any format and topology.")]
As = Annotated[Output, typer.Option("--output", help="Text for people, JSON for programs.")]
Recover = Annotated[
    bool,
    typer.Option("--recover", help="Take a save as it is that did not finish, or that nothing proves whole."),
]
Keep = Annotated[bool, typer.Option("--keep-quantized", help="Quantised weights as stored, no float32.")]
To = Annotated[
    str,
    typer.Option("--to", metavar="FORMAT", help="Output format; default by DST's suffix, else safetensors."),
]
MeshOf = Annotated[
    str,
    typer.Option(
        "--mesh",
        metavar="AXES",
        help="The ranks to write for, as in fsdp=4,tp=2; rank files keep the device, too: cuda:fsdp=8.",
    ),
]
Sharding = Annotated[
    str | None,
    typer.Option("--sharding", metavar="FILE", help="TOML with placement rules; default: built-in ones."),
]
Serialization = Annotated[
    str, typer.Option("--serialization", help="Items of a DCP folder: torch_save or safetensors.")
]
Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="GLOB", help="Only these names (repeatable).")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Not these names (repeatable).")
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="OLD=NEW", help="Rename a prefix, or a pattern with one * (repeatable)."
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="Cast floating-point tensors: bf16, fp16, fp32, ....")
]
DtypeFor = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype-for", metavar="GLOB=DTYPE", help="Exceptions to --dtype; DTYPE may be keep (repeatable)."
    ),
]
MaxFile = Annotated[
    str, typer.Option("--max-file-size", metavar="SIZE", help="Tensor bytes per output file of a folder.")
]
Tie = Annotated[
    list[str] | None,
    typer.Option("--tie", metavar="A=B", help="A equals B: store only B, check equality (repeatable)."),
]
Prefix = Annotated[
    str | None, typer.Option("--model-prefix", metavar="PREFIX", help="Where the model is in the checkpoint.")
]
Config = Annotated[
    str | None, typer.Option("--config", metavar="DIR", help="Folder with config.json, tokenizer files, ....")
]
Model = Annotated[
    bool, typer.Option("--model", help="The model parts alone, as export finds them, wrappers off.")
]
Prefixes = Annotated[
    list[str] | None,
    typer.Option("--model-prefix", metavar="PREFIX", help="Where the model is: in A, then in B."),
]
RenameA = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="OLD=NEW", help="Rename a prefix of A's, or a pattern with one * (repeatable)."
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option("--tie", metavar="GONE=KEPT", help="A side without GONE has KEPT there, too (repeatable)."),
]
Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Budget for tensor buffers.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Threads; default by the machine.")]
Device = Annotated[str, typer.Option("--device", help="Where to cast and sum: cpu, cuda, cuda:1.")]
Resume = Annotated[bool, typer.Option("--resume/--no-resume", help="Keep verified files of an earlier run.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace DST as a whole, if every file in it is accounted for.")
]
OverwriteForeign = Annotated[
    bool, typer.Option("--overwrite-foreign", help="Replace DST together with files of others in it.")
]
Verify = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Check stored CRC-32 and copies while moving.")
]
Digest = Annotated[bool, typer.Option("--digest/--no-digest", help="BLAKE3 of every output file.")]
Fingerprint = Annotated[
    bool | None,
    typer.Option(
        "--fingerprint/--no-fingerprint",
        help="One digest of the numbers, whatever the layout; by default for a reshard only.",
    ),
]
Catalog = Annotated[
    str | None,
    typer.Option("--catalog", metavar="URL", envvar="CKPTCORE_CATALOG_URL", help="Where to register."),
]
KnownBy = Annotated[
    str | None,
    typer.Option("--catalog", metavar="URL", envvar="CKPTCORE_CATALOG_URL", help="The catalog to go by."),
]
RootNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ROOT]...", help="Names of watched roots; default: all that are not paused."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
Settle = Annotated[
    str, typer.Option("--settle", metavar="TIME", help="Leave alone what changed within this time.")
]
Again = Annotated[bool, typer.Option("--again", help="Also what failed a short time ago, or was broken.")]
Wait = Annotated[
    str | None,
    typer.Option(
        "--wait",
        metavar="TIME",
        help="Look again for so long at what is not whole yet, and make once what several ask for.",
    ),
]
NoCatalog = Annotated[bool, typer.Option("--no-catalog", help="Do not register.")]
Save = Annotated[
    str | None, typer.Option("--save", metavar="DIR", help="Keep the plan for `ckptcore apply`.")
]


# Which tensors, under which names, in which dtypes and files.
CONTENT: Table = {
    "include": (Include, None),
    "exclude": (Exclude, None),
    "rename": (Rename, None),
    "dtype": (Dtype, None),
    "dtype_for": (DtypeFor, None),
    "max_file_size": (MaxFile, "5GB"),
    "tie": (Tie, None),
    "recover": (Recover, False),
    "keep_quantized": (Keep, False),
}
# Which names of two checkpoints, brought together how.
NAMES: Table = {
    "model": (Model, False),
    "model_prefix": (Prefixes, None),
    "include": (Include, None),
    "exclude": (Exclude, None),
    "rename": (RenameA, None),
    "tie": (Alias, None),
    "keep_quantized": (Keep, False),
}
# The names that a fingerprint is of.
PART: Table = {
    "model": (Model, False),
    "model_prefix": (Prefix, None),
    "include": (Include, None),
    "exclude": (Exclude, None),
    "rename": (Rename, None),
    "keep_quantized": (Keep, False),
}
RECORD: Table = {"catalog": (Catalog, None), "no_catalog": (NoCatalog, False)}
# For an export: where the model is, and what goes beside it.
PREFIX: Table = {"model_prefix": (Prefix, None)}
MODEL: Table = {**PREFIX, "config": (Config, None)}
# For a reshard: which rank gets what.
SHARDS: Table = {
    "mesh": (MeshOf, ""),
    "sharding": (Sharding, None),
    "serialization": (Serialization, "torch_save"),
}
MEANS: Table = {"memory": (Memory, "1GiB"), "workers": (Workers, None)}
DEVICE: Table = {"device": (Device, "cpu")}
PLACE: Table = {
    "resume": (Resume, True),
    "overwrite": (Overwrite, False),
    "overwrite_foreign": (OverwriteForeign, False),
}
PROOF: Table = {
    "verify": (Verify, True),
    "digest": (Digest, True),
    "fingerprint": (Fingerprint, None),
    "catalog": (Catalog, None),
    "no_catalog": (NoCatalog, False),
}
WAIT: Table = {"wait": (Wait, None)}
SAVE: Table = {"save": (Save, None)}
# For what is done in the catalog's name, and needs one.
KNOWN: Table = {"catalog": (KnownBy, None)}
ANSWER: Table = {"output": (As, Output.TEXT)}


def takes(*tables: Table) -> Callable[[_F], _F]:
    """Gives a command these options, in place of its ``**given``."""

    def wrap(command: _F) -> _F:
        seen = inspect.signature(command, eval_str=True)
        own = [p for p in seen.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for table in tables
            for name, (kind, default) in table.items()
        ]
        command.__signature__ = seen.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return command

    return wrap
