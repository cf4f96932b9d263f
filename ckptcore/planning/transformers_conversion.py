"""Run transformers' own loader on an export's names and shapes, and report what does not fit.

Since version 5 transformers renames, splits, stacks and joins tensors while it loads. The list of a model's
parameters is therefore no list of names in its files. So the loader runs on meta tensors of the export's
shapes, and reports what is missing, left over, or of another shape. It sorts and stacks tensors, and does not
notice three errors that are checked here: gaps in the numbers of experts, two tensors for one parameter, and
parts of wrong sizes whose sum is right.

The loader also forgives names that no other reader does: a prefix too many or too few, names of earlier
versions, parameters of the live model. So names are compared with those that `save_pretrained` of this very
model writes, and for each that differs the answer has the exact one, if the loader shows which it is.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from ckptcore.naming import transformers_private

Shape = tuple[int, ...]
HALF = ("bfloat16", "float16")
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
_JOINED = re.compile(r"(?:^|\.)model\.layers\.(\d{1,6})\.eh_proj\.weight$")
_DIGITS = re.compile(r"(\d+)")
_MOST_WRAPPERS = 6  # attributes around a model
_IN_THREADS_NOT = "HF_DEACTIVATE_ASYNC_LOAD"  # of transformers: tensors are taken one after the other


@dataclass
class ModelMismatch:
    """What does not fit: in the export's names, else in those of the hub's files, else in the model's.

    Attributes:
        missing: Names without a tensor.
        unexpected: Names that the model does not use.
        shapes: (name, shape found, shape wanted).
        broken: What the loader cannot combine, and why.
        ties: (name, name that shares its values) by the config, in the export's names.
        names: Name -> what `save_pretrained` calls that tensor, where it is another name.
        inexact: Names that `save_pretrained` does not write, of tensors that are none of those it writes.
        float32: bfloat16 and float16 -> names of tensors that stay in float32 in a model of that dtype.
        prefixes: Of names that are, without it, exactly those of the files or of the model.
        unsaved: Names of what the model computes itself, and `save_pretrained` leaves out.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    shapes: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    inexact: list[str] = field(default_factory=list)
    float32: dict[str, list[str]] = field(default_factory=dict)
    prefixes: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Route:
    """Where the loader puts one stored tensor.

    group: the parameter it gives, or the first one of several: tensors of one group are put together.
    pattern: of the converter that does so; None for a tensor that is taken as it is. targets: every
    parameter that the group gives.
    """

    group: str
    pattern: str | None
    targets: tuple[str, ...]


def compare(model: Any, tensor_shapes: Mapping[str, Shape | None]) -> ModelMismatch:
    """Compare an export with a model as the installed transformers would load it.

    Args:
        model: A transformers model on the meta device; its parameters are replaced.
        tensor_shapes: Name -> shape of the export; None where it is unknown: it counts as right.
    """
    model_shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if hasattr(t, "shape")}
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # before version 5 nothing is put together
        return _compare_names(model, _filled(tensor_shapes, model_shapes), model_shapes)
    with _quick(loading):
        return _Comparison(loading, model, tensor_shapes, model_shapes).outcome()


def _filled(tensor_shapes: Mapping[str, Shape | None], right: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: right.get(name, ()) if shape is None else shape for name, shape in tensor_shapes.items()}


class _Spares:
    """Copies of converters, made only while the last one is in use.

    For every tensor the loader makes a deep copy of its converter, and throws it away where the parameter
    has one already: for 256 experts in one tensor 255 times. A copy without tensors was not taken, and is
    given again.
    """

    def __init__(self) -> None:
        # With the original, too: an id is of one object while it lives.
        self._spares: dict[int, tuple[Any, Any]] = {}

    def __call__(self, converter: Any) -> Any:
        _, spare = self._spares.get(id(converter), (None, None))
        if spare is None or getattr(spare, "collected_tensors", True):
            spare = deepcopy(converter)
            self._spares[id(converter)] = converter, spare
        return spare


