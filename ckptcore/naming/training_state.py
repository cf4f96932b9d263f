"""Recognise what only a resumed training needs: optimizer, schedulers, random states, progress.

What may be deleted rests on this alone, so that evidence decides and not a name: below an optimizer only
the known keys of known optimizers are its state, below a scheduler, a loss scaler, a random state or a data
loader only what their classes save, in the form in which they save it. Plain numbers and text are no
weights. Everything else, such as a submodule that is called ``scheduler``, is of no known kind: giving it
up needs its own name. An average of the weights is a kind of its own, also inside an optimizer.

`model_part` finds the model; its tensors are never asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.named_values import CONTAINERS
from ckptcore.naming.moments import ParameterState, endings, state_below, state_of
from ckptcore.naming.rename import strip_wrappers
from ckptcore.naming.trainer_keys import (
    AVERAGES,
    BUFFERS,
    COUNTERS,
    DATA_LOADERS,
    INNER,
    LOSS_SCALERS,
    PROGRESS,
    RANDOM_STATES,
    SCHEDULERS,
    all_keys,
    telling,
)

OPTIMIZER, SCHEDULER, RANDOM_STATE = "optimizer", "scheduler", "random state"
DATA_LOADER, LOSS_SCALER, PROGRESS_KIND = "data loader", "loss scaler", "progress"
AVERAGE = "average"
TRAINING_STATE = frozenset({OPTIMIZER, SCHEDULER, RANDOM_STATE, DATA_LOADER, LOSS_SCALER, PROGRESS_KIND})

# Path elements that trainers use: torch, torchtitan, verl, Lightning, Megatron, DeepSpeed, Accelerate. They
# say where to look; the keys below them decide.
_PATTERNS = {
    OPTIMIZER: r"optim|optimizers?(_\d+)?|optim(izer)?_states?|optimizer_state_dict|chained_\d+|param_groups",
    SCHEDULER: r"(lr_)?schedulers?(_\d+)?|opt_param_scheduler",
    RANDOM_STATE: r"rng|(cuda_)?rng_states?|random_states?(_\d+)?",
    DATA_LOADER: r"data_?loaders?|dl_state|samplers?(_\d+)?",
    LOSS_SCALER: r"(grad_|loss_)?scaler",
    PROGRESS_KIND: r"(global_|skipped_)?steps?|iter|iteration|epoch|global_samples|train_state|loops"
    r"|num_floating_point_operations_so_far|checkpoint_version",
}
_NAMED = {kind: re.compile(pattern) for kind, pattern in _PATTERNS.items()}
_CONTAINER_KINDS = (SCHEDULER, RANDOM_STATE, DATA_LOADER, LOSS_SCALER)
_CONTAINERS = frozenset({"app", "extra_state", "client_state"})
_AVERAGE = re.compile(
    r"(.*_)?(ema|swa|polyak)(_.*)?|n_averaged|shadow(_params|_model)?|avg_(model|params|weights)"
    r"|averaged?(_(model|params|parameters|weights))?",
    re.IGNORECASE,
)
_CHAINED = re.compile(r"\d+|chained_\d+")
_STATES = ("state", "param_groups")
_SEPARATOR = re.compile(r"[./]")
_AVERAGED, _BUFFER, _COUNTER = all_keys(AVERAGES), all_keys(BUFFERS), all_keys(COUNTERS)
_TABLES = {SCHEDULER: SCHEDULERS, LOSS_SCALER: LOSS_SCALERS}
_PROOFS = {kind: telling(rows) for kind, rows in _TABLES.items()}
_KEYS = {kind: all_keys(rows) for kind, rows in _TABLES.items()}
_RANDOM, _LOADER, _PROGRESS = all_keys(RANDOM_STATES), all_keys(DATA_LOADERS), all_keys(PROGRESS)
# Elements of generators' states: torch's on CPU, on CUDA, on CUDA before torch 1.9; numpy's MT19937.
_GENERATORS = frozenset({("uint8", 5056), ("uint8", 16), ("uint8", 816), ("uint32", 624)})
_RANDOM_BYTES = 1 << 16
_SCALARS = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class _Array:
    """An array, as far as it is known.

    Attributes:
        path: Its path below the name that it is part of.
        dtype: Name of the dtype; "" if unknown, ``bytes`` for bytes, ``refused`` for what was not built.
        shape: Its shape, or None if unknown.
    """

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...] | None

    @property
    def is_integral(self) -> bool:
        """Whether its elements are integers."""
        return self.dtype in BY_NAME and not BY_NAME[self.dtype].is_float and "complex" not in self.dtype

    @property
    def numel(self) -> int:
        """Its number of elements; more than one if that is unknown."""
        total = 1
        for size in self.shape if self.shape is not None else (2,):
            total *= size
        return total


@dataclass(frozen=True)
class StoredKinds:
    """What the names of a checkpoint outside of its model part are.

    Attributes:
        manifest: The checkpoint.
    """

    manifest: Manifest
    _cache: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def kind_of(self, name: str) -> str | None:
        """Return the kind of a tensor or object outside of the model part.

        Returns:
            One of `TRAINING_STATE`, `AVERAGE`, or None for a name of no known kind.
        """
        if name not in self._cache:
            state = self._states.get(name)
            if state is not None and state.root in self._outermost and name in self.manifest.index:
                self._cache[name] = AVERAGE if state.key in _AVERAGED else OPTIMIZER  # most names
            else:
                self._cache[name] = self._find(name)
        return self._cache[name]

    def is_weight_like(self, name: str) -> bool:
        """Return whether a name is a tensor whose form is that of a weight: fractions, more than one."""
        row = self.manifest.index.get(name)
        if row is None:
            return False
        spec = self.manifest.tensors[row]
        return (BY_NAME[spec.dtype].is_float or "complex" in spec.dtype) and spec.numel > 1

    def is_random_state(self, name: str) -> bool:
        """Return whether a tensor has the form of a generator's state; what is no tensor may be one."""
        row = self.manifest.index.get(name)
        spec = self.manifest.tensors[row] if row is not None else None
        return spec is None or _is_random(_Array((), spec.dtype, spec.shape), _SEPARATOR.split(name))

    def is_container(self, top: str) -> bool:
        """Return whether trainers call a container of state, other than an optimizer, so."""
        word = _SEPARATOR.split(top)[0]
        return any(_NAMED[kind].fullmatch(word) for kind in _CONTAINER_KINDS)

    def has_state(self, top: str) -> bool:
        """Return whether anything below a first path element is training state or an average."""
        return any(self.kind_of(name) is not None for name in self._below.get(top, ()))

    @cached_property
    def _blobs(self) -> dict[str, Blob]:
        return {blob.key: blob for blob in self.manifest.blobs}

    @cached_property
    def _names(self) -> list[str]:
        return [*(spec.fqn for spec in self.manifest.tensors), *self._blobs]

    @cached_property
    def _below(self) -> dict[str, list[str]]:
        below: dict[str, list[str]] = {}
        for name in self._names:
            below.setdefault(name.split(".")[0], []).append(name)
        return below

    @cached_property
    def _states(self) -> dict[str, ParameterState]:
        return {name: state for name in self._names if (state := state_of(name)) is not None}

    @cached_property
    def _optimizers(self) -> frozenset[str]:
        """Prefixes that are optimizers by the names below them."""
        proven = {state.root for state in self._states.values() if state.is_telling}
        for name in self._names:
            root, dot, _ = f".{name}.".partition(".param_groups.")
            if dot:
                proven.add(root[1:])
        parameters: dict[str, set[str]] = {}
        for state in self._states.values():
            if state.root not in proven:
                parameters.setdefault(state.root, set()).add(state.parameter)
        for root, named in parameters.items():
            if any(e in named for n in self._names if not below(n, root) for e in endings(strip_wrappers(n))):
                proven.add(root)
        return frozenset(proven)

    @cached_property
    def _outermost(self) -> frozenset[str]:
        """Optimizers that are in no other one."""
        every_one = self._optimizers
        return frozenset(r for r in every_one if r and not any(o != r and below(r, o) for o in every_one))

    @cached_property
    def _trained(self) -> frozenset[str]:
        """Names of parameters, as the optimizers have them."""
        return frozenset(
            strip_wrappers(s.parameter) for s in self._states.values() if s.root in self._optimizers
        )

    @cached_property
    def _proofs(self) -> dict[tuple[str, str], bool]:
        """(kind, first path element) -> whether a key below it proves a class of that kind."""
        proofs: dict[tuple[str, str], bool] = {}
        for name in self._names:
            elements = _SEPARATOR.split(name)
            for kind, keys in _PROOFS.items():
                if not proofs.get((kind, elements[0])) and any(map(_NAMED[kind].fullmatch, elements[:2])):
                    inside = {*elements, *_keys_of(self._blobs.get(name))}
                    proofs[kind, elements[0]] = not keys.isdisjoint(inside)
        return proofs

    def _find(self, name: str) -> str | None:
        arrays = self._arrays(name)
        if arrays is None or strip_wrappers(name) in self._trained:
            return None
        elements = _SEPARATOR.split(name)
        top = elements[0]
        while len(elements) > 1 and elements[0] in _CONTAINERS:
            elements.pop(0)
        root = self._optimizer_of(name)
        named = _NAMED[OPTIMIZER].fullmatch(elements[0]) is not None
        if root is not None:
            rest: Sequence[str] = name[len(root) + 1 if root else 0 :].split(".")
            return _below_optimizer(rest, arrays, proven=True, named=named)
        if named:
            rest = elements if elements[0] == "param_groups" else elements[1:]
            return _below_optimizer(rest, arrays, proven=False, named=True)
        kind = next((kind for kind, word in _NAMED.items() if word.fullmatch(elements[0])), None)
        if kind is not None and all(self._fits(kind, top, elements, array) for array in arrays):
            return kind
        return AVERAGE if is_average(name) else None

    def _optimizer_of(self, name: str) -> str | None:
        """Return the innermost proven optimizer that a name is below."""
        best = None
        if "" in self._optimizers and name.startswith(("state.", "param_groups")):
            best = ""
        dot = name.find(".")
        while dot >= 0:
            if name[:dot] in self._optimizers:
                best = name[:dot]
                break  # what is below it, such as ``state.<parameter>``, may look like another
            dot = name.find(".", dot + 1)
        return best

    def _fits(self, kind: str, top: str, elements: Sequence[str], array: _Array) -> bool:
        """Return whether an array is what the classes of a kind save."""
        path = (*elements[1:], *array.path)
        key = next((e for e in reversed(path) if not _CHAINED.fullmatch(e)), elements[0])
        if array.dtype == "bytes":
            return kind in (DATA_LOADER, PROGRESS_KIND, RANDOM_STATE)
        if array.dtype == "refused":
            return key in _KEYS.get(kind, ())
        small = array.numel <= 1
        if array.is_integral and small:
            return True
        if kind == RANDOM_STATE:
            return _is_random(array, path)
        if kind == DATA_LOADER:
            return array.is_integral and (_is_random(array, path) or key in _LOADER)
        if kind == PROGRESS_KIND:
            return small and (key in _PROGRESS or elements[0] in _PROGRESS)
        return small and key in _KEYS[kind] and self._proofs.get((kind, top), False)

    def _arrays(self, name: str) -> list[_Array] | None:
        """Return the arrays of a tensor or object; None for a name that is neither."""
        row = self.manifest.index.get(name)
        if row is not None:
            spec = self.manifest.tensors[row]
            return [_Array((), spec.dtype, spec.shape)]
        blob = self._blobs.get(name)
        if blob is None:
            return None
        if blob.unread is not None:
            return [_Array((), "", blob.unread.shape)]
        if not blob.known:
            return [_Array((), "refused", None)]
        return list(_arrays_in(blob.tree))


