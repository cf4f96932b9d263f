"""Match numbered optimizer states to parameters, where a proof exists.

torch numbers parameters in the order of an optimizer's groups (torch/optim/optimizer.py, state_dict).
FSDP numbers them in the order of the model's ``parameters()``, with gaps where an optimizer lacks one
(torch/distributed/fsdp/fully_sharded_data_parallel.py, rekey_optim_state_dict). A group lists its
parameters in the model's order, which is that of the state dict without its buffers; so does a list of
one optimizer per parameter. The shapes of the states must fit that order in exactly one way. Names that the
optimizer records itself (``param_names``, torch >= 2.6) need no order.

Shapes are matched in order, each place once. A place is forced when the first and the last place that an
element can have are the same. A forced place is removed from the choices of all others, until no new place is
found. The method is sound but not complete: an element that stays open may still have one solution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.core.object_tree import Refused, TensorRef

Shape = tuple[int, ...]
Places = list[int | None]

# More rounds only fix more places: stopping early leaves places open, and no place wrong.
_ROUNDS = 32
Params = Sequence[tuple[str, Shape]]  # (name, global shape) of a model's parameters, in order

AMBIGUOUS = "the order and shapes of its parameters fit the model in more than one way"
NO_FIT = "the order and shapes of its parameters do not fit the model"
NO_SHAPES = "its states do not tell the shape of any parameter"

# Keys of states that have the parameter's own shape, from the optimizers of torch/optim.
_MOMENTS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "sum",
    "grad_avg",
    "exp_inf",
    "acc_delta",
    "ax",
    "prev",
    "step_size",
    "variance",
)


class Row:
    """A row of shapes, indexed for many lookups."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.length = len(shapes)
        self.front, self.back = _Matches(shapes), _Matches(shapes[::-1])


def forced_places(row: Row, chains: Sequence[Sequence[Shape | None]]) -> list[Places] | None:
    """Find the only possible place of each element of each chain.

    Args:
        row: Shapes to match.
        chains: Lists of shapes, each in the order of the row. A shape of None fits every place.

    Returns:
        Per chain, the places in ``row``, None where a place is open. None when the chains do not fit.

    >>> forced_places(Row([(1,), (2,), (1,)]), [[(2,), (1,)]]), forced_places(Row([(1,), (1,)]), [[(1,)]])
    ([[1, 2]], [[None]])
    >>> forced_places(Row([(1,), (2,)]), [[(2,), (1,)]])
    """
    chain_places: list[Places] = [[None] * len(chain) for chain in chains]
    taken: set[int] = set()
    for _ in range(_ROUNDS if len(chains) > 1 else 1):  # one chain takes nothing from itself
        taken_from_back = {row.length - 1 - p for p in taken}
        for chain, places in zip(chains, chain_places, strict=True):
            first = row.front.places(chain, places, taken)
            mirrored = row.back.places(chain[::-1], _mirrored(places, row.length), taken_from_back)
            if first is None or mirrored is None:
                return None
            last = _mirrored(mirrored, row.length)
            places[:] = [p if p == q else None for p, q in zip(first, last, strict=True)]
        forced = [p for places in chain_places for p in places if p is not None]
        if len(set(forced)) < len(forced):
            return None
        if len(forced) == len(taken):
            break
        taken = set(forced)
    return chain_places


