"""Declare the options of a conversion once, for the command line, flows, the receiver and sweeps.

A field of `Options` is an option: its name, its type and its default; the `Option` beside the type holds the
help and the limits. Values keep the form that people write ("5GB", "OLD=NEW"); `Options.request` and
`Options.settings` parse them. Groups name the options that commands share, and `OF_VERB` those of each verb.

These are plain dataclasses, from which `pydantic_type` makes pydantic's types: every command registers its
options when the program starts, and `ckptcore inspect` must not wait for pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from ckptcore.errors import UsageError
from ckptcore.utils.merged_url import is_merged
from ckptcore.utils.units import parse_size

if TYPE_CHECKING:
    from ckptcore.planning.request import Request, Settings


@dataclass(frozen=True, slots=True)
class Option:
    """Describe an option beyond its name, type and default.

    Attributes:
        help: One or two sentences for the help and for Prefect's form.
        metavar: The placeholder of its value in the help.
        least: The smallest number that is accepted.
        pattern: A regular expression that a text must match.
        env: The environment variable that a command line reads when the option is absent.
        off: The name of its opposite, where that is not ``no-`` and the name.
    """

    help: str
    metavar: str | None = None
    least: int | None = None
    pattern: str | None = None
    env: str | None = None
    off: str | None = None


Declared = TypeVar("Declared")
Declaration = tuple[Any, Option, Any]  # type, option, default
Texts = tuple[str, ...] | None
Source = Annotated[str, Option("Path or fsspec URL of the checkpoint.", "SRC")]
Sources = Annotated[
    str | list[str],
    Option("Path or fsspec URL of the checkpoint, or a list of the folders that hold it.", "SRC"),
]
Destination = Annotated[
    str, Option("New folder, or one file with the suffix .safetensors, .pt, .pth, .bin or .ckpt.", "DST")
]
Verb = Annotated[
    Literal["consolidate", "export"], Option("consolidate keeps every tensor; export takes the model part.")
]

Mesh = Annotated[
    str,
    Option(
        "Ranks to write for, such as fsdp=4,tp=2. Rank files also record the device: cuda:fsdp=8.", "AXES"
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
    "allow_incomplete",
    "keep_quantized",
    "weights",
)
NAMES = ("model_prefix", "config", "names", "arch", "allow_untried")
MODEL = (*NAMES, "tokenizer")
SHARDS = (*NAMES, "tokenizer", "mesh", "sharding", "serialization", "keep_object")
MEANS = ("memory", "workers")
PLACE = ("resume", "overwrite", "overwrite_foreign", "overwrite_in_place")
PROOF = ("verify", "digest", "fingerprint", "stats")
RECORD = ("catalog", "no_catalog")
_EVERY = (*CONTENT, *MEANS, "device", *PLACE, *PROOF, *RECORD, "meta")
OF_VERB: Mapping[str, tuple[str, ...]] = {
    "consolidate": (*NAMES, *_EVERY),
    "export": (*MODEL, *_EVERY),
    "reshard": (*SHARDS, *_EVERY),
}
_BY_SUFFIX = "Output format. Default: the one of DST's suffix, otherwise safetensors."
_OWN_CONFIG = "Default: the source's own; none uses none."
_DIGEST = "Compute one digest of all tensor values, whatever the layout. Default:"
_NAMES_STORED = (
    "Names of the output: stored for the stored names, hf-hub for those on the Hugging Face hub, or a "
    "trainer's, such as torchtitan or torchtitan:wq. Default: stored. All others take the model alone: no "
    "optimizer is written."
)
# Verb -> option -> its help there, where the one of all verbs says more than a user of this one needs.
HELP_OF_VERB: Mapping[str, Mapping[str, str]] = {
    "consolidate": {
        "to": _BY_SUFFIX,
        "config": f"config.json of the model, or the folder with it, for --names. {_OWN_CONFIG}",
        "names": _NAMES_STORED,
        "fingerprint": f"{_DIGEST} no.",
    },
    "export": {
        "to": _BY_SUFFIX,
        "config": "config.json, or the folder with it: it is copied, and names and shapes are compared with "
        f"it. {_OWN_CONFIG}",
        "names": "Names of the output: hf-hub for those on the Hugging Face hub, stored for the stored "
        "names, or a trainer's, such as torchtitan or torchtitan:wq. Default: hf-hub.",
        "fingerprint": f"{_DIGEST} no.",
    },
    "reshard": {
        "to": "Output format. Default: dcp.",
        "config": "config.json, or the folder with it: heads and layers are checked, and for verl it is "
        f"copied. {_OWN_CONFIG}",
        "names": _NAMES_STORED,
        "fingerprint": f"{_DIGEST} yes.",
    },
    "verify-export": {
        "include": "What the export took of the model, where the catalog does not know it (repeatable).",
        "exclude": "What the export left out of the model, where the catalog does not know it (repeatable).",
        "dtype": "Dtype that the export was cast to, where the catalog does not know it.",
    },
}
# The weights of a merge are those of the sum, and each checkpoint is read by its own preference.
OF_MERGE = tuple(name for name in OF_VERB["reshard"] if name != "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hold the options of one conversion, in the form that people write."""

    to: Annotated[
        str,
        Option(
            "Output format. Default: the one of DST's suffix, otherwise dcp for reshard and safetensors for "
            "the other commands.",
            "FORMAT",
        ),
    ] = ""
    include: Annotated[Texts, Option("Take only tensors whose names match (repeatable).", "GLOB")] = None
    exclude: Annotated[Texts, Option("Leave out tensors whose names match (repeatable).", "GLOB")] = None
    rename: Annotated[Texts, Option("Rename a prefix, or a pattern with one * (repeatable).", "OLD=NEW")] = (
        None
    )
    dtype: Annotated[
        str | None, Option("Cast floating-point tensors to this dtype, such as bf16, fp16 or fp32.", "DTYPE")
    ] = None
    dtype_for: Annotated[
        Texts,
        Option(
            "Use another dtype than --dtype for matching tensors; keep casts nothing (repeatable).",
            "GLOB=DTYPE",
        ),
    ] = None
    max_file_size: Annotated[
        str, Option("Maximum tensor bytes in each file of an output folder.", "SIZE")
    ] = "5GB"
    tie: Annotated[
        Texts, Option("Store only B of the equal tensors A and B; equality is checked (repeatable).", "A=B")
    ] = None
    allow_incomplete: Annotated[
        bool, Option("Accept a save that did not finish, or that cannot be proven complete.")
    ] = False
    keep_quantized: Annotated[
        bool, Option("Keep quantised weights as stored instead of converting them to float32.")
    ] = False
    weights: Annotated[
        Literal["auto", "master", "module"],
        Option(
            "From a checkpoint that has both (DeepSpeed), take fp32 master weights, or the weights of the "
            "module as stored. auto takes masters where the checkpoint names them."
        ),
    ] = "auto"
    keep_object: Annotated[
        Texts,
        Option(
            "Carry state that is bound to the ranks that saved it, such as a data loader's (repeatable).",
            "GLOB",
        ),
    ] = None
    model_prefix: Annotated[
        str | None,
        Option("Prefix of the model's names in the checkpoint. Default: found automatically.", "PREFIX"),
    ] = None
    config: Annotated[
        str | None,
        Option(
            "config.json, or the folder with it. An export copies it and checks names and shapes; a reshard "
            "checks heads and layers, and copies it for verl. Default: the source's own; none uses none.",
            "DIR|FILE",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            "Folder with the tokenizer to copy. Default: that of --config, otherwise the source's own; none "
            "copies none.",
            "DIR",
        ),
    ] = None
    names: Annotated[
        str | None,
        Option(
            "Names of the output: hf-hub for those on the Hugging Face hub, stored for the stored names, or "
            "a trainer's, such as torchtitan or torchtitan:wq. Default: hf-hub for export, stored for the "
            "other commands. All but stored take the model alone: no optimizer is written.",
            "WORLD[:GENERATION]",
        ),
    ] = None
    arch: Annotated[
        str, Option("Architecture whose names are mapped; auto detects it from configs and names.", "NAME")
    ] = "auto"
    allow_untried: Annotated[
        bool, Option("Write a trainer's names although no code of the trainer has loaded such an output.")
    ] = False
    mesh: Mesh = ""
    sharding: Annotated[
        str | None, Option("TOML file with sharding rules. Default: the built-in rules.", "FILE")
    ] = None
    serialization: Annotated[
        Literal["torch_save", "safetensors"], Option("Serialisation of the items in a DCP folder.")
    ] = "torch_save"
    memory: Annotated[str, Option("Memory budget for tensor buffers.", "SIZE")] = "1GiB"
    workers: Annotated[
        int | None,
        Option(
            "Number of threads. Default: the usable CPU cores, at most one for each 64 MiB of --memory.",
            "N",
            least=1,
        ),
    ] = None
    device: Annotated[
        str,
        Option(
            "Device for casts and checksums: cpu, cuda or cuda:N.", "DEVICE", pattern=r"^(cpu|cuda(:\d+)?)$"
        ),
    ] = "cpu"
    resume: Annotated[bool, Option("Keep the verified files of an earlier run.")] = True
    overwrite: Annotated[bool, Option("Replace DST completely if ckptcore wrote every file in it.")] = False
    overwrite_foreign: Annotated[
        bool, Option("Replace DST completely, including files that ckptcore did not write.")
    ] = False
    overwrite_in_place: Annotated[
        bool,
        Option(
            "On an object store, replace a folder object by object. Readers cannot load it until that ends."
        ),
    ] = False
    verify: Annotated[bool, Option("Verify stored CRC-32 checksums and replicas while reading.")] = True
    digest: Annotated[bool, Option("Compute the BLAKE3 digest of every output file.")] = True
    fingerprint: Annotated[
        bool | None,
        Option("Compute one digest of all tensor values, whatever the layout. Default: for reshard only."),
    ] = None
    stats: Annotated[
        bool,
        Option("Compute norm, mean and counts of NaN, Inf and zeros of each tensor, for the run's history."),
    ] = False
    catalog: Annotated[
        str | None,
        Option(
            "Catalog to register in. Default: CKPTCORE_CATALOG_URL, otherwise the user's own.",
            "URL",
            env="CKPTCORE_CATALOG_URL",
        ),
    ] = None
    no_catalog: Annotated[bool, Option("Do not register in a catalog.")] = False
    meta: Annotated[
        Texts,
        Option(
            "Fact about the training, for the catalog: metrics.loss=2.31, git_commit=3f9a, user=ada, "
            "config.lr=3e-4 (repeatable).",
            "KEY=VALUE",
        ),
    ] = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the options among the arguments of a command, which may have others."""
        return read_options(cls, arguments)

    def request(self, verb: str, source: str | Sequence[str], destination: str | None = None) -> Request:
        """Return what to make of a checkpoint.

        Args:
            verb: ``consolidate``, ``export`` or ``reshard``.
            source: Path or URL of the checkpoint, or several of one checkpoint.
            destination: Path or URL of the output; None means ``SOURCE.consolidated``.

        Raises:
            NotComplete: A pipeline stage that is named does not exist.
            UsageError: An option cannot be parsed, or options contradict each other.
        """
        from ckptcore.planning.request import STATED, Request
        from ckptcore.store.merged import source_url

        url = source_url(source, recover=self.allow_incomplete)
        if destination is None and is_merged(url):
            raise UsageError("a destination is needed: there are several sources")
        stated: dict[str, Any] = {}
        for option in fields(self):
            name, value = request_field(option.name), getattr(self, option.name)
            if name in STATED:
                stated[name] = _PARSED[name](name, value) if name in _PARSED else value
        request = Request(
            source=url,
            destination=f"{url.rstrip('/')}.consolidated" if destination is None else destination,
            verb=verb,
            **stated,
        )
        request.require_writer()
        return request

    def settings(self) -> Settings:
        """Return the resources to use: memory, threads, device; raises `UsageError`."""
        from ckptcore.planning.request import Settings

        return Settings(
            memory=parse_size(self.memory),
            workers=self.workers,
            device=self.device,
            verify=self.verify,
            digest=self.digest,
            fingerprint=self.fingerprint,
            stats=self.stats,
        )

    @property
    def register_in(self) -> str | Literal[False] | None:
        """The catalog's URL; None is the default one, False is none."""
        return False if self.no_catalog else self.catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Hold what an export is compared with."""

    against: Annotated[
        str | None,
        Option("Source of the export. Default: the one in the catalog, otherwise in the model card.", "SRC"),
    ] = None
    reference: Annotated[
        str | None, Option("Hugging Face folder known to be right, to compare logits with.", "FOLDER")
    ] = None
    near: Annotated[
        str | None,
        Option(
            "Related Hugging Face folder: tensors with the same name must have the same direction.", "BASE"
        ),
    ] = None
    near_threshold: Annotated[float, Option("Smallest cosine similarity that --near accepts.", "COSINE")] = (
        0.8
    )
    logits: Annotated[
        bool, Option("Open the export with transformers and check its logits. Needs the model's memory.")
    ] = False
    logits_dtype: Annotated[str, Option("Dtype in which models are opened.", "DTYPE")] = "fp32"
    logits_tolerance: Annotated[
        float, Option("Largest difference of logits that is accepted; 0 demands equal bits.", "DIFFERENCE")
    ] = 0.0
    any_memory: Annotated[bool, Option("Also open models that are larger than the free memory.")] = False


_OPTIONS: dict[type[Any], dict[str, Declaration]] = {}  # of dataclasses that were read


def options_of(declared: type[Any]) -> Mapping[str, Declaration]:
    """Return the options that a dataclass declares: name -> (type, `Option`, default)."""
    if declared in _OPTIONS:
        return _OPTIONS[declared]
    hints = get_type_hints(declared, include_extras=True)
    options = _OPTIONS[declared] = {}
    for field in fields(declared):
        kind, option = split(hints[field.name])
        if option is not None:
            options[field.name] = kind, option, None if field.default is MISSING else field.default
    return options


def read_options(declared: type[Declared], arguments: Mapping[str, Any]) -> Declared:
    """Return the options of a dataclass among the arguments of a command, which may have others.

    >>> read_options(Options, {"allow_incomplete": True, "source": "a"}).allow_incomplete
    True
    """
    return declared(**{name: arguments[name] for name in options_of(declared) if name in arguments})


def request_field(name: str) -> str:
    """Return the field of `Request` that holds an option: its name in JSON, in saved plans and in targets."""
    return "recover" if name == "allow_incomplete" else name


def split(annotation: Any) -> tuple[Any, Option | None]:
    """Return the type of an annotation, and its `Option` if there is one."""
    if get_origin(annotation) is not Annotated:
        return annotation, None
    kind, *metadata = get_args(annotation)
    return kind, next((m for m in metadata if isinstance(m, Option)), None)


def pydantic_type(kind: Any, option: Option) -> Any:
    """Return an option's type for pydantic, with its limits and help."""
    from pydantic import Field

    # None is no limit.
    field = Field(description=option.help, ge=option.least, pattern=option.pattern)
    return Annotated[kind, option, field]


