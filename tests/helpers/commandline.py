"""The command line as an attacker sees it: every verb and option that there is, and what to give them.

Verbs and parameters come from the command line's own tree: one that is added is attacked from then on. What
fits a parameter is in `FITTING` under its name, so that attacks get past the first check; a name that is
not there gets a place or a text. ``<box>`` in a value is the folder that commands run in (`built`).

Nothing here may name a place outside of a test's folder: `guarded` refuses it before anything runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

SECRET = "hunter2pass"
BOX = "<box>"
LEGAL = ("--overwrite", "--overwrite-foreign", "--yes")  # these may delete what is at the places they name


@dataclass(frozen=True)
class Parameter:
    """name: of the Python parameter. on, off: spellings of an option; without any it is an argument.

    many: it may be given more than once. choices: of an enumeration.
    """

    name: str
    on: str | None
    off: str | None
    flag: bool
    many: bool
    required: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """A command. path: the names that call it."""

    path: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        return " ".join(self.path)


@cache
def verbs() -> tuple[Verb, ...]:
    """Every command of `ckptcore` that ends by itself, from its own tree."""
    import typer.main

    from ckptcore.cli.main import program

    # These serve until a signal; their own tests try hostile requests.
    found = _verbs(typer.main.get_command(program()), ())
    return tuple(verb for verb in found if verb.path not in (("catalog", "page"), ("serve",), ("mount",)))


def _verbs(command: Any, path: tuple[str, ...]) -> Iterator[Verb]:
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from _verbs(below, (*path, name))
        return
    yield Verb(path, tuple(_parameter(p) for p in command.params))


def _parameter(given: Any) -> Parameter:
    option = given.param_type_name == "option"
    kind = given.type_descriptor.annotation
    choices = tuple(str(m.value) for m in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()
    return Parameter(
        given.name,
        given.opts[0] if option else None,
        given.secondary_opts[0] if given.secondary_opts else None,
        option and given.is_flag,
        given.multiple if option else given.nargs == -1,
        given.required,
        choices,
    )


NINES = "9" * 400  # no float holds it
_NUMBERS = "-1 0 00 1 nan -nan inf -inf 1e400 -1e-400 0x10 1_0 \u0663 1.5 +1 1GiB 0B 1KiB 1e9GiB 1h -1s"
NUMBERS = (
    *(*_NUMBERS.split(), "9" * 30, NINES, "9" * 5000, f"{NINES}GiB", f"{NINES}d"),
    *(str(2**31), str(2**63 - 1), str(2**63), str(2**64), str(-(2**63))),
)
CONTROLS = (
    *(
        "a\0b",
        "\0",
        "\udc80",
        "a\ud800b",
        "\udc80=\0",
        "\x1b[2J\x1b]0;owned\x07",
        "\x9b31m",
        "\x7f",
        "\ufeff",
    ),
    *("\u202egnp", "\u2066", "a\nb", "a\r\nb", "\t", "\u2028", "[/red]", "[bold][link=x]"),
)
LONG = (
    *("n" * 256, "n" * 5000, "n/" * 3000, "x" * 100_000, "é" * 70, "(" * 2000, "[" * 5000, '{"a":' * 20_000),
    *("0" * 64, "f" * 64, "a" * 60 + "!", "*" * 300 + "b"),
)
TEXTS = """
    . .. ../.. ../keep.txt/x - -- --help -1x = a= =a a=b a=b=c *=* a*=b* ** * ? [ a[ [! { {} {0}
    {root.__class__} %s%n {run!r:>99999999} $(x) `x` NULL null [] , =,= : \\ \\0 (a+)+$ blake3: abcd 0000
    deadbeef "a" \U0001f600 fsdp=0 fsdp=-1 fsdp=999999999 tp=2,tp=2 cuda: pp=2,ep=3 fsdp=\u0662
    float4_e2m1fn_x2 int8 complex64 bool
    bf16,fp16 keep *=keep *=int4 w=bf16 safetensors cuda:99999999999999999999 cuda:-1 meta mps xla CPU cpu:1
    2026-13-01 0001-01-01 9999-12-31
"""
STATEMENTS = (
    *(
        "SELECT 1",
        "SELECT '\x1b[2J'",
        "SELECT uri FROM checkpoint",
        "SELECT x'00ff', 9e999",
        "DROP TABLE tag",
    ),
    *("'; DROP TABLE checkpoint; --", "' OR 1=1"),
)
OBJECTS = (
    *('{"to": 1}', '{"a": NaN}', '{"to": "\\ud800"}', '{"include": {"a": 1}}', '{"destination": "\\u0000"}'),
    *('{"mesh": "fsdp=1000000000"}', '{"max_file_size": "1e400"}', '{"max_file_size": -1}', '{"nope": 1}'),
    *('{"verb": ["export"]}', '{"rename": [[1, 2, 3]]}', '{"recover": null}', '{"config": "\\u001b[2J"}'),
)
# Of nobody: no such host, no such port, no such scheme.
URLS = f"""
    s3://AKIA:{SECRET}@bucket/k https://b.invalid/k?X-Amz-Signature={SECRET} http://me:{SECRET}@127.0.0.1:1/x
    ftp://me:{SECRET}@127.0.0.1:1/x nope://me:{SECRET}@h/x sftp://me:{SECRET}@127.0.0.1:1/x az://c/k?sig={SECRET}
    memory://a/b memory:// :// :: a::b::c zip:// zip://a.pt:: zip://*::memory://x tar://a simplecache::
    simplecache::memory://x dir::memory://x reference://x reference::memory://x blockcache::memory://x
    filecache::memory://x cached::x generic://x data:,x data://x github://a:b@c/x git://x smb://127.0.0.1:1/x
    hdfs://x/y gs://bucket/k hf://a/b s3:// s3://b/../.. s3://b/k?versionId={NINES} http://[::1
    file:// local:// memory://\0 memory://\udc80 file://\0 s3://\x1b[2J/x {"x" * 300}://
    {"simplecache::" * 50}memory://x
    postgresql://me:{SECRET}@127.0.0.1:1/db postgresql://me:{SECRET}@h:port/db postgresql:// mysql://me@h/x
    postgresql://127.0.0.1:1/db?password={SECRET}&nope=1 postgresql://127.0.0.1:1/\0 nope+x://y
    sqlite:// sqlite:///:memory: sqlite:///file::memory:?uri=true sqlite://host/x sqlite:///a?mode=x
    sqlite:///\udc80
"""
# What the prepared folder holds, and a few names that are free.
PLACES = """
    whole dcp one.pt torn.pt torn torn-dcp empty empty.pt pipe loop dangling socket holds-pipe junk.bin plan
    rules.toml catalog.sqlite not-sqlite sparse.pt odd\x1b[31m out out/deeper out.safetensors out.pt
    out.consolidated whole/out one.pt/out dcp/.metadata whole/model.safetensors ./whole/ whole/../dcp
    ../box/one.pt empty/../whole loop/x pipe/x ~/out
    <box>/whole <box>//whole/ file://<box>/whole local://<box>/dcp file://host<box>/whole FILE://<box>/whole
    simplecache::file://<box>/whole dir::file://<box>/whole zip://a::file://<box>/pack.zip zip://*::<box>/pack.zip
    tar://a::<box>/one.pt reference::file://<box>/junk.bin blockcache::<box>/one.pt file://<box>/%2e%2e/x
    file://localhost<box>/out <box>/out\0 <box>/\udc80 <box>/[/red]\x1b[31m file:<box>/out
    sqlite:///<box>/other.sqlite sqlite:///<box>/pipe
"""
HOSTILE = (
    *("", " ", *NUMBERS, *CONTROLS, *LONG, *STATEMENTS, *OBJECTS),
    *(*TEXTS.split(), *URLS.split(), *PLACES.split(), f"{BOX}/{'n' * 256}"),
)

# By the names of parameters: what gets past their own checks.
_FITTING = """
    a b src roots: whole dcp one.pt
    dst: out <box>/out out.safetensors
    made: out
    export against near reference: whole dcp one.pt
    near_threshold: 0.8
    logits_dtype: fp32 bf16
    logits_tolerance: 0 1e-5
    ref: best <box>/whole
    uri: runs <box>/runs
    plan_dir: plan
    what: whole/model.safetensors
    names scope: root
    name: best root new
    tags: a=b
    catalog: catalog.sqlite sqlite:///<box>/catalog.sqlite
    to: safetensors dcp torch_save
    verb: consolidate export reshard
    mesh: fsdp=2 fsdp=2,tp=2
    include: * w
    exclude: v
    rename: w=x
    tie: v=w
    dtype: bf16 fp32
    dtype_for: w=keep
    model_prefix: model.
    config: whole
    sharding: rules.toml
    serialization: torch_save safetensors
    max_file_size: 1KiB 5GB
    memory: 64MiB
    workers: 1 2
    device: cpu
    save: new-plan
    min_age: 0s
    settle: 0s
    wait: 0s 1s
    budget: 1s
    share keep_last limit: 1
    keep_every: 7
    accept_loss: * cast
    timeout: 5
    until: 2030-01-01
    destination: <box>/exports/{name}
    target: {} {"to":"safetensors"}
    state: present failed
    kind: source
    hold reason owner run expect: best
"""
FITTING: Mapping[str, Sequence[str]] = {
    name: values.split()
    for names, _, values in (row.partition(":") for row in _FITTING.strip().splitlines())
    for name in names.split()
} | {"statement": ("SELECT uri FROM checkpoint",)}
# A wait that was asked for is none that hangs: only what is refused, or is over soon.
SHORT: Mapping[str, Sequence[str]] = {
    "wait": ("", "nan", "inf", "-1s", "1x", "\0", "\udc80", "1e9", "\x1b[2J")
}


def hostile(parameter: Parameter) -> Sequence[str]:
    """What an attacker gives for a parameter."""
    return SHORT.get(parameter.name) or HOSTILE


def fitting(parameter: Parameter) -> Sequence[str]:
    """What the parameter is made for, as far as that is known."""
    return parameter.choices or FITTING.get(parameter.name) or ("1", "whole", "a")


def argv_of(verb: Verb, values: Mapping[str, Sequence[str]], off: Sequence[str] = ()) -> list[str]:
    """Return the arguments of a call.

    values: by parameter; of a flag, any. off: flags to be given by their other name.

    An argument after which others are given is filled in; arguments come last, behind a ``--``.
    """
    options, arguments = list(verb.path), []
    for parameter in verb.parameters:
        given = values.get(parameter.name)
        if parameter.flag:
            if given is not None:
                options.append(
                    parameter.off if parameter.name in off and parameter.off else str(parameter.on)
                )
        elif parameter.on is not None:
            for value in given or ():
                options += [parameter.on, value]
        elif given is not None:
            arguments += given
        elif parameter.required:
            arguments.append(fitting(parameter)[0])
    return [*options, "--", *arguments] if arguments else options


def built(arguments: Sequence[str], box: Path, root: Path) -> list[str]:
    """Return arguments with their places filled in, each of them `guarded`."""
    return [guarded(word.replace(BOX, str(box)), box, root) for word in arguments]


class OutsideTheTest(AssertionError):
    """A word could name a place that is not the test's: nothing is run."""


_BREAKS = re.compile(r"::|[=\"',\s\0]+")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?://)?")


def guarded(word: str, cwd: Path, root: Path) -> str:
    """`word`, unless any part of it could be a place that is not below `root`; then `OutsideTheTest`."""
    for piece in (word, *_BREAKS.split(word)):
        scheme = _SCHEME.match(piece)
        rest = piece[scheme.end() :] if scheme else piece
        kind = scheme[0].lower().rstrip(":/") if scheme else ""
        if kind == "sqlite":  # one slash more than a path has
            paths = [rest.removeprefix("/")]
        elif kind in ("file", "local"):  # the part behind a host might be taken for a path of this machine
            paths = [rest, "/" + rest.partition("/")[2]] if "/" in rest else []
        else:
            paths = [rest] if not scheme or rest.startswith("/") else []
        for path in paths:
            if path.startswith("~") and not path.startswith("~/") and path != "~":
                raise OutsideTheTest(f"{path!r} is the home of a user")
            path = path.removeprefix("~").lstrip("/") if path.startswith("~") else path
            seen = os.path.normpath(os.path.join(cwd, re.sub(r"^/+", "/", path)))
            if seen != str(root) and not seen.startswith(f"{root}/"):
                raise OutsideTheTest(f"{word[:200]!r} could be {seen[:200]!r}, outside of {root}")
    return word
