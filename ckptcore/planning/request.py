"""Requests for an output, and settings of memory, threads and device. Small frozen values, also as JSON."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ckptcore.core import dtype as dtypes
from ckptcore.errors import UsageError
from ckptcore.naming.worlds import GENERATIONS, HUB, PEFT, is_world, parse_world, worlds
from ckptcore.store import local_path, split_url
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.workers import usable_cores

VERBS = ("consolidate", "export", "reshard")
SERIALIZATIONS = ("torch_save", "safetensors")
# A destination with one of these suffixes is one file, of the first format unless another is asked
# for; any other is a folder, unless its format is always one file.
SUFFIX_FORMATS = {
    ".safetensors": ("safetensors",),
    ".pt": ("torch_save", "lightning"),
    ".pth": ("torch_save", "lightning"),
    ".bin": ("torch_save",),
    ".ckpt": ("lightning", "torch_save"),
}
# Formats whose folders for a mesh have a suffix, too: a Trainer calls them step=4.ckpt, and looks for that.
SUFFIX_FOLDERS = {".ckpt": ("lightning",)}
# Suffixes of files that other programs make from an export -> how.
MADE_ELSEWHERE = {
    ".gguf": "export a folder with --config, then run llama.cpp's convert_hf_to_gguf on it (--outfile {name})"
}
# Fields that the JSON form omits at their defaults: a field that is added here changes no digest of a request
# and keeps claims and saved plans valid.
_LATER: dict[str, Any] = {
    "tokenizer": None,
    "arch": "auto",
    "weights": "auto",
    "keep_object": [],
    "overwrite_in_place": False,
    "allow_untried": False,
}
WEIGHTS = ("auto", "master", "module")
# Bytes of the budget for each worker where nobody says how many: four buffers of large steps (`Budget`).
_PER_WORKER = 64 << 20
STORED = "stored"  # a world of names: those of the checkpoint


def _followed() -> Any:
    """Declare a field that follows from others, and is decided once, when they are known."""
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Request:
    """What to make of a checkpoint. Everything here decides the output's bytes.

    Attributes:
        source: Path or URL of the checkpoint; of one in several folders, ``merged_url`` of them.
        destination: Path or URL of the output.
        verb: ``consolidate`` keeps every tensor under its stored name, ``export`` takes the model part,
            ``reshard`` cuts everything for the ranks of a mesh.
        to: Output format; empty: by the destination's suffix.
        include: Globs on stored FQNs; empty: all.
        exclude: Globs on stored FQNs.
        rename: (old, new) prefixes, or patterns with one ``*``, applied in order.
        dtype: Cast floating-point tensors to this, or None.
        dtype_for: (glob, dtype) exceptions to ``dtype``; the first match counts, ``keep`` is no cast.
        model_prefix: Where the model is, for export; None finds it.
        config: Folder with config.json, tokenizer and so on, or a config file; None takes the source's,
            ``none`` takes none.
        max_file_size: Tensor bytes that an output file may hold.
        tie: (dropped, kept) names that must hold equal bytes.
        recover: Take an unfinished or unproven save.
        overwrite: Replace an existing destination.
        resume: Reuse finished files of an earlier run.
        keep_quantized: Carry quantised weights as stored, instead of their values.
        mesh: For reshard, the ranks: ``fsdp=4,tp=2``.
        sharding: TOML text with sharding rules, or None for the built-in ones.
        serialization: How items of a DCP folder are written: torch_save or safetensors.
        overwrite_foreign: Replace a destination also where files in it are not accounted for.
        overwrite_in_place: Replace a folder on an object store, object by object; no reader can use it
            meanwhile.
        tokenizer: Folder with the tokenizer; None and ``none`` as in ``config``.
        names: The world whose names tensors of the model get, with a generation of them behind a colon, or
            ``stored``; empty: the hub's for export, ``stored`` for other verbs.
        arch: The architecture whose names are mapped, or ``auto``.
        weights: Where a format stores trained weights twice (DeepSpeed): ``master``, ``module``, or ``auto``
            for the copy that the format prefers.
        keep_object: Globs on names: state bound to the ranks that saved it, which a reshard carries anyway.
        allow_untried: Take a map to a trainer's names whose result no code of the trainer has loaded.
        format: The output format's name. It and the next three follow from those above.
        single: The output's file name when it is one file, else None.
        takes_model: Only the model part is written, under names of its own.
        replaces: An existing destination may be replaced.
    """

    source: str
    destination: str
    verb: str = "consolidate"
    to: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    dtype: str | None = None
    dtype_for: tuple[tuple[str, str], ...] = ()
    model_prefix: str | None = None
    config: str | None = None
    max_file_size: int = 5_000_000_000
    tie: tuple[tuple[str, str], ...] = ()
    recover: bool = False
    overwrite: bool = False
    resume: bool = True
    keep_quantized: bool = False
    mesh: str = ""
    sharding: str | None = None
    serialization: str = "torch_save"
    overwrite_foreign: bool = False
    tokenizer: str | None = None
    names: str = ""
    arch: str = "auto"
    weights: str = "auto"
    keep_object: tuple[str, ...] = ()
    overwrite_in_place: bool = False
    allow_untried: bool = False
    format: str = _followed()
    single: str | None = _followed()
    takes_model: bool = _followed()
    replaces: bool = _followed()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", _usual_names(self.verb))
        object.__setattr__(self, "format", _format(self.verb, self.to, self.destination))
        object.__setattr__(self, "takes_model", self.verb == "export" or self.names != STORED)
        object.__setattr__(self, "replaces", self.overwrite or self.overwrite_foreign)
        if self.verb not in VERBS:
            message = f"the verb must be one of {', '.join(VERBS)} (got {self.verb!r})"
            raise UsageError(message, hint=did_you_mean(self.verb, VERBS, "choose one of them"))
        if self.max_file_size < 1:
            raise UsageError(f"--max-file-size must be at least 1 byte (got {self.max_file_size})")
        # More than one star could match in several ways, and a rename must have one result.
        if many := next((old for old, _ in self.rename if old.count("*") > 1), None):
            raise UsageError(
                f"--rename {many}= must have at most one * (got {many.count('*')})",
                hint="name a prefix, or a pattern with one *",
            )
        _require_mesh(self.verb, self.mesh, self.sharding)
        if self.serialization not in SERIALIZATIONS:
            raise UsageError(
                f"--serialization {self.serialization} is not known",
                hint=f"one of: {', '.join(SERIALIZATIONS)}",
            )
        if next_step := next(
            (h for s, h in MADE_ELSEWHERE.items() if _name(self.destination).endswith(s)), None
        ):
            raise UsageError(
                f"cannot write {self.destination}: no such file is written here",
                hint=next_step.format(name=split_url(self.destination)[1]),
            )
        _require_world(self.names, self.verb)
        if self.weights not in WEIGHTS:
            raise UsageError(f"--weights must be one of {', '.join(WEIGHTS)} (got {self.weights!r})")
        for dtype in (self.dtype, *(dtype for _, dtype in self.dtype_for if dtype != "keep")):
            if dtype is not None:
                dtypes.get(dtype)  # an unknown one is an error before a source is read
        if not self.arch:
            raise UsageError("--arch must be auto or the name of an architecture (got '')")
        _require_suffix(self.destination, self.verb, self.to, self.format)
        if not self.source or not self.destination:
            raise UsageError("a source and a destination are needed")
        object.__setattr__(self, "single", _single(self.verb, self.format, self.destination))

    def require_writer(self) -> None:
        """Raise `UsageError` if the output format cannot be written: known before a source is read.

        A request of a catalog is read without: a package with its format may have been removed since.
        """
        from ckptcore.formats import by_name

        by_name(self.format, writes=True)

    def anchored(self) -> Request:
        """Return the request with absolute paths of config and tokenizer, to be read from any folder."""
        config, tokenizer = _absolute(self.config), _absolute(self.tokenizer)
        if (config, tokenizer) == (self.config, self.tokenizer):
            return self
        return replace(self, config=config, tokenizer=tokenizer)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, without later fields at their defaults."""
        form = {name: _lists(getattr(self, name)) for name in STATED}
        # Fields that came later are left out at their defaults: digests of
        # requests must not change with a release.
        usual = {**_LATER, "names": _usual_names(self.verb)}
        return {k: v for k, v in form.items() if k not in usual or v != usual[k]}

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Request:
        """Return the request of `as_dict`'s form; raise `UsageError` for unknown fields."""
        # A request of a later version may ask for what this one does not do: it is refused, not ignored.
        unknown = set(form) - set(STATED)
        if unknown:
            raise UsageError(f"unknown request fields: {', '.join(sorted(unknown))}")
        return cls(**{k: _frozen(v) for k, v in form.items()})