def pairs(name: str, texts: Iterable[str] | None) -> tuple[tuple[str, str], ...]:
    """Return the ``A=B`` texts of an option as pairs; raises `UsageError`.

    >>> pairs("rename", ["old.=new.", "a==", "=model."])
    (('old.', 'new.'), ('a', '='), ('', 'model.'))
    """
    parsed = []
    for text in texts or ():
        left, equals, right = text.partition("=")
        # Every name begins with no prefix.
        if not equals or not (left or name == "rename") or not (left or right):
            raise UsageError(f"--{name.replace('_', '-')} must have the form A=B (got {text!r})")
        parsed.append((left, right))
    return tuple(parsed)


# Field of `Request` -> what makes its value from the option's: (its name, the option) -> value.
_PARSED: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("include", "exclude", "keep_object"), lambda _, globs: tuple(globs or ())),
    **dict.fromkeys(("rename", "dtype_for", "tie"), pairs),
    "max_file_size": lambda _, size: parse_size(size),
    "names": lambda _, names: names or "",
}


def here(name: str, text: str) -> Path:
    """Return the local path that an option names; raises `UsageError` for a URL.

    A URL made into a path would be a folder called ``s3:``, credentials and all.
    """
    from ckptcore.store import local_path

    path = local_path(text)
    if path is None:
        raise UsageError(f"{name} must be a local path (got {text!r})", hint="name a local path")
    return path


def read_rules(text: str | None) -> str | None:
    """Return the text of the sharding rules that ``--sharding`` gives: a file's name, or the rules in lines.

    Raises:
        UsageError: The file cannot be read, or is too large to be a file of rules.
    """
    if text is None or "\n" in text:
        return text
    from ckptcore.topology.rules import MAX_BYTES  # pydantic: only those who have rules wait for it

    path = here("--sharding", text)
    try:
        with path.open("rb") as file:  # a file named by mistake is not read to its end
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(
                f"cannot read --sharding {path}: it has more than {MAX_BYTES} bytes",
                hint="name a TOML file of sharding rules",
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read --sharding {path}: {error}") from error
