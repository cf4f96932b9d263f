"""Numbered optimizer states: which parameter does each number mean? Told only where it is proven.

torch numbers parameters in the order of an optimizer's groups (torch/optim/optimizer.py, state_dict).
FSDP numbers them as the model's ``parameters()`` come, with gaps where an optimizer lacks one
(torch/distributed/fsdp/fully_sharded_data_parallel.py, rekey_optim_state_dict). A group lists its
parameters in the model's order, which is that of the state dict without its buffers; so does a list of
one optimizer for each parameter. What the states tell of shapes must fit that order in exactly one way. Names
that the optimizer tells itself (``param_names``, torch >= 2.6) need no order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptcore.formats.common.shape_matching import Row, Shape, forced_places

Params = Sequence[tuple[str, Shape]]  # (name, global shape) of a model's parameters, in order

AMBIGUOUS = "the order and shapes of its parameters fit the model in more than one way"
NO_FIT = "the order and shapes of its parameters do not fit the model"
NO_SHAPES = "its states do not tell the shape of any parameter"

# State that has the parameter's own shape, by the optimizers of torch/optim.
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


@dataclass(frozen=True, slots=True)
class Numbered:
    """An optimizer's state dict whose states are numbered.

    state: number -> states. groups: as pickled.
    """

    state: Mapping[int, Any]
    groups: list[dict[str, Any]]

    @property
    def ids(self) -> list[int]:
        """Every number, in the groups' order."""
        return [i for group in self.groups for i in group["params"]]


@dataclass(frozen=True, slots=True)
class NumberingProof:
    """names: number -> parameter, or None with the reason why there is no proof."""

    names: dict[int, str] | None
    why: str = ""


def numbered(value: Any) -> Numbered | None:
    """A state dict as an optimizer with numbers, or None."""
    state, groups = (value.get("state"), value.get("param_groups")) if isinstance(value, dict) else (0, 0)
    if not isinstance(state, dict) or type(groups) is not list or not groups:
        return None
    if any(not isinstance(g, dict) or type(g.get("params")) is not list for g in groups):
        return None
    found = Numbered(state, groups)
    ids = found.ids
    if any(type(i) is not int for i in ids) or len(set(ids)) != len(ids) or not set(state) <= set(ids):
        return None
    return found


def prove(
    params: Params, optimizers: Sequence[Numbered], shape: Callable[[Any], Shape | None]
) -> list[NumberingProof]:
    """What the numbers of each optimizer of one model mean; no names where its states hold no tensor.

    shape: the global shape of a tensor, None for anything else.
    """
    shapes = [_shapes(o, shape) for o in optimizers]
    model = _Model(params)
    proofs: dict[int, NumberingProof] = {}
    for n, optimizer in enumerate(optimizers):
        names = _stored_names(optimizer, model.shapes)
        if names is not None and _fit(names, shapes[n] or {}, model):
            proofs[n] = NumberingProof(names)
    rest = [n for n in range(len(optimizers)) if n not in proofs]
    rows = [(optimizers[n], shapes[n] or {}) for n in rest]
    if any(o.ids != list(range(len(o.ids))) for o, _ in rows):
        found = _by_model(model, rows)
    else:
        found = _by_groups(model, rows, whole=len(rows) == len(optimizers))
    proofs.update(zip(rest, found, strict=True))
    # Without a shape there was nothing to compare; without a state there is nothing to name.
    proofs |= {n: NumberingProof(None, NO_SHAPES) for n in rest if shapes[n] == {}}
    proofs |= {n: NumberingProof({}) for n, known in enumerate(shapes) if known is None}
    return [proofs[n] for n in range(len(optimizers))]


def told_names(optimizer: Numbered) -> dict[int, str] | None:
    """The names that every group tells, as they are told."""
    names: list[Any] = []
    for group in optimizer.groups:
        told = group.get("param_names")
        if type(told) is not list or len(told) != len(group["params"]):
            return None
        names += told
    if not names or any(type(n) is not str for n in names) or len(set(names)) != len(names):
        return None
    return dict(zip(optimizer.ids, names, strict=True))


class _Model:
    """The parameters in order, by place and by name."""

    def __init__(self, params: Params) -> None:
        self.names = [name for name, _ in params]
        self.shapes = dict(params)
        self.row = Row([shape for _, shape in params])


