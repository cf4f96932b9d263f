"""Build the model of an export on the meta device, by `from_pretrained` itself.

transformers gets the names, shapes and dtypes of the export, without values. So its own loader decides about
everything that is no value: the class, the dtype of each parameter, ties, buffers that are computed, the
generation config, and the names under which `save_pretrained` writes the model later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import MissingDependency, NameMismatch, UsageError
from ckptcore.planning.meta_model import class_of, classes_of
from ckptcore.planning.transformers_process import LOCAL, brief
from ckptcore.utils.extras import install, needed
from ckptcore.utils.foreign_text import load_json_object
from ckptcore.utils.text import listed

# How transformers writes what JSON has no number for.
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_REPORTED = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


class _Valueless(torch.Tensor):
    """A tensor on the meta device that stays there, whichever device a loader asks for."""

    def to(self, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        """Return a plain tensor on the meta device."""
        return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")


def transformers_for(action: str) -> Any:
    """Import transformers, which has no complete types.

    Raises:
        MissingDependency: It is not installed. action: what cannot be done without it.
    """
    with needed("hf", action):
        import transformers
    library: Any = transformers
    return library


def build_skeleton(config: bytes, generation: bytes | None, tensors: Iterable[TensorSpec]) -> Any:
    """Return the model that `from_pretrained` makes of an export, its parameters on the meta device.

    Args:
        config: Content of the export's config.json.
        generation: Content of its generation_config.json, or None.
        tensors: Of the export, in its names and dtypes.

    Raises:
        MissingDependency: transformers is not installed, or older than version 5.
        UsageError: transformers has no such model, or cannot build it.
        NameMismatch: The tensors are not exactly those of the model.
    """
    library = transformers_for("open a checkpoint as a model")
    if int(library.__version__.partition(".")[0]) < 5:
        raise MissingDependency(
            f"cannot open a checkpoint as a model: transformers {library.__version__} must be 5 or newer",
            hint=install("hf"),
        )
    form = _parsed(config)
    kind = form.get("model_type")
    if kind not in library.CONFIG_MAPPING:
        raise UsageError(
            f"cannot build the model: transformers {library.__version__} has no model type {kind!r}",
            hint="name the config.json of the model that was trained: --config FOLDER",
        )
    state = {
        spec.fqn: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta").as_subclass(
            _Valueless
        )
        for spec in tensors
    }
    named = class_of(form)
    problems = []
    for name in [named] if named else classes_of(str(kind)):
        try:
            model, report = _loaded(library, name, form, generation, state)
        except Exception as error:  # any failure of a third-party model class: the config does not fit
            problems.append(f"{name}: {brief(error)}")
            continue
        differences = [
            f"{key_group}: {listed(sorted(map(str, report[key_group])))}"
            for key_group in _REPORTED
            if report[key_group]
        ]
        if not differences:
            return model
        problems.append(f"{name}: {'; '.join(differences)}")
    raise NameMismatch(
        f"cannot build the model of config.json: {problems[0] if problems else f'no class of type {kind}'}",
        hint="name the config.json of the model that was trained: --config FOLDER",
    )


def _loaded(
    library: Any, name: str, form: Mapping[str, Any], generation: bytes | None, state: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Return a class's model, and what its loader reports."""
    values = library.GenerationConfig.from_dict(_parsed(generation)) if generation is not None else None
    with _quiet(library), torch.device("cpu"):  # with another default device transformers needs accelerate
        answer: tuple[Any, Mapping[str, Any]] = getattr(library, name).from_pretrained(
            None,
            config=library.CONFIG_MAPPING[form["model_type"]].from_dict(dict(form)),
            state_dict=dict(state),
            generation_config=values,
            output_loading_info=True,
            **LOCAL,
        )
    return answer


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Let transformers log errors only, and draw no bar: nothing is loaded yet."""
    logs = library.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


def _parsed(data: bytes) -> dict[str, Any]:
    """Return a config as transformers reads it from its file.

    >>> _parsed(b'{"limits": [0.0, {"__float__": "Infinity"}]}')
    {'limits': [0.0, inf]}
    """
    form: dict[str, Any] = _with_floats(load_json_object(data))
    return form


def _with_floats(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_floats(inside) for inside in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and value.get("__float__") in [*_FLOATS]:
        return _FLOATS[value["__float__"]]
    return {name: _with_floats(inside) for name, inside in value.items()}
