"""Configs: what does a model's config.json say of the weights, and do they fit it?

A config is published as it is, but for the dtype that the weights have now. When transformers is installed
(extra ``hf``) the model is built on the meta device, in a process of its own, and every name and shape is
compared before any work.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptcore.errors import Finding, NameMismatch, UsageError, finding
from ckptcore.planning import transformers_process
from ckptcore.utils.text import listed, short_repr

_DTYPES = ("dtype", "torch_dtype")  # transformers 5 writes the first, earlier ones the second
# Fields that say how many modules there are, each of which has a tensor of its own, or a row of one.
_COUNTS = re.compile(r"(?!max_)(?:|.*_)(?:layers?|experts?|blocks?|depth)")
_ALWAYS_POSSIBLE = 1000  # of them: built on the meta device in a few seconds
_SECONDS = 600  # building a model on the meta device takes a few


@dataclass(frozen=True)
class ConfigFolder:
    """The small files of a model folder. url: where they lie. content: name -> bytes, with config.json."""

    url: str
    content: Mapping[str, bytes]

    @cached_property
    def form(self) -> dict[str, Any]:
        """What config.json says."""
        form: dict[str, Any] = json.loads(self.content["config.json"])
        return form

    def files(self, dtype: str | None, *, plain: bool = False) -> dict[str, bytes]:
        """The files to publish; config.json says ``dtype`` wherever it named another one.

        plain: the weights are values now: what config.json says of their quantisation is left out.
        """
        out = dict(self.content)
        config = json.loads(out["config.json"])
        changed = dtype is not None and sum(_name_dtype(part, dtype) for part in _with_nested(config)) > 0
        gone = plain and config.pop("quantization_config", None) is not None
        if changed or gone:
            out["config.json"] = _dumped(config)
        return out


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model class says. ties: (name, name it shares its storage with)."""

    ties: tuple[tuple[str, str], ...]
    warnings: tuple[Finding, ...] = ()


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
    most = max([len(found), *(dim for shape in found.values() for dim in shape)], default=0)
    require_possible(config.form, f"--config {config.url}", most)
    asked = {"config": config.form, "tensors": found}
    answer = transformers_process.ask("ckptcore.planning.meta_model", asked, seconds=_SECONDS)
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
    parts = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
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
        message = f"{listed(answer['fused'])}: the live model's form of what files on the hub hold in pieces"
        warnings.append(finding("fused-names", "cover", message))
    return Expected(tuple((a, b) for a, b in answer["ties"]), tuple(warnings))


def require_possible(form: Mapping[str, Any], said: str, most: int) -> None:
    """Raises `UsageError` for a config of more modules than the checkpoint can have tensors for.

    transformers would build them all, whatever time and memory that takes. most: tensors, or rows of one.
    """
    for part in _with_nested(dict(form)):
        for name, count in part.items():
            counts = (
                isinstance(count, (int, float)) and not isinstance(count, bool) and _COUNTS.fullmatch(name)
            )
            if counts and count > max(most, _ALWAYS_POSSIBLE):
                raise UsageError(
                    f"{said}: config.json says {name} = {short_repr(count)}, "
                    f"the checkpoint has {most} at most",
                    hint="name the folder of the model that was trained, or leave --config out",
                )


def _dumped(config: dict[str, Any]) -> bytes:
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no bytes, but as an escape
        return (json.dumps(config, indent=2) + "\n").encode()


def _with_nested(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config and those of its parts: text_config, vision_config, ....

    transformers loads with the dtype of the whole; where that has none, vLLM asks the text model's.
    """
    yield config
    for name, part in config.items():
        if isinstance(part, dict) and name.endswith("_config") and name != "quantization_config":
            yield from _with_nested(part)


def _name_dtype(part: dict[str, Any], dtype: str) -> bool:
    """Whether this part of a config named another dtype, which is this one now."""
    others = {k: dtype for k in _DTYPES if isinstance(part.get(k), str) and part[k] not in (dtype, "auto")}
    part |= others
    return bool(others)


def _unchecked(reason: str, hint: str) -> Expected:
    message = f"names and shapes were not checked against the model: {reason}"
    return Expected((), (finding("names-unchecked", "cover", message, hint=hint),))