class _Comparison:
    """One export, one model, and the loader of transformers 5."""

    def __init__(
        self,
        loading: Any,
        model: Any,
        tensor_shapes: Mapping[str, Shape | None],
        model_shapes: dict[str, Shape],
    ):
        self._loading, self._model, self._model_shapes = loading, model, model_shapes
        self._float32 = {dtype: kept_in_float32(model, dtype) for dtype in HALF}
        written = written_tensors(model)
        self._hub, self._saved = self._hub_shapes(model.state_dict()), {*self._hub_shapes(written)}
        self._prefixes = _prefixes(
            tensor_shapes,
            _ignored(model, "unexpected", tensor_shapes),
            ({*self._hub}, self._saved),
            ({*model_shapes}, {*written}),
        )
        self._shapes = tensor_shapes = _filled(tensor_shapes, model_shapes | self._hub)
        self._routes = self._routes_of(tensor_shapes)
        self._ideal = self._routes if tensor_shapes.keys() == self._hub.keys() else self._routes_of(self._hub)
        self._export_names, self._pieces = _by_group(self._routes), _by_group(self._ideal)
        self._group_of = {
            t: r.group for rs in (self._ideal, self._routes) for r in rs.values() for t in r.targets
        }

    def outcome(self) -> ModelMismatch:
        info = self._load()
        out = ModelMismatch()
        skipped = _ignored(self._model, "unexpected", self._shapes)
        out.unexpected += [
            n for n, r in self._routes.items() if r.group not in self._model_shapes and not skipped(r.group)
        ]
        ties = _ties(self._model, self._model_shapes)
        lacking = _without_tied(
            {n for n in info.missing_keys if n in self._model_shapes}, ties, both_ways=True
        )
        may_lack = _ignored(self._model, "missing")
        bad: dict[str, str] = {}
        for name in sorted(n for n in lacking if not may_lack(n)):
            bad.setdefault(self._group_of.get(name, name), f"{name} gets no value")
        for name, got, right in sorted(info.mismatched_keys, key=lambda m: str(m[0])):
            bad.setdefault(
                self._group_of.get(name, name), f"{name} would be {list(got)} (config says {list(right)})"
            )
        for group, reason in info.conversion_errors.items():
            bad[group] = _last_line(reason)
        for group, names in self._export_names.items():
            if group in self._model_shapes and (reason := self._defect(names)):
                bad.setdefault(group, f"{group}: {reason}")
        for group, reason in bad.items():
            self._report_group(group, reason, out)
        direct = {r.group: n for n, r in self._routes.items() if r.pattern is None}
        out.ties += [(direct[a], direct[b]) for a, b in ties if a in direct and b in direct]
        out.names, out.inexact = self._exact_names(ties)
        out.float32 = {
            d: [n for n, r in self._routes.items() if r.group in float32_names]
            for d, float32_names in self._float32.items()
        }
        out.prefixes = self._prefixes
        left_out = transformers_private.left_out_on_save(self._model)
        out.unsaved = [n for n, r in self._routes.items() if r.group in left_out]
        return out

    def _exact_names(self, ties: Sequence[tuple[str, str]]) -> tuple[dict[str, str], list[str]]:
        """Return `ModelMismatch.names` and `ModelMismatch.inexact`.

        Tensors that the loader takes by one pattern for one parameter are the same ones, in the same order.
        """
        if not self._hub:
            return {}, []
        exact, export_names = defaultdict(list), defaultdict(list)
        for name, route in self._ideal.items():
            if name not in self._shapes:
                exact[route.group, route.pattern].append(name)
        for name, route in self._routes.items():
            if name not in self._hub and route.group in self._model_shapes:
                export_names[route.group, route.pattern].append(name)
        names: dict[str, str] = {}
        inexact: list[str] = []
        for key, alike in export_names.items():
            if len(exact[key]) == len(alike):
                names |= zip(alike, exact[key], strict=True)
            else:
                inexact += alike
        called = {names.get(name, name): name for name in self._shapes}
        files = {route.group: name for name, route in self._ideal.items() if route.pattern is None}
        for tied, stored in ties:  # the loader takes the value of either
            tied_name, stored_name = files.get(tied), files.get(stored)
            if stored_name in self._saved and stored_name not in called and tied_name in called:
                names[called.pop(tied_name)] = stored_name
                called[stored_name] = tied_name
        return {old: new for old, new in names.items() if old != new}, inexact

    def _report_group(self, group: str, reason: str, out: ModelMismatch) -> None:
        """Report one bad group, by the most exact names."""
        export_names, pieces = self._export_names[group], self._pieces[group]
        if (
            len(export_names) == 1
            and self._routes[export_names[0]].pattern is None
            and group in self._model_shapes
        ):
            out.shapes.append((export_names[0], self._shapes[export_names[0]], self._model_shapes[group]))
            return
        absent = [n for n in pieces if n not in self._shapes]
        over = [n for n in export_names if n not in self._hub] if pieces else []
        odd = [n for n in export_names if n in self._hub and self._hub[n] != self._shapes[n]]
        out.missing += absent if export_names or absent else [group]
        out.unexpected += over
        out.shapes += [(n, self._shapes[n], self._hub[n]) for n in odd]
        if export_names and not (absent or over or odd):
            out.broken.append(reason)

    def _defect(self, names: Sequence[str]) -> str:
        """Return the errors in one group that the loader does not notice."""
        by_pattern = defaultdict(list)
        for name in names:
            by_pattern[self._routes[name].pattern].append(name)
        if len(names) > 1 and None in by_pattern:
            return f"{' and '.join(names[:3])} would both give it"
        for alike in by_pattern.values():
            numbers = _list_numbers(alike)
            if numbers != list(range(len(alike))):
                return f"{alike[0]} and {len(alike) - 1} more are not numbered from 0 to {len(alike) - 1}"
        listed = [n for n in names if _is_listed(self._routes[n])]
        if len({len(alike) for alike in by_pattern.values()}) > 1 and listed:
            return "its parts are not equally many"
        # Where lists are stacked and joined, the joined parts are cut apart again in equal pieces.
        if any(n in self._hub and self._hub[n] != self._shapes[n] for n in listed):
            return "its parts are of different sizes"
        return ""

    def _hub_shapes(self, state: Mapping[str, Any]) -> dict[str, Shape]:
        """Return names and shapes of files with these tensors of the model; empty if transformers fails."""
        try:
            saved = self._loading.revert_weight_conversion(self._model, dict(state))
        except Exception:  # some classes convert in one direction only: messages name parameters then
            return {}
        return {n: tuple(t.shape) for n, t in saved.items() if hasattr(t, "shape")}

    def _transforms(self) -> list[Any]:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        transforms: list[Any] = mapping.get_model_conversion_mapping(self._model)
        return transforms

    def _routes_of(self, names: Iterable[str]) -> dict[str, _Route]:
        """Return the route of each name through the loader: its own functions, in its own order."""
        loading, model = self._loading, self._model
        transforms = self._transforms()  # anew, as some remember what they have seen
        renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
        targets_of = {p: c.target_patterns for c in converters for p in c.source_patterns}
        prefix, state = model.base_model_prefix, model.state_dict()
        routes = {}
        for name in sorted(names, key=loading.dot_natural_key):
            group, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
            if group not in state and name in state:
                group, pattern = loading.rename_source_key(name, [], [], prefix, state)
            targets = targets_of[pattern] if pattern is not None else []
            parameters = [group.replace(targets[0], t) for t in targets] or [group]
            routes[name] = _Route(group, pattern, tuple(parameters))
        return routes

    def _load(self) -> Any:
        """Return the report of transformers' loader on these tensors; nothing is allocated."""
        import torch

        modeling: Any = importlib.import_module("transformers.modeling_utils")
        dtypes = {n: t.dtype for n, t in self._model.state_dict().items() if hasattr(t, "dtype")}
        tensors = {
            name: torch.empty(shape, device="meta", dtype=dtypes.get(self._routes[name].group))
            for name, shape in self._shapes.items()
        }
        config = modeling.LoadStateDictConfig(weight_mapping=self._transforms(), device_map={"": "meta"})
        return transformers_private.load_report(self._model, tensors, config)


