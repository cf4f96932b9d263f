"""Give the values of any checkpoint the names that a universal folder reads back with.

``module.<parameter>`` is what the optimizer updates: the float32 master where a source has one, else its
weight. ``optimizer.state.<parameter>.<state>`` are its moments and step, and ``lp/<parameter>`` is the
weight of the model where a master is stored beside it. Everything else keeps its name, and becomes client
state. Trainers call a state ``optim.state.<parameter>.exp_avg`` or ``optimizer.state.exp_avg.<parameter>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set
from dataclasses import dataclass

from ckptcore.core.manifest import Manifest
from ckptcore.core.tree_paths import Path
from ckptcore.errors import UnsupportedFormat
from ckptcore.formats.deepspeed.file_names import NAME
from ckptcore.formats.deepspeed.optimizer_states import MASTER, STATE
from ckptcore.formats.deepspeed.reader import LOW_PRECISION, MODEL
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import ModelPart, strip_wrappers

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
# What Megatron-Core's distributed optimizer calls the float32 copy of a parameter.
_OF_MEGATRON = frozenset({"param", "fp32_param"})
_SURE = frozenset({*MOMENTS, STEP, MASTER})  # a state by this key alone, if ``state`` comes before it
_KEY = re.compile(r"[A-Za-z0-9_]+")
_CONVERT = "make it with the DeepSpeed that wrote the save (python -m deepspeed.checkpoint.ds_to_universal)"


def place_universal(source: Manifest) -> Callable[[Path], Path]:
    """Return the mapping from the paths of a source to those of a universal folder.

    Raises:
        UnsupportedFormat: Model-parallel ranks of DeepSpeed cut the source's parameters, or its experts are
            apart: a universal folder would have to say how they are cut again. Or it is of Megatron-Core.
        AmbiguousModel: Several parts of the source could be the model.
    """
    _require_expressible(source)
    model = find_model(source)
    plain = source.format == NAME  # its names are the module's own, whatever they look like
    weights = {n for t in source.tensors if (n := _inside(t.fqn, model, plain)) is not None}
    finder = _Finder(model, weights, plain)
    states = [row for t in source.tensors if (row := finder.state(t.fqn)) is not None]
    if any(key in _OF_MEGATRON for _, key in states):
        raise UnsupportedFormat(
            f"cannot write {source.root} as a universal folder: Megatron-Core's distributed optimizer keeps "
            "layers in stacks, and names no parameters in its groups",
            hint="resume in Megatron-Core (ckptcore reshard), or export the model: ckptcore export SRC DST",
        )
    masters = {parameter for parameter, key in states if key == MASTER}

    def place(path: Path) -> Path:
        name = ".".join(map(str, path))
        state = finder.state(name)
        if state is not None:
            parameter, key = state
            target = f"{MODEL}{parameter}" if key == MASTER else f"{STATE}.{parameter}.{key}"
        elif (inner := _inside(name, model, plain)) is not None:
            target = f"{LOW_PRECISION if inner in masters else MODEL}{inner}"
        else:
            return path
        return path if target == name else (target,)

    return place


def state_of(name: str) -> tuple[str, str] | None:
    """Return (parameter, state) of a name that `place_universal` gave to a state, or None."""
    parameter, dot, key = name.removeprefix(f"{STATE}.").rpartition(".")
    is_state = name.startswith(f"{STATE}.") and dot and parameter and _KEY.fullmatch(key)
    return (parameter, key) if is_state else None


@dataclass(frozen=True, slots=True)
class _Finder:
    """Finds the parameter and the state in a name.

    Attributes:
        model: Where the model is.
        weights: Its parameters and buffers.
        plain: Whether names have no wrappers to strip.
    """

    model: ModelPart
    weights: Set[str]
    plain: bool

    def state(self, name: str) -> tuple[str, str] | None:
        """Return (parameter, state), or None for a name that is no optimizer state."""
        parts = name.split(".")
        for position in (n for n, part in enumerate(parts) if part == "state"):
            rest = parts[position + 1 :]
            for key, elements in ((rest[-1:], rest[:-1]), (rest[:1], rest[1:])):
                if not elements or not _KEY.fullmatch(key[0]):
                    continue
                parameter = self._parameter(".".join(elements))
                if parameter is not None:
                    return parameter, key[0]
            if len(rest) > 1 and rest[-1] in _SURE:  # renamed, or of a parameter that is not there
                return self._bare(".".join(rest[:-1])), rest[-1]
        return None

    def _parameter(self, name: str) -> str | None:
        """Return the weight that an optimizer calls so: by its whole name, or by that below a part of it."""
        bare = self._bare(name)
        if bare in self.weights:
            return bare
        parts = self.model.prefix.split(".")[:-1]
        for n in range(len(parts)):
            head = ".".join(parts[n:]) + "."
            if name.startswith(head) and self._bare(name[len(head) :]) in self.weights:
                return self._bare(name[len(head) :])
        return None

    def _bare(self, name: str) -> str:
        return name if self.plain else strip_wrappers(name)


def _inside(name: str, model: ModelPart, plain: bool) -> str | None:
    """Return the name of a weight inside the model; None for a name outside of it."""
    inner = name[len(model.prefix) :]
    if not name.startswith(model.prefix) or not inner or model.foreign(inner) is not None:
        return None
    return inner if plain else strip_wrappers(inner)


def _require_expressible(source: Manifest) -> None:
    if source.format != NAME:
        return
    ranks = {k: n for k, n in source.origin.get("mesh", {}).items() if k in ("tp", "pp") and n != 1}
    if ranks:
        got = ", ".join(f"{k}={n}" for k, n in ranks.items())
        raise UnsupportedFormat(
            f"cannot write {source.root} as a universal folder: tensor- or pipeline-parallel ranks saved it "
            f"(got {got}), and how its parameters are cut again is not carried over",
            hint=_CONVERT,
        )
    if any(b.key == "num_experts" for b in source.blobs):
        raise UnsupportedFormat(
            f"cannot write {source.root} as a universal folder: it has experts of DeepSpeed's own MoE "
            "(num_experts), which DeepSpeed does not load from one",
            hint="write DCP: ckptcore reshard SRC DST --mesh fsdp=N",
        )
