"""Hugging Face folders: what lies beside the weights, and do the weights fit the config?

A folder that `from_pretrained` opens has config.json and, for text models, a generation config
and tokenizer files. They are copied from the folder that the user names. When transformers is
installed (extra ``hf``) the model is built on the meta device, in a process of its own, and every
name and shape is compared before any work.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckptcore.errors import Finding, NameMismatch, SourceUnreadable, UsageError
from ckptcore.manifest import Manifest
from ckptcore.remap import Mapped
from ckptcore.request import Request
from ckptcore.store import open_store, split_url

# What is copied from the config's folder: everything small that is not weights.
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "USE_POLICY*",
)
_MAX_BESIDE = 64 << 20
_PROVENANCE = re.compile(
    r"^- source: `(?P<source>[^`\n]{1,4096})` \(.*\)\n"
    r"- source manifest \(BLAKE3\): `(?P<digest>[0-9a-f]{64})`\n"
    r"- exported by: ckptcore (?P<version>[\w.+-]{1,64})$",
    re.MULTILINE,
)
# A card as `model_card` writes it, from its first byte to its last.
_PLAIN_CARD = re.compile(
    r"(---\nlibrary_name: transformers\n---\n\n)?# (?P<title>[^\n]+)\n\n"
    r"[\d,]+ parameters in \d+ tensors, exported from a sharded training checkpoint\.\n\n## Provenance\n\n"
    r"- source: `[^\n]{1,4096}\n- source manifest \(BLAKE3\): `[0-9a-f]{64}`\n"
    r"- exported by: ckptcore [\w.+-]{1,64}\n"
    r"(- cast to: \w+\n)?(- tied: `[^\n]*` is `[^\n]*`, equality checked\n)*"
)
_TIMEOUT = 600  # seconds; building a model on the meta device takes a few


@dataclass(frozen=True)
class ConfigFolder:
    """The small files of a model folder. url: where they lie. content: name -> bytes."""

    url: str
    content: Mapping[str, bytes]

    def files(self, dtype: str | None, *, plain: bool = False) -> dict[str, bytes]:
        """The files to publish; config.json says ``dtype`` when it named another one.

        plain: the weights are values now: what config.json says of their quantisation is left out.
        """
        out = dict(self.content)
        config = json.loads(out["config.json"])
        # transformers 5 writes "dtype", earlier ones "torch_dtype".
        changed = {k: dtype for k in ("dtype", "torch_dtype") if dtype and config.get(k) not in (None, dtype)}
        gone = plain and config.pop("quantization_config", None) is not None
        if changed or gone:
            config |= changed
            out["config.json"] = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
        return out


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model class says. ties: (name, name it shares its storage with)."""

    ties: tuple[tuple[str, str], ...]
    warnings: tuple[Finding, ...] = ()


def read_config(url: str) -> ConfigFolder:
    """The small files of a folder with config.json (or of config.json's folder).

    Raises `UsageError` when there is no config.json, or it is no JSON object.
    """
    if url.endswith("config.json"):
        url = split_url(url)[0]
    store = open_store(url)
    try:
        listing = store.list()
    except SourceUnreadable as error:
        raise UsageError(f"--config {url}: {error.message}") from error
    if "config.json" not in listing:
        raise UsageError(f"--config {url}: there is no config.json", hint="name the folder that holds it")
    names = [n for n in listing if any(fnmatchcase(n, p) for p in _BESIDE) and listing[n] <= _MAX_BESIDE]
    content = {name: store.read(name, 0, listing[name]) for name in names}
    try:
        parsed = json.loads(content["config.json"])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {url}: config.json is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError(f"--config {url}: config.json is not a JSON object")
    return ConfigFolder(url, content)


