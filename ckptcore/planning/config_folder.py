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

from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, NameMismatch, SourceUnreadable, UsageError, finding
from ckptcore.naming.rename import Mapped
from ckptcore.planning.request import Request
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


def check_names(config: ConfigFolder, found: Mapping[str, tuple[int, ...]]) -> Expected:
    """Compares names and shapes with the model that the config describes.

    The installed transformers' own loader is asked, which renames, stacks and splits
    (`ckptcore.planning.transformers_conversion`): every tensor must be used once, and every parameter get one
    value of its shape, or be tied. Names as on the hub and names of the live model both fit it.

    Raises `NameMismatch` naming what is missing, unexpected, of another shape, or cannot be put together;
    without transformers, or for a model type that it does not know, gives a warning instead.
    """
    if importlib.util.find_spec("transformers") is None:
        return _unchecked("transformers is not installed", "pip install 'ckptcore[hf]'")
    answer = _ask(config, found)
    if "rejected" in answer:
        raise UsageError(
            f"--config {config.url}: transformers builds no model from config.json: {answer['rejected']}",
            hint="name the folder of the model that was trained, or leave --config out",
        )
    if "unknown" in answer:
        return _unchecked(answer["unknown"], "install a transformers that knows it, and export again")
    if "error" in answer:
        return _unchecked(answer["error"], "check them by opening the result with transformers")
    shapes = [f"{n} {list(got)} (config says {list(right)})" for n, got, right in answer["shapes"]]
    kinds = {
        "missing": answer["missing"],
        "unexpected": answer["unexpected"],
        "other shape": shapes,
        "cannot be put together": answer["broken"],
    }
    parts = [f"{kind}: {_few(names)}" for kind, names in kinds.items() if names]
    if parts:
        raise NameMismatch(
            f"the checkpoint does not fit {answer['class']}: {'; '.join(parts)}",
            missing=answer["missing"],
            unexpected=answer["unexpected"],
            shapes=[n for n, _, _ in answer["shapes"]],
            broken=answer["broken"],
        )
    warnings = []
    if answer["fused"]:
        message = f"{_few(answer['fused'])}: the live model's form of what files on the hub hold in pieces"
        warnings.append(finding("fused-names", "cover", message))
    return Expected(tuple((a, b) for a, b in answer["ties"]), tuple(warnings))


def model_card(request: Request, mapped: Mapped, manifest: Manifest, *, has_config: bool) -> bytes:
    """A README stub that says where the weights come from."""
    from ckptcore import __version__

    count, tensors = sum(t.numel for t in mapped.manifest.tensors), len(mapped.manifest.tensors)
    opening = ["---", "library_name: transformers", "---", ""] if has_config else []
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


def _ask(config: ConfigFolder, found: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    asked = {"config": json.loads(config.content["config.json"]), "tensors": found}
    try:
        run = subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "ckptcore.planning.meta_model",
            ],  # -P: nothing is imported from the current folder
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"building the model took more than {_TIMEOUT} s"}
    try:
        answer: dict[str, Any] = json.loads(run.stdout)
    except ValueError:
        last = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
        answer = {"error": last[0] if last else f"exit status {run.returncode}"}
    return answer


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _unchecked(reason: str, hint: str) -> Expected:
    message = f"names and shapes were not checked against the model: {reason}"
    return Expected((), (finding("names-unchecked", "cover", message, hint=hint),))