@contextmanager
def _quick(loading: Any) -> Iterator[None]:
    """Speed up the loader for many names: without copies, sorting keys, and a job of a thread for each."""
    quick = {"deepcopy": _Spares(), "dot_natural_key": cache(loading.dot_natural_key)}
    before = {name: getattr(loading, name) for name in quick if hasattr(loading, name)}
    env = os.environ.get(_IN_THREADS_NOT)
    os.environ[_IN_THREADS_NOT] = "1"
    try:
        for name in before:
            setattr(loading, name, quick[name])
        yield
    finally:
        for name, value in before.items():
            setattr(loading, name, value)
        if env is None:
            del os.environ[_IN_THREADS_NOT]
        else:
            os.environ[_IN_THREADS_NOT] = env


def _compare_names(
    model: Any, tensor_shapes: Mapping[str, Shape], model_shapes: Mapping[str, Shape]
) -> ModelMismatch:
    """Compare with transformers before 5, which at most renames."""
    new = transformers_private.renamed_by_version_4(model, list(tensor_shapes))
    ties = _ties(model, model_shapes)
    skipped, may_lack = _ignored(model, "unexpected", tensor_shapes), _ignored(model, "missing")
    stored = defaultdict(list)
    for name in tensor_shapes:
        stored[new.get(name, name)].append(name)
    lacking = _without_tied({n for n in model_shapes if n not in stored}, ties, both_ways=False)
    return ModelMismatch(
        missing=sorted(n for n in lacking if not may_lack(n)),
        unexpected=[
            n for k, ns in stored.items() for n in (ns[1:] if k in model_shapes else ns) if not skipped(k)
        ],
        shapes=[
            (ns[0], tensor_shapes[ns[0]], model_shapes[k])
            for k, ns in stored.items()
            if k in model_shapes and tensor_shapes[ns[0]] != model_shapes[k]
        ],
        ties=[(stored[a][0], stored[b][0]) for a, b in ties if a in stored and b in stored],
    )