def check_names(config: ConfigFolder, found: Mapping[str, tuple[int, ...]], tied: set[str]) -> Expected:
    """Compares names and shapes with the model that the config describes.

    tied: names that the user has tied away. Raises `NameMismatch` naming what is missing,
    unexpected or of another shape; without transformers, gives a warning instead.
    """
    if importlib.util.find_spec("transformers") is None:
        return Expected(
            (),
            (
                _warning(
                    "names and shapes were not checked against the model: transformers is not installed",
                    "pip install 'ckptcore[hf]'",
                ),
            ),
        )
    answer = _ask(config)
    if "rejected" in answer:
        raise UsageError(
            f"--config {config.url}: transformers builds no model from config.json: {answer['rejected']}",
            hint="name the folder of the model that was trained, or leave --config out",
        )
    if "error" in answer:
        return Expected(
            (),
            (
                _warning(
                    f"names and shapes were not checked against the model: {answer['error']}",
                    "check them by opening the result with transformers",
                ),
            ),
        )
    wanted = {name: tuple(shape) for name, shape in answer["tensors"].items()}
    ties = tuple((a, b) for a, b in answer["ties"] if b in found or b in wanted)
    absent_ok = {a for a, _ in ties} | set(answer["optional"]) | tied
    # Some classes rename while loading (fused experts, say); transformers' own patterns say which.
    mapped = [re.compile(p) for p in answer["renamed"]]
    missing = sorted(n for n in wanted if n not in found and n not in absent_ok and not _any(mapped, n))
    unexpected = sorted(
        n for n in found if n not in wanted and not _any(mapped, n) and n not in answer["optional"]
    )
    shapes = sorted(n for n in wanted if n in found and found[n] != wanted[n])
    if missing or unexpected or shapes:
        told = [f"{n} {list(found[n])} (config says {list(wanted[n])})" for n in shapes]
        parts = [
            *([f"missing: {_few(missing)}"] if missing else []),
            *([f"unexpected: {_few(unexpected)}"] if unexpected else []),
            *([f"other shape: {_few(told)}"] if shapes else []),
        ]
        raise NameMismatch(
            f"the checkpoint does not fit {answer['class']}: {'; '.join(parts)}",
            missing=missing, unexpected=unexpected, shapes=shapes,
        )  # fmt: skip
    return Expected(ties)


def model_card(request: Request, mapped: Mapped, manifest: Manifest, *, has_config: bool) -> bytes:
    """A README stub that says where the weights come from."""
    from ckptcore import __version__

    count, tensors = sum(t.numel for t in mapped.manifest.tensors), len(mapped.manifest.tensors)
    opening = [
        "---", "library_name: transformers", "---", "",
    ] if has_config else []  # fmt: skip
    lines = [
        *opening,
        f"# {split_url(request.destination)[1]}",
        "",
        f"{count:,} parameters in {tensors} tensors, exported from a sharded training checkpoint.",
        "",
        "## Provenance",
        "",
        f"- source: `{request.source}` ({manifest.format})",
        f"- source manifest (BLAKE3): `{manifest.digest}`",
        f"- exported by: ckptcore {__version__}",
        *([f"- cast to: {request.dtype}"] if request.dtype else []),
        *[f"- tied: `{a}` is `{b}`, equality checked" for a, b in mapped.ties],
        "",
    ]
    return "\n".join(lines).encode(errors="backslashreplace")


def provenance(card: str) -> tuple[str, str, str] | None:
    """What such a README tells: (source, digest of its manifest, version); None where it is not ours."""
    found = _PROVENANCE.search(card)
    return (found["source"], found["digest"], found["version"]) if found else None


def is_untouched(card: bytes, name: str) -> bool:
    """Whether a README of a folder of this name is one that `model_card` writes, and nothing was added."""
    found = _PLAIN_CARD.fullmatch(card.decode(errors="replace"))
    return found is not None and found["title"] == name


def _ask(config: ConfigFolder) -> dict[str, Any]:
    try:
        return _answer(config)
    except subprocess.TimeoutExpired:
        return {"error": f"building the model took more than {_TIMEOUT} s"}


def _answer(config: ConfigFolder) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "ckptcore.hf_model"], input=config.content["config.json"], capture_output=True,
        timeout=_TIMEOUT, check=False,
    )  # fmt: skip
    try:
        answer: dict[str, Any] = json.loads(run.stdout)
    except ValueError:
        last = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
        answer = {"error": last[0] if last else f"exit status {run.returncode}"}
    return answer


def _any(patterns: list[re.Pattern[str]], name: str) -> bool:
    return any(p.search(name) for p in patterns)


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _warning(message: str, hint: str) -> Finding:
    return Finding("names-unchecked", "cover", message, hint=hint, severity="warning")