def _stored_names(optimizer: Numbered, there: Mapping[str, Shape]) -> dict[int, str] | None:
    """The names that the optimizer tells, as the model has them: below the one prefix that fits."""
    told = told_names(optimizer)
    if told is None or all(n in there for n in told.values()):
        return told
    first = next(iter(told.values()))
    starts = {n[: len(n) - len(first)] for n in there if n.endswith(f".{first}")}
    fits = [s for s in starts if all(s + n in there for n in told.values())]
    return {i: fits[0] + n for i, n in told.items()} if len(fits) == 1 else None


def _shapes(optimizer: Numbered, shape: Callable[[Any], Shape | None]) -> dict[int, Shape] | None:
    """What the states tell of the shapes of parameters; None where they hold no tensor."""
    found: dict[int, Shape] = {}
    tensors = False
    for number, states in optimizer.state.items():
        if not isinstance(states, dict):
            continue
        seen = {k: s for k, v in states.items() if (s := shape(v)) is not None}
        tensors = tensors or bool(seen)
        told = _shape_of(seen)
        if told is not None:
            found[number] = told
    return found if tensors else None


def _shape_of(seen: Mapping[Any, Shape]) -> Shape | None:
    """The parameter's shape by the shapes of its states; None where they do not tell it."""
    own = {seen[k] for k in _MOMENTS if k in seen}
    if not own and {"row_var", "col_var"} <= seen.keys():  # torch/optim/_adafactor.py
        row, col = seen["row_var"], seen["col_var"]
        own = {(*row[:-1], col[-1])} if row and col else set()
    if not own and {"exp_avg_sq_row", "exp_avg_sq_col"} <= seen.keys():  # transformers/optimization.py
        row, col = seen["exp_avg_sq_row"], seen["exp_avg_sq_col"]
        own = {(*row, col[-1])} if col else set()
    if not own:
        own = {s for s in seen.values() if s}  # a count of steps has no dims
    return own.pop() if len(own) == 1 else None


def _fit(names: Mapping[int, str], shapes: Mapping[int, Shape], model: _Model) -> bool:
    return all(model.shapes[names[i]] == s for i, s in shapes.items())


# An optimizer, and what is known of the shapes of its parameters.
Known = tuple[Numbered, Mapping[int, Shape]]


def _by_groups(model: _Model, rows: Sequence[Known], *, whole: bool) -> list[NumberingProof]:
    """Numbers that count each optimizer's own groups. whole: these are all optimizers that there are."""
    # As many numbers as parameters: each is taken by one optimizer, and by no other.
    if whole and len(rows) > 1 and sum(len(o.ids) for o, _ in rows) == len(model.names):
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
    """No two numbers mean the same parameter."""
    chains = [(n, g["params"]) for n, (o, _) in enumerate(rows) for g in o.groups]
    found = forced_places(model.row, [[rows[n][1].get(i) for i in ids] for n, ids in chains])
    names: list[dict[int, str]] = [{} for _ in rows]
    for (n, ids), places in zip(chains, found or (), strict=found is not None):
        names[n] |= {i: model.names[p] for i, p in zip(ids, places, strict=True) if p is not None}
    return [_proof(o, made, found is not None) for made, (o, _) in zip(names, rows, strict=True)]


def _by_model(model: _Model, rows: Sequence[Known]) -> list[NumberingProof]:
    """Numbers that count the model's parameters: all optimizers count the same ones."""
    ids = [i for o, _ in rows for i in o.ids]
    known: dict[int, Shape] = {}
    agree = all(known.setdefault(i, s) == s for _, shapes in rows for i, s in shapes.items())
    found = None
    if agree and min(ids) >= 0 and max(ids) < len(model.names):
        found = forced_places(model.row, [[known.get(i) for i in range(max(ids) + 1)]])
    places = found[0] if found else []
    named = {i: model.names[p] for i, p in enumerate(places) if p is not None}
    return [_proof(o, {i: named[i] for i in o.ids if i in named}, found is not None) for o, _ in rows]


def _proof(optimizer: Numbered, names: dict[int, str], fits: bool) -> NumberingProof:
    if len(names) == len(optimizer.ids):
        return NumberingProof(names)
    return NumberingProof(None, AMBIGUOUS if fits else NO_FIT)