def kept_in_float32(model: Any, dtype: str) -> set[str]:
    """Return the parameters that `from_pretrained` loads in float32 though the model is asked for in a dtype.

    They are those of the modules that the class lists, and what it creates in float32 whatever the default
    (`_get_dtype_plan` and `convert_and_load_state_dict_in_model` of transformers 5).

    Args:
        model: On the meta device, built in bfloat16.
        dtype: ``bfloat16`` or ``float16``.
    """
    import torch

    patterns = transformers_private.kept_in_float32(model, strictly=True)
    if dtype == "float16":
        patterns += transformers_private.kept_in_float32(model, strictly=False)
    listed = [re.compile(p.replace("*", ".*")) for p in patterns]
    return {
        name
        for name, tensor in model.state_dict().items()
        if hasattr(tensor, "dtype")
        and tensor.is_floating_point()
        and (tensor.dtype != torch.bfloat16 or any(p.search(name) for p in listed))
    }


def written_tensors(model: Any) -> dict[str, Any]:
    """Return the model's tensors that `save_pretrained` writes: of tied ones, one."""
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    left_out = transformers_private.left_out_on_save(model)
    state = {n: t for n, t in model.state_dict().items() if hasattr(t, "shape") and n not in left_out}
    try:
        written: dict[str, Any] = modeling.remove_tied_weights_from_state_dict(dict(state), model)
    except Exception:  # tensors share values in a way that transformers does not save
        return state
    return written


def _prefixes(
    tensor_names: Collection[str], ignored: Callable[[str], bool], *worlds: tuple[Set[str], Set[str]]
) -> list[str]:
    """Return the prefixes below which names are exactly those of one world; "" where all names are.

    Args:
        tensor_names: The names.
        ignored: Whether the model has no use for a name.
        worlds: (all names, those of them that must be there), of the files and of the model.

    >>> world = {"model.norm.w", "head.w"}, {"model.norm.w"}
    >>> _prefixes(["net.model.model.norm.w"], lambda name: False, world)
    ['net.model.']
    >>> _prefixes(["a.model.norm.w", "a.head.w", "value.w", "b.model.norm.w"], lambda name: False, world)
    ['a.', 'b.']
    """
    below: defaultdict[str, set[str]] = defaultdict(set)
    least = min((len(must) for _, must in worlds), default=0)
    for name in tensor_names:
        start = 0
        for _ in range(_MOST_WRAPPERS + 1):
            below[name[:start]].add(name[start:])
            start = name.find(".", start) + 1
            if not start:
                break
    exact = []
    for prefix, names in below.items():
        if len(names) >= least and any(
            must and must <= names and all(map(ignored, names - all_names)) for all_names, must in worlds
        ):
            exact.append(prefix)
    return sorted(exact, key=lambda prefix: (prefix.count("."), prefix))