def below(name: str, root: str) -> bool:
    """Return whether a name is below a prefix; below the top level are ``state`` and ``param_groups``."""
    return name.startswith(f"{root}." if root else ("state.", "param_groups."))


def is_average(name: str) -> bool:
    """Return whether an element of a name is what trainers call an average of weights.

    >>> is_average("model_ema.w"), is_average("schema.w")
    (True, False)
    """
    return any(_AVERAGE.fullmatch(element) for element in _SEPARATOR.split(name))


def below_states(name: str) -> bool:
    """Return whether a name is where optimizers keep states, whatever its key.

    >>> below_states("optim.state.w.unknown"), below_states("optimizer.encoder.weight")
    (True, False)
    """
    return any(element in _STATES or element in _BUFFER for element in name.split(".")[:4])


def _below_optimizer(rest: Sequence[str], arrays: list[_Array], *, proven: bool, named: bool) -> str | None:
    """Return the kind of a name below an optimizer: its state is a closed set of keys.

    Args:
        rest: Path below the optimizer.
        arrays: Arrays of the tensor or object.
        proven: Whether states below the optimizer prove that it is one.
        named: Whether it has the name of one; then plain values beside its states are its own.
    """
    if not arrays:
        marks = [n for n, element in enumerate(rest) if element in _STATES]
        if any(_AVERAGE.fullmatch(element) for element in rest[: marks[0] if marks else len(rest)]):
            return AVERAGE
        return OPTIMIZER if named or marks or rest[0] in _COUNTER else None
    kinds = {_part_of_optimizer((*rest, *array.path), array, proven) for array in arrays}
    if AVERAGE in kinds:
        return AVERAGE
    return OPTIMIZER if kinds == {OPTIMIZER} else None