STATED = tuple(f.name for f in fields(Request) if f.init)  # the fields that decide the others


@dataclass(frozen=True, slots=True)
class Settings:
    """Resources of a conversion. Nothing here changes a byte of the output.

    Attributes:
        memory: Budget for tensor buffers, bytes.
        workers: Threads; None takes the cores that this process may use, and one for each 64 MiB of memory at
            most.
        device: torch device for casts.
        verify: Whether stored CRC-32 and copies are checked while bytes move.
        digest: Whether every output file gets a BLAKE3.
        fingerprint: Whether tensors are fingerprinted before any cast; None for a reshard only.
        stats: Whether statistics of tensors are computed before any cast.
        processes: Number of processes that each have such settings, for one piece of work.
    """

    memory: int = 1 << 30
    workers: int | None = None
    device: str = "cpu"
    verify: bool = True
    digest: bool = True
    fingerprint: bool | None = None
    stats: bool = False
    processes: int = 1

    def __post_init__(self) -> None:
        # Words that fit the command line and Python: both make settings.
        if not isinstance(self.memory, int) or self.memory < 1 << 20:
            message = f"the memory budget must be at least {1 << 20} bytes (got {self.memory!r})"
            raise UsageError(message, hint=f"the default is 1 GiB: {1 << 30} bytes")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", str(self.device)):
            message = f"the device must be cpu, cuda or cuda:N (got {str(self.device)!r})"
            raise UsageError(message, hint="the default is cpu")
        if self.workers is not None and (not isinstance(self.workers, int) or self.workers < 1):
            message = f"the number of workers must be at least 1 (got {self.workers!r})"
            raise UsageError(message, hint="the default takes the cores that this process may use")

    @property
    def threads(self) -> int:
        """Number of threads to run."""
        if self.workers is not None:
            return self.workers
        return max(2, min(usable_cores(), self.memory // _PER_WORKER))

    def within(self, memory: int) -> Settings:
        """Return the settings with another budget, and as many threads as these have."""
        return replace(self, memory=memory, workers=self.threads)

    def share(self, count: int) -> Settings:
        """Return the settings of each of some processes that share these."""
        return replace(self, memory=self.memory // count, workers=max(1, self.threads // count))

    def of_processes(self, count: int) -> Settings:
        """Return the settings of each of some processes that do one piece of work together."""
        return replace(self.share(count), processes=count)

    def of(self, mesh: str) -> Settings:
        """Return the settings with ``fingerprint`` decided: files of a mesh look least like their source."""
        return self if self.fingerprint is not None else replace(self, fingerprint=bool(mesh))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, form: dict[str, Any]) -> Settings:
        """Return the settings of `as_dict`'s form."""
        return cls(**form)


def _require_mesh(verb: str, mesh: str, sharding: str | None) -> None:
    if (verb == "reshard") != bool(mesh):
        raise UsageError(
            "reshard needs --mesh, which no other command accepts", hint="try --mesh fsdp=4,tp=2"
        )
    if mesh:
        parse_mesh(mesh)  # an invalid mesh is an error before a source is read
    elif sharding is not None:
        raise UsageError("--sharding needs --mesh", hint="try --mesh fsdp=4,tp=2")


def _require_world(names: str, verb: str) -> None:
    world, generation = parse_world(names)
    if names != STORED and not is_world(world):
        raise UsageError(
            f"--names must be {STORED} or one of {', '.join(worlds())} (got {names!r})",
            hint="leave it out for names as on the hub",
        )
    if world != names and generation not in GENERATIONS.get(world, ()):
        raise UsageError(
            f"--names {world} has no generation {generation!r}",
            hint=f"one of: {', '.join(f'{world}:{g}' for g in GENERATIONS.get(world, ())) or world}",
        )
    if world == PEFT and verb != "export":
        raise UsageError("--names peft is for export", hint="try export, which takes the adapter")


def _require_suffix(destination: str, verb: str, to: str, format: str) -> None:
    """Require that a suffix fits what is written. to: the format that was named, or empty."""
    suffix = _suffix(destination)
    if verb == "reshard" and suffix and format not in SUFFIX_FOLDERS.get(suffix, ()):
        raise UsageError(f"the ranks of a mesh do not write one file, {destination}", hint="name a folder")
    # A suffix is how readers choose what opens a file: a wrong one would mislead them.
    if to and suffix and to not in SUFFIX_FORMATS[suffix] and not _names_any_file(to):
        raise UsageError(
            f"--to {to} does not fit the destination {destination}",
            hint="change the suffix, or leave --to out",
        )


def _usual_names(verb: str) -> str:
    return HUB if verb == "export" else STORED


def _absolute(place: str | None) -> str | None:
    path = None if place in (None, "none") else local_path(str(place))
    return place if path is None else os.path.abspath(path)


def _format(verb: str, to: str, destination: str) -> str:
    default = "dcp" if verb == "reshard" else "safetensors"
    return to or SUFFIX_FORMATS.get(_suffix(destination), (default,))[0]


def _single(verb: str, format: str, destination: str) -> str | None:
    if verb == "reshard":
        return None
    alone = bool(_suffix(destination)) or _is_one_file(format)
    return split_url(destination)[1] if alone else None


def _is_one_file(format: str) -> bool:
    """Return whether a format is always one file; also for formats of plug-ins, False for unknown names."""
    # A late import, here and below: processes that only move bytes know no formats.
    from ckptcore.formats import registry

    writers = (f.writer for f in registry().formats if f.name == format and f.writer is not None)
    writer = next(writers, None)  # as `by_name` chooses it
    return writer is not None and writer.single_file


def _names_any_file(format: str) -> bool:
    """Return whether a format of another package is always one file, which may have any suffix."""
    from ckptcore.formats import FORMATS

    is_built_in = any(f.name == format for f in FORMATS)
    return not is_built_in and _is_one_file(format)


def _lists(value: Any) -> Any:
    return [_lists(v) for v in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def _suffix(url: str) -> str:
    return next((s for s in SUFFIX_FORMATS if _name(url).endswith(s)), "")


def _name(url: str) -> str:
    return url.rstrip("/")