def _ties(model: Any, model_shapes: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return (name, name that shares its values) of the parameters that the config ties."""
    keys = getattr(model, "all_tied_weights_keys", None)
    if isinstance(keys, dict):  # transformers 5: already resolved for this config
        return [(a, b) for a, b in keys.items() if a in model_shapes and b in model_shapes]
    if not getattr(model.config, "tie_word_embeddings", False):
        return []
    shared = transformers_private.tied_parameters(model)
    if isinstance(shared, dict):
        return [(a, b) for a, b in shared.items() if a in model_shapes and b in model_shapes]
    embedding = next((n for n in model_shapes if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
    return [(a, embedding) for a in shared if embedding and a in model_shapes]


def _without_tied(lacking: set[str], ties: Sequence[tuple[str, str]], *, both_ways: bool) -> set[str]:
    """Return the missing names that no tie gives a value.

    both_ways: whether any name of a tie may have the value.
    """
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for name, stored_name in ties:
        groups[stored_name].add(name)
    left = set(lacking)
    for stored_name, names in groups.items():
        if stored_name not in lacking or (both_ways and names - lacking):
            left -= {stored_name, *names}
    return left


def _ignored(model: Any, kind: str, export_names: Iterable[str] = ()) -> Callable[[str], bool]:
    """Return whether transformers ignores a ``missing`` or ``unexpected`` name of this class.

    A layer behind the others is one of multi-token prediction if it joins two inputs (``eh_proj``, which is
    every one's name of it); without that it is a layer that the config does not count.

    export_names: names of the export, where unexpected ones are ignored.
    """
    patterns = transformers_private.ignored_on_load(model, kind)
    if kind == "unexpected":
        # Two buffers that were persistent once, as in `_adjust_missing_and_unexpected_keys`.
        once = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
        buffers = [n for n, _ in model.named_buffers()]
        patterns += [p for end, p in once.items() if any(n.endswith(end) for n in buffers)]
        patterns += _prediction_layers(model.config)
    compiled = [re.compile(p) for p in patterns]
    predicting = {int(layer[1]) for name in export_names if (layer := _JOINED.search(name))}
    layers = getattr(model.config, "num_hidden_layers", None)

    def ignored(name: str) -> bool:
        layer = _LAYER.match(name)
        if layer and type(layers) is int and int(layer[1]) >= layers and int(layer[1]) not in predicting:
            return False
        return any(p.search(name) for p in compiled)

    return ignored


def _prediction_layers(config: Any) -> list[str]:
    """Return patterns of the layers of multi-token prediction, which transformers lacks.

    The hub numbers them after the other layers. Transformers' classes ignore the numbers of published models
    only; the config has their count.
    """
    layer_count = getattr(config, "num_nextn_predict_layers", None)
    if type(layer_count) is not int or not 0 < layer_count < 64:
        return []
    return [rf"^model\.layers\.{config.num_hidden_layers + n}\." for n in range(layer_count)]


def _by_group(routes: Mapping[str, _Route]) -> defaultdict[str, list[str]]:
    names_of_group: defaultdict[str, list[str]] = defaultdict(list)
    for name, route in routes.items():
        names_of_group[route.group].append(name)
    return names_of_group


def _is_listed(route: _Route) -> bool:
    """Return whether the tensor is one of a numbered list that becomes one parameter."""
    return route.pattern is not None and "*" in route.pattern


def _list_numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers that distinguish names, ascending; empty if names differ elsewhere, or twice.

    >>> [_list_numbers(n) for n in (["a.0.b.2.w", "a.0.b.10.w"], ["a.0.w"], ["a.0.w", "b.0.w"])]
    [[2, 10], [0], []]
    """
    if len(names) == 1:
        return [0]
    parts = [_DIGITS.split(n) for n in names]
    if len({len(p) for p in parts}) > 1:
        return []
    places = [k for k, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1]
    if len(places) != 1 or places[0] % 2 == 0:
        return []
    return sorted(int(p[places[0]]) for p in parts)


def _last_line(text: str) -> str:
    """Return the last lines of transformers' report, without its traceback."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " ".join(lines[-2:])