def _part_of_optimizer(rest: Sequence[str], array: _Array, proven: bool) -> str | None:
    """Return the kind of an array at a path below an optimizer."""
    small = array.numel <= 1
    for depth, element in enumerate(rest):
        if element == "param_groups":
            return OPTIMIZER if small and array.dtype not in ("bytes", "refused") else None
        if element == "state":
            state = state_below(".".join(rest[depth + 1 :]))
            if state is None:
                return AVERAGE if _AVERAGE.fullmatch(rest[-1]) else None
            if state.key in _AVERAGED:
                return AVERAGE
            return OPTIMIZER if proven or state.is_telling else None
        if _AVERAGE.fullmatch(element):
            return AVERAGE
        if element in _BUFFER:
            return OPTIMIZER
        if element in _COUNTER:
            return OPTIMIZER if small or array.dtype == "refused" else None
        nested = any(mark in rest[depth + 1 :] for mark in _STATES)
        if element not in INNER and not _CHAINED.fullmatch(element) and not nested:
            return None
    return None


def _is_random(array: _Array, path: Sequence[str]) -> bool:
    """Return whether an array is the state of a generator: integers, few, and of a known size or key."""
    if not array.is_integral or array.shape is None or len(array.shape) > 2:
        return False
    few = array.numel * BY_NAME[array.dtype].itemsize <= _RANDOM_BYTES
    sized = bool(array.shape) and (array.dtype, array.shape[-1]) in _GENERATORS
    return few and (sized or any(element in _RANDOM for element in path))


