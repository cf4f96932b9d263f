"""Declare the options of a conversion once, for the command line, flows, the receiver and sweeps.

A field of `Options` is an option: its name, its type and its default; the `Option` beside the type holds the
help and the limits. Values are kept as people spell them ("5GB", "OLD=NEW"); `Options.request` and
`Options.settings` read them. Groups name the options that commands share, and `OF_VERB` those of each verb.

These are plain dataclasses, from which `pydantic_type` makes pydantic's types: every command registers its
options when the program starts, and `ckptcore inspect` must not wait for pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

from ckptcore.errors import UsageError
from ckptcore.utils.units import parse_size

if TYPE_CHECKING:
    from ckptcore.planning.request import Request, Settings


@dataclass(frozen=True, slots=True)
class Option:
    """Properties of an option, beside its name, type and default.

    Attributes:
        help: One line.
        metavar: Placeholder of its value in the help.
        least: Smallest number.
        pattern: Regex that a text must match.
        env: Environment variable for the command line.
        off: Name of its opposite, where that is not ``no-`` and the name.
        hidden: Whether the help omits it.
    """

    help: str
    metavar: str | None = None
    least: int | None = None
    pattern: str | None = None
    env: str | None = None
    off: str | None = None
    hidden: bool = False


Texts = tuple[str, ...] | None
Source = Annotated[str, Option("Checkpoint: a path or any fsspec URL.", "SRC")]
Destination = Annotated[
    str, Option("A new folder; or one file: .safetensors, .pt, .pth, .bin, .ckpt.", "DST")
]
Verb = Annotated[
    Literal["consolidate", "export"], Option("consolidate keeps every tensor, export takes the model part.")
]

Mesh = Annotated[
    str,
    Option(
        "The ranks to write for, as in fsdp=4,tp=2; rank files keep the device, too: cuda:fsdp=8.", "AXES"
    ),
]

CONTENT = (
    "to",
    "include",
    "exclude",
    "rename",
    "dtype",
    "dtype_for",
    "max_file_size",
    "tie",
    "recover",
    "keep_quantized",
)
MODEL = ("model_prefix", "config", "tokenizer", "names", "arch")
SHARDS = ("mesh", "sharding", "serialization", "model_prefix")
MEANS = ("memory", "workers")
PLACE = ("resume", "overwrite", "overwrite_foreign")
PROOF = ("verify", "digest", "fingerprint")
RECORD = ("catalog", "no_catalog")
_EVERY = (*CONTENT, *MEANS, "device", *PLACE, *PROOF, *RECORD)
OF_VERB: Mapping[str, tuple[str, ...]] = {
    "consolidate": _EVERY,
    "export": (*MODEL, *_EVERY),
    "reshard": (*SHARDS, *_EVERY),
}


_OPTIONS: dict[type[Any], Mapping[str, tuple[Any, Option, Any]]] = {}  # of dataclasses that were read


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one conversion is to be made, as its options are spelled."""

    to: Annotated[
        str, Option("Output format; default by DST's suffix, else safetensors, for a reshard dcp.", "FORMAT")
    ] = ""
    include: Annotated[Texts, Option("Only these names (repeatable).", "GLOB")] = None
    exclude: Annotated[Texts, Option("Not these names (repeatable).", "GLOB")] = None
    rename: Annotated[Texts, Option("Rename a prefix, or a pattern with one * (repeatable).", "OLD=NEW")] = (
        None
    )
    dtype: Annotated[str | None, Option("Cast floating-point tensors: bf16, fp16, fp32, ....")] = None
    dtype_for: Annotated[
        Texts, Option("Exceptions to --dtype; DTYPE may be keep (repeatable).", "GLOB=DTYPE")
    ] = None
    max_file_size: Annotated[str, Option("Tensor bytes per output file of a folder.", "SIZE")] = "5GB"
    tie: Annotated[Texts, Option("A equals B: store only B, check equality (repeatable).", "A=B")] = None
    recover: Annotated[
        bool, Option("Take a save as it is that did not finish, or that nothing proves whole.")
    ] = False
    keep_quantized: Annotated[bool, Option("Quantised weights as stored, no float32.")] = False
    model_prefix: Annotated[
        str | None, Option("Where the model is in the checkpoint; default: it is found.", "PREFIX")
    ] = None
    config: Annotated[
        str | None,
        Option(
            "Folder with config.json, tokenizer, ..., or a config file, which names and shapes are checked "
            "against; default: what the source holds; none takes none.",
            "DIR|FILE",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option("Folder with the tokenizer; default: --config's, else the source's; none takes none.", "DIR"),
    ] = None
    names: Annotated[
        str,
        Option(
            "Whose names the tensors get: hf-hub, as on the hub, or another world; stored keeps them.",
            "WORLD",
        ),
    ] = "hf-hub"
    arch: Annotated[
        str, Option("Architecture whose names are mapped; auto finds it by configs and names.", "NAME")
    ] = "auto"
    mesh: Mesh = ""
    sharding: Annotated[str | None, Option("TOML with placement rules; default: built-in ones.", "FILE")] = (
        None
    )
    serialization: Annotated[
        Literal["torch_save", "safetensors"], Option("How items of a DCP folder are written.")
    ] = "torch_save"
    memory: Annotated[str, Option("Budget for tensor buffers.", "SIZE")] = "1GiB"
    workers: Annotated[int | None, Option("Threads; default by the machine.", least=1)] = None
    device: Annotated[
        str, Option("Where to cast and sum: cpu, cuda, cuda:1.", pattern=r"^(cpu|cuda(:\d+)?)$")
    ] = "cpu"
    resume: Annotated[bool, Option("Keep verified files of an earlier run.")] = True
    overwrite: Annotated[bool, Option("Replace DST as a whole, if every file in it is accounted for.")] = (
        False
    )
    overwrite_foreign: Annotated[bool, Option("Replace DST together with files of others in it.")] = False
    verify: Annotated[bool, Option("Check stored CRC-32 and copies while moving.")] = True
    digest: Annotated[bool, Option("BLAKE3 of every output file.")] = True
    fingerprint: Annotated[
        bool | None, Option("One digest of the numbers, whatever the layout; by default for a reshard only.")
    ] = None
    catalog: Annotated[
        str | None,
        Option(
            "Where to register; default: CKPTCORE_CATALOG_URL, else the user's own.",
            "URL",
            env="CKPTCORE_CATALOG_URL",
        ),
    ] = None
    no_catalog: Annotated[bool, Option("Do not register.")] = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Select the options among the arguments of a command."""
        return cls(**{name: value for name, value in given.items() if name in options_of(cls)})

    def request(self, verb: str, source: str, destination: str | None = None) -> Request:
        """Return the request; raise `UsageError`.

        destination: None takes that of a source that is consolidated: SOURCE.consolidated.
        """
        from ckptcore.planning.request import Request

        return Request(
            source=source,
            destination=f"{source.rstrip('/')}.consolidated" if destination is None else destination,
            verb=verb,
            to=self.to,
            include=tuple(self.include or ()),
            exclude=tuple(self.exclude or ()),
            rename=pairs("rename", self.rename),
            dtype=self.dtype,
            dtype_for=pairs("dtype_for", self.dtype_for),
            model_prefix=self.model_prefix,
            config=self.config,
            tokenizer=self.tokenizer,
            max_file_size=parse_size(self.max_file_size),
            tie=pairs("tie", self.tie),
            recover=self.recover,
            overwrite=self.overwrite,
            resume=self.resume,
            keep_quantized=self.keep_quantized,
            mesh=self.mesh,
            sharding=self.sharding,
            serialization=self.serialization,
            overwrite_foreign=self.overwrite_foreign,
            names=self.names,
            arch=self.arch,
        )

    def settings(self) -> Settings:
        """Return the settings; raise `UsageError`."""
        from ckptcore.planning.request import Settings

        return Settings(
            memory=parse_size(self.memory),
            workers=self.workers,
            device=self.device,
            verify=self.verify,
            digest=self.digest,
            fingerprint=self.fingerprint,
        )

    @property
    def register_in(self) -> str | Literal[False] | None:
        """The catalog's URL; None is the default one, False is none."""
        return False if self.no_catalog else self.catalog


def options_of(declared: type[Any]) -> Mapping[str, tuple[Any, Option, Any]]:
    """Return the options of a dataclass: name -> (type, `Option`, default)."""
    found = _OPTIONS.get(declared)
    if found is None:
        found = _OPTIONS[declared] = _options_of(declared)
    return found


def split(annotation: Any) -> tuple[Any, Option | None]:
    """Return the type of an annotation, and its `Option` if there is one."""
    if get_origin(annotation) is not Annotated:
        return annotation, None
    kind, *more = get_args(annotation)
    return kind, next((m for m in more if isinstance(m, Option)), None)


def pydantic_type(kind: Any, option: Option) -> Any:
    """Return the pydantic type of an option with its limits, as a form shows it."""
    from pydantic import Field

    # None is no limit.
    return Annotated[kind, option, Field(description=option.help, ge=option.least, pattern=option.pattern)]


def pairs(name: str, spelled: Iterable[str] | None) -> tuple[tuple[str, str], ...]:
    """Split the ``A=B`` texts of an option; raise `UsageError`.

    >>> pairs("rename", ["old.=new.", "a=="])
    (('old.', 'new.'), ('a', '='))
    """
    return tuple(_split_pairs(f"--{name.replace('_', '-')}", spelled or ()))


def here(name: str, spelled: str) -> Path:
    """Return the local path that an option names; raise `UsageError` for a URL.

    A URL made into a path would be a folder called ``s3:``, credentials and all.
    """
    from ckptcore.store import local_path

    path = local_path(spelled)
    if path is None:
        raise UsageError(f"cannot use {name} {spelled}: it is no path of this machine", hint="name one")
    return path


def read_rules(spelled: str | None) -> str | None:
    """Read the placement rules of ``--sharding``: from a file, or the rules themselves (in lines).

    Raises `UsageError`.
    """
    if spelled is None or "\n" in spelled:
        return spelled
    from ckptcore.topology.rules_file import MAX_BYTES  # imports pydantic

    path = here("--sharding", spelled)
    try:
        with path.open("rb") as file:  # a wrong file is not read to its end
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(
                f"--sharding {path} has more than {MAX_BYTES} bytes", hint="name a file of rules"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--sharding {path} cannot be read: {error}") from error


def _split_pairs(option: str, spelled: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in spelled:
        left, equals, right = text.partition("=")
        if not equals or not left:
            raise UsageError(f"cannot read {option} {text!r}: it is not of the form A=B")
        yield left, right


def _options_of(declared: type[Any]) -> Mapping[str, tuple[Any, Option, Any]]:
    hints = get_type_hints(declared, include_extras=True)
    found = {}
    for field in fields(declared):
        kind, option = split(hints[field.name])
        if option is not None:
            found[field.name] = kind, option, None if field.default is MISSING else field.default
    return found