class _Matches:
    """A row as seen from one end."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._all = range(len(shapes))
        self._by: dict[Shape, list[int]] = {}
        for n, shape in enumerate(shapes):
            self._by.setdefault(shape, []).append(n)

    def places(self, chain: Sequence[Shape | None], fixed: Places, taken: set[int]) -> list[int] | None:
        """Return the first place that each element can have; None when the chain does not fit."""
        first_places: list[int] = []
        next_free = 0
        for shape, place in zip(chain, fixed, strict=True):
            if place is None:
                free = self._all if shape is None else self._by.get(shape, [])
                n = bisect_left(free, next_free)
                while n < len(free) and free[n] in taken:
                    n += 1
                place = free[n] if n < len(free) else -1
            if place < next_free:
                return None
            first_places.append(place)
            next_free = place + 1
        return first_places


def _mirrored(places: Sequence[int | None], length: int) -> Places:
    return [None if p is None else length - 1 - p for p in reversed(places)]


@dataclass(frozen=True, slots=True)
class Numbered:
    """An optimizer's state dict whose states are numbered.

    Attributes:
        state: Number -> states.
        groups: Parameter groups as pickled.
    """

    state: Mapping[int, Any]
    groups: list[dict[str, Any]]

    @property
    def ids(self) -> list[int]:
        """Return every number, in the order of the groups."""
        return [i for group in self.groups for i in group["params"]]


@dataclass(frozen=True, slots=True)
class NumberingProof:
    """What the numbers of one optimizer mean.

    Attributes:
        names: Number -> parameter, or None without a proof.
        why: Why there is no proof.
    """

    names: dict[int, str] | None
    why: str = ""


def numbered(value: Any) -> Numbered | None:
    """Return a state dict as a numbered optimizer, or None for any other value."""
    state, groups = (value.get("state"), value.get("param_groups")) if isinstance(value, dict) else (0, 0)
    if not isinstance(state, dict) or type(groups) is not list or not groups:
        return None
    if any(not isinstance(g, dict) or type(g.get("params")) is not list for g in groups):
        return None
    optimizer = Numbered(state, groups)
    ids = optimizer.ids
    if any(type(i) is not int for i in ids) or len(set(ids)) != len(ids) or not set(state) <= set(ids):
        return None
    return optimizer


def prove(
    params: Params, optimizers: Sequence[Numbered], shape: Callable[[Any], Shape | None]
) -> list[NumberingProof]:
    """Prove what the numbers of each optimizer of one model mean.

    Args:
        params: Parameters of the model, in order.
        optimizers: All optimizers of the model.
        shape: Returns the global shape of a tensor, None for any other value.

    Returns:
        A proof per optimizer, without names where its states contain no tensor.
    """
    shapes = [_shapes(o, shape) for o in optimizers]
    model = _Model(params)
    proofs: dict[int, NumberingProof] = {}
    for n, optimizer in enumerate(optimizers):
        names = _stored_names(optimizer, model.shapes)
        stated_shapes = (shapes[n] or {}).items()
        if names is not None and all(model.shapes[names[i]] == shape_of for i, shape_of in stated_shapes):
            proofs[n] = NumberingProof(names)
    rest = [n for n in range(len(optimizers)) if n not in proofs]
    rows = [(optimizers[n], shapes[n] or {}) for n in rest]
    if any(o.ids != list(range(len(o.ids))) for o, _ in rows):
        rest_proofs = _by_model(model, rows)
    else:
        rest_proofs = _by_groups(model, rows, complete=len(rows) == len(optimizers))
    proofs.update(zip(rest, rest_proofs, strict=True))
    # Without a shape there was nothing to compare; without a state there is nothing to name.
    proofs |= {n: NumberingProof(None, NO_SHAPES) for n in rest if shapes[n] == {}}
    proofs |= {n: NumberingProof({}) for n, param_shapes in enumerate(shapes) if param_shapes is None}
    return [proofs[n] for n in range(len(optimizers))]


def recorded_names(optimizer: Numbered) -> dict[int, str] | None:
    """Return number -> name as the groups record them; None unless every group does."""
    names: list[Any] = []
    for group in optimizer.groups:
        recorded = group.get("param_names")
        if type(recorded) is not list or len(recorded) != len(group["params"]):
            return None
        names += recorded
    if not names or any(type(n) is not str for n in names) or len(set(names)) != len(names):
        return None
    return dict(zip(optimizer.ids, names, strict=True))


class _Model:
    """Parameters of a model in order, by position and by name."""

    def __init__(self, params: Params) -> None:
        self.names = [name for name, _ in params]
        self.shapes = dict(params)
        self.row = Row([shape for _, shape in params])


def _stored_names(optimizer: Numbered, model_shapes: Mapping[str, Shape]) -> dict[int, str] | None:
    """Return the names that the optimizer records, with the one prefix under which the model has them."""
    recorded = recorded_names(optimizer)
    if recorded is None or all(n in model_shapes for n in recorded.values()):
        return recorded
    first = next(iter(recorded.values()))
    starts = {n[: len(n) - len(first)] for n in model_shapes if n.endswith(f".{first}")}
    fits = [s for s in starts if all(s + n in model_shapes for n in recorded.values())]
    return {i: fits[0] + n for i, n in recorded.items()} if len(fits) == 1 else None


def _shapes(optimizer: Numbered, shape: Callable[[Any], Shape | None]) -> dict[int, Shape] | None:
    """Return the shapes of parameters that the states determine; None when they contain no tensor."""
    param_shapes: dict[int, Shape] = {}
    tensors = False
    for number, states in optimizer.state.items():
        if not isinstance(states, dict):
            continue
        state_shapes = {k: s for k, v in states.items() if (s := shape(v)) is not None}
        tensors = tensors or bool(state_shapes)
        param_shape = _shape_of(state_shapes)
        if param_shape is not None:
            param_shapes[number] = param_shape
    return param_shapes if tensors else None


def _shape_of(shapes: Mapping[Any, Shape]) -> Shape | None:
    """Return a parameter's shape from the shapes of its states; None where they do not determine it."""
    candidates = {shapes[k] for k in _MOMENTS if k in shapes}
    if not candidates and {"row_var", "col_var"} <= shapes.keys():  # torch/optim/_adafactor.py
        row, col = shapes["row_var"], shapes["col_var"]
        candidates = {(*row[:-1], col[-1])} if row and col else set()
    # transformers/optimization.py
    if not candidates and {"exp_avg_sq_row", "exp_avg_sq_col"} <= shapes.keys():
        row, col = shapes["exp_avg_sq_row"], shapes["exp_avg_sq_col"]
        candidates = {(*row, col[-1])} if col else set()
    if not candidates:
        candidates = {s for s in shapes.values() if s}  # a step counter has no dims
    return candidates.pop() if len(candidates) == 1 else None