_KINDS_OF_BYTES = frozenset({"bytes", "bytearray", "bytesio", "bytesioat", "bytetensor"})


def _arrays_in(form: Any) -> Iterator[_Array]:
    """Yield the arrays in the JSON form of an object; tensors in it are names of their own."""
    queue: list[tuple[tuple[str, ...], Any]] = [((), form)]
    while queue:
        path, value = queue.pop()
        if isinstance(value, _SCALARS):
            continue
        if isinstance(value, list):
            queue += [((*path, str(n)), v) for n, v in enumerate(value) if not isinstance(v, _SCALARS)]
            continue
        kind = value.get("$") if isinstance(value, dict) else None
        if kind is None:
            queue += [((*path, str(k)), v) for k, v in value.items() if not isinstance(v, _SCALARS)]
        elif kind in ("dict", "odict"):
            queue += [((*path, str(k)), v) for k, v in value["items"] if not isinstance(v, _SCALARS)]
        elif kind in ("tuple", "set", "frozenset"):
            queue.append((path, value["items"]))
        elif kind in _KINDS_OF_BYTES:
            yield _Array(path, "bytes", None)
        elif kind == "refused":
            yield _Array(path, "refused", None)
        elif kind == "ndarray":
            yield _of_numpy(path, value["value"])
        elif kind in CONTAINERS:
            queue.append((path, value["value"]))


def _of_numpy(path: tuple[str, ...], form: Mapping[str, Any]) -> _Array:
    import numpy as np

    if "refused" in form:
        return _Array(path, "refused", None)
    return _Array(path, np.dtype(form["dtype"]).name, tuple(form["shape"]))


def _keys_of(blob: Blob | None) -> Iterator[str]:
    """Yield the keys of an object's outermost dicts."""
    queue = [] if blob is None else [blob.tree]
    for _ in range(3):  # a scheduler in a list of a dict
        values, queue = queue, []
        for value in values:
            if isinstance(value, list):
                queue += value
            elif isinstance(value, dict):
                items = value["items"] if value.get("$") in ("dict", "odict") else value.items()
                if "$" not in value or value["$"] in ("dict", "odict"):
                    yield from (str(k) for k, _ in items)
                    queue += [v for _, v in items]