# An optimizer, and the known shapes of its parameters.
Known = tuple[Numbered, Mapping[int, Shape]]


def _by_groups(model: _Model, rows: Sequence[Known], *, complete: bool) -> list[NumberingProof]:
    """Prove numbers that count each optimizer's own groups; ``complete`` if these are all of the model."""
    # As many numbers as parameters: each parameter belongs to exactly one optimizer.
    if complete and len(rows) > 1 and sum(len(o.ids) for o, _ in rows) == len(model.names):
        if len(rows) == len(model.names):  # made by a loop over the parameters, in their order
            fits = all(
                s == shapes.get(0, s) for s, (_, shapes) in zip(model.shapes.values(), rows, strict=True)
            )
            return [
                NumberingProof({0: name}) if fits else NumberingProof(None, NO_FIT) for name in model.names
            ]
        together = _solved(model, rows)
        if all(p.names is not None for p in together):
            return together
    return [_solved(model, [row])[0] for row in rows]


def _solved(model: _Model, rows: Sequence[Known]) -> list[NumberingProof]:
    """Match the groups of optimizers together: no two numbers mean the same parameter."""
    chains = [(n, g["params"]) for n, (o, _) in enumerate(rows) for g in o.groups]
    chain_places = forced_places(model.row, [[rows[n][1].get(i) for i in ids] for n, ids in chains])
    names: list[dict[int, str]] = [{} for _ in rows]
    for (n, ids), places in zip(chains, chain_places or (), strict=chain_places is not None):
        names[n] |= {i: model.names[p] for i, p in zip(ids, places, strict=True) if p is not None}
    return [
        _proof(o, optimizer_names, chain_places is not None)
        for optimizer_names, (o, _) in zip(names, rows, strict=True)
    ]


def _by_model(model: _Model, rows: Sequence[Known]) -> list[NumberingProof]:
    """Prove numbers that count the model's parameters: all optimizers count the same ones."""
    ids = [i for o, _ in rows for i in o.ids]
    param_shapes: dict[int, Shape] = {}
    agree = all(param_shapes.setdefault(i, s) == s for _, shapes in rows for i, s in shapes.items())
    chain_places = None
    # The numbers are a foreign file's: bounded before a list of that length is made.
    if agree and min(ids) >= 0 and max(ids) < len(model.names):
        chain_places = forced_places(model.row, [[param_shapes.get(i) for i in range(max(ids) + 1)]])
    places = chain_places[0] if chain_places else []
    named = {i: model.names[p] for i, p in enumerate(places) if p is not None}
    return [_proof(o, {i: named[i] for i in o.ids if i in named}, chain_places is not None) for o, _ in rows]


def _proof(optimizer: Numbered, names: dict[int, str], fits: bool) -> NumberingProof:
    if len(names) == len(optimizer.ids):
        return NumberingProof(names)
    return NumberingProof(None, AMBIGUOUS if fits else NO_FIT)


def join_equal_groups(options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join parameters with equal options to one group, in the order of each group's first parameter."""
    groups: dict[str, dict[str, Any]] = {}
    for fqn, values in options.items():
        group = groups.setdefault(repr(sorted(values.items())), {**values, "params": []})
        group["params"].append(fqn)
    return list(groups.values())


def is_opaque(value: Any) -> bool:
    """Return whether an option of a group is, or has inside, a tensor or a value that was refused."""
    inside: Iterable[Any] = value if isinstance(value, (list, tuple)) else ()
    inside = value.values() if isinstance(value, dict) else inside
    return isinstance(value, (TensorRef, Refused)) or any(map(is_opaque, inside))
