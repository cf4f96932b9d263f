"""Lay out a universal checkpoint folder, which DeepSpeed loads on any number of ranks.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, ``zero/optimizer_state.pt``, one model-state file and
``latest_universal``. What DeepSpeed 0.19.8 loads of them, for stages up to 2 (runtime/base_optimizer.py,
checkpoint/universal_checkpoint.py) and for stage 3 (runtime/zero/stage3.py):

| file | stages up to 2 | stage 3 |
|---|---|---|
| model states | ``mp_rank_00``: counters, scheduler, client state | ``zero_pp_rank_0_mp_rank_00``: same |
| ``zero/<parameter>/`` | all files: ``{"param": tensor, "cat_dim": 0}``, a bare step | three, flat |
| ``optimizer_state.pt`` | ``param_groups`` in their order, the loss scale | one group, one step |

It loads no weight of the model-state file: frozen parameters and buffers are there for other readers.
``latest_universal`` holds ``.``, so that the folder itself can be given to `load_checkpoint`.

``module.<parameter>`` is what the optimizer updates: the float32 master where a source has one, else its
weight. ``optimizer.state.<parameter>.<state>`` are its moments and step, and ``lp/<parameter>`` is the weight
of the model where a master is stored beside it. Everything else keeps its name, and becomes client state.
Trainers call a state ``optim.state.<parameter>.exp_avg`` or ``optimizer.state.exp_avg.<parameter>``.

A parameter is trained if the optimizer has state for it. DeepSpeed loads what it finds, and asks for little:
what it would load wrongly, or not at all, is an error here.

Parameter groups come from the objects of any checkpoint:

| objects | writer |
|---|---|
| ``optimizer.param_groups`` | DeepSpeed, `torch.save` |
| ``optim.param_groups.<i>``, ``optim.param_groups.<i>.<option>`` | torch's DCP, OLMo-core |
| ``optim.param_groups.<parameter>.<option>`` | flattened optimizer state of torch's DCP, torchtitan |
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.object_tree import Named, TensorRef, decode, tensors_in
from ckptcore.core.tree_paths import Path
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.encodings.torchzip import writer as write
from ckptcore.errors import NameMismatch, UnsupportedDtype, UnsupportedFormat
from ckptcore.formats.base import Arrangement, FileLayout, Literal, natural
from ckptcore.formats.common.optimizer_numbers import is_opaque, join_equal_groups
from ckptcore.formats.common.torch_file import Inline, torch_file
from ckptcore.formats.common.trees import built
from ckptcore.formats.deepspeed.file_names import NAME
from ckptcore.formats.deepspeed.optimizer_states import MASTER, STATE
from ckptcore.formats.deepspeed.reader import LAYOUT_KEYS, LOW_PRECISION, MODEL
from ckptcore.naming.model_part import find_model
from ckptcore.naming.rename import ModelPart, strip_wrappers
from ckptcore.utils.foreign_text import is_number
from ckptcore.utils.text import count, short_repr

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"
# What Megatron-Core's distributed optimizer calls the float32 copy of a parameter.
_OF_MEGATRON = frozenset({"param", "fp32_param"})
_SURE = frozenset({*MOMENTS, STEP, MASTER})  # a state by this key alone, if ``state`` comes before it
_KEY = re.compile(r"[A-Za-z0-9_]+")
_CONVERT = "make it with the DeepSpeed that wrote the save (python -m deepspeed.checkpoint.ds_to_universal)"
SCHEDULER = "lr_scheduler"
_OPTIMIZER = "optimizer."
_PART = "param_groups"
_NAMES = ("param_names", "_param_names")
_OF_PARAMETERS = frozenset({"params", *_NAMES})
LATEST = "latest_universal"
_STATES = "zero/optimizer_state.pt"
_MODEL_FILE = {2: "mp_rank_00_model_states.pt", 3: "zero_pp_rank_0_mp_rank_00_model_states.pt"}
# The release whose loaders were tried. They refuse an optimizer's file that names none.
_VERSION = "0.19.8"
# What other trainers call the number of optimizer steps; the first that is there counts.
_COUNTERS = (
    "global_steps",
    "global_step",
    "iteration",
    "step",
    "train.global_step",
    "train_state.step",
    "trainer.global_step",
)
_SCALERS = frozenset(
    f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")
)
_EXACT = 1 << 24  # up to here float32 has every integer
# Values of an optimizer's file that are written from the contents.
_OF_STATES = frozenset({"state", "optimizer_state_dict", "zero_stage", "ds_version"})


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


@dataclass(frozen=True, slots=True)
class TrainedParameter:
    """A parameter that the optimizer has state for.

    Attributes:
        shape: Its shape.
        states: State -> position of its tensor in the request, ``fp32`` first.
        step: The step count where the source keeps it as a number; None where it is one of the tensors.
    """

    shape: tuple[int, ...]
    states: Mapping[str, int]
    step: float | None = None


@dataclass(frozen=True, slots=True)
class UniversalContents:
    """What goes into a folder.

    Attributes:
        parameters: The trained ones, by name.
        groups: At least one, with the names of its trained parameters.
        module: Name in the module -> name of its tensor: weights as stored beside a master, frozen
            parameters, and buffers.
        module_objects: Name in the module -> a value that is no tensor.
        states: Values of the optimizer beside its parameter groups.
        client: Key -> value of the trainer's own state.
        loose: Names of tensors that are neither weights nor states: client state, too.
        scheduler: State of the learning rate scheduler, or None.
    """

    parameters: Mapping[str, TrainedParameter]
    groups: Sequence[ParameterGroup]
    module: Mapping[str, str]
    module_objects: Mapping[str, Any]
    states: Mapping[str, Any]
    client: Mapping[str, Any]
    loose: Sequence[str]
    scheduler: Any


def universal_contents(request: Arrangement) -> UniversalContents:
    """Return what goes into the folder of a request.

    Raises:
        UnsupportedFormat: The optimizer, or a part of it, is missing or has no place.
        UnsupportedDtype: A master or moment is not float32.
    """
    tensors = _Tensors(request.tensors)
    objects = {key: decode(form) for key, form in request.objects.items()}
    if not tensors.moments:
        raise UnsupportedFormat(
            "cannot write a universal folder: the source has no optimizer state by parameter (no tensor is "
            "called optimizer.state.<parameter>.exp_avg, or as other trainers call it)",
            hint="write the model alone: ckptcore export SRC DST",
        )
    raw = collect_groups({k: v for k, v in objects.items() if is_group_part(k)}, tensors.parameter)
    groups = _with_parameters(raw, sorted(tensors.moments, key=natural))
    steps = _numbers(objects, groups)
    parameters = {
        name: tensors.trained(name, steps.get(name)) for name in sorted(tensors.moments, key=natural)
    }
    _require_alike(parameters)
    module = {**{n: f"{MODEL}{n}" for n in tensors.masters if n not in parameters}, **tensors.low}
    inside = {name for value in objects.values() for name in tensors_in(value)}
    sorted_objects = _ObjectKinds(objects, request)
    return UniversalContents(
        parameters,
        groups,
        module,
        sorted_objects.module,
        sorted_objects.states,
        sorted_objects.client,
        [name for name in tensors.loose if name not in inside],
        sorted_objects.scheduler,
    )


class _Tensors:
    """The tensors of a request by what they are.

    Attributes:
        masters: Name in the module -> position: of trained parameters, frozen ones and buffers.
        low: Name in the module -> name of the weight that is stored beside its master.
        moments: Parameter -> state -> position.
        loose: Names of all others.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self.masters: dict[str, int] = {}
        self.low: dict[str, str] = {}
        self.moments: dict[str, dict[str, int]] = {}
        self.loose: list[str] = []
        for i, spec in enumerate(specs):
            name, state = spec.fqn, state_of(spec.fqn)
            if state is not None:
                self.moments.setdefault(state[0], {})[state[1]] = i
            elif name.startswith(MODEL):
                self.masters[name[len(MODEL) :]] = i
            elif name.startswith(LOW_PRECISION):
                self.low[name[len(LOW_PRECISION) :]] = name
            else:
                self.loose.append(name)

    def parameter(self, name: str) -> str | None:
        """Return the trained parameter that a group calls so: by its name, or one with more in front."""
        parts = strip_wrappers(name).split(".")
        suffixes = (".".join(parts[n:]) for n in range(len(parts)))
        return name if name in self.moments else next((n for n in suffixes if n in self.moments), None)

    def trained(self, name: str, step: float | None) -> TrainedParameter:
        """Return a trained parameter whose master and moments are there, and fit each other."""
        states = self.moments[name]
        if name not in self.masters:
            raise UnsupportedFormat(
                f"cannot write a universal folder: the optimizer has state of {name}, and no weight has this "
                "name" + (" (it is a number: nothing names the parameter)" if name.isdigit() else ""),
                hint="look at the names with ckptcore inspect SRC --tensors, and rename with --rename",
                name=name,
            )
        missing = [key for key in MOMENTS if key not in states]
        if missing:
            raise UnsupportedFormat(
                f"cannot write a universal folder: the optimizer has {', '.join(sorted(states))} of {name}, "
                f"and not {' and '.join(missing)}, which DeepSpeed loads",
                hint="write DCP: ckptcore reshard SRC DST --mesh fsdp=N; or the model: ckptcore export",
                name=name,
            )
        if STEP not in states and step is None:
            raise UnsupportedFormat(
                f"cannot write a universal folder: nothing has the step count of {name}, without which "
                "moments mean something else",
                hint="write DCP: ckptcore reshard SRC DST --mesh fsdp=N",
                name=name,
            )
        master = self._specs[self.masters[name]]
        rows = {MASTER: self.masters[name], **{k: states[k] for k in sorted(states)}}
        for key, position in rows.items():
            self._require_fits(self._specs[position], master, key)
        self._require_apart(name, master)
        return TrainedParameter(master.shape, rows, None if STEP in states else step)

    def _require_fits(self, spec: TensorSpec, master: TensorSpec, key: str) -> None:
        if key != STEP and spec.dtype != "float32":
            raise UnsupportedDtype(
                f"cannot write {spec.fqn} as {key}: DeepSpeed's masters and moments are float32 "
                f"(got {spec.dtype})",
                hint="cast with --dtype fp32: every value of bfloat16 and float16 is one of float32",
                fqn=spec.fqn,
                dtype=spec.dtype,
            )
        if spec.shape != (() if key == STEP else master.shape):
            raise UnsupportedFormat(
                f"cannot write {spec.fqn} as {key}: DeepSpeed cuts states like their parameter "
                f"{list(master.shape)} (got shape {list(spec.shape)})",
                hint=f"leave it out, if the engine makes its own: --exclude '{spec.fqn}'",
                name=spec.fqn,
            )

    def _require_apart(self, name: str, master: TensorSpec) -> None:
        low = self.low.get(name)
        weight = next((s for s in self._specs if s.fqn == low), None) if low is not None else None
        if weight is not None and weight.dtype == master.dtype:
            raise UnsupportedFormat(
                f"cannot write two copies of {name}, both {master.dtype}: a universal folder has a master "
                "and a weight of lower precision",
                hint="leave one out with --exclude",
                name=name,
            )


class _ObjectKinds:
    """The objects of a request by where they go; attributes as of `UniversalContents`."""

    def __init__(self, objects: Mapping[str, Any], request: Arrangement) -> None:
        self.module: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.client: dict[str, Any] = {}
        schedule: dict[str, Any] = {}
        for key, value in objects.items():
            state = state_of(key)
            if is_group_part(key) or (state is not None and state[1] == STEP):
                continue
            _require_pickled(key, value)
            rest = key.removeprefix(_OPTIMIZER)
            if key.startswith(MODEL):
                self.module[key[len(MODEL) :]] = value
            elif key == SCHEDULER or key.startswith(f"{SCHEDULER}."):
                schedule[key] = value
            elif rest != key and "." not in rest and not tensors_in(value):
                self.states[rest] = value
            elif key in LAYOUT_KEYS:
                raise UnsupportedFormat(
                    f"cannot write {key} as client state: DeepSpeed keeps something else under this key",
                    hint=f"leave it out: --exclude '{key}'",
                    name=key,
                )
            else:
                self.client[key] = value
        rows = ((k, request.paths.get(k, tuple(k.split("."))), v) for k, v in schedule.items())
        self.scheduler = built(rows).get(SCHEDULER)


def _require_pickled(key: str, value: Any) -> None:
    """Raise `UnsupportedFormat` for a value that has no pickled form."""
    try:
        write.Pickled(
            lambda fqn: ("0", TensorSpec(fqn, "float32", ())), classes=write.Classes.TRAINERS
        ).value(value)
    except TypeError as error:
        raise UnsupportedFormat(
            f"cannot write {key} as client state: {error}", hint=f"leave it out: --exclude '{key}'", name=key
        ) from error


def _with_parameters(groups: Sequence[ParameterGroup], trained: Sequence[str]) -> tuple[ParameterGroup, ...]:
    """Return groups that name their parameters; raise where one names none, or one without state."""
    if not groups:
        return (ParameterGroup({}, tuple(trained)),)
    if len(groups) == 1 and groups[0].parameters is None:
        return (ParameterGroup(groups[0].options, tuple(trained)),)
    named: list[tuple[str, ...]] = []
    for n, group in enumerate(groups):
        if group.parameters is None:
            raise UnsupportedFormat(
                f"cannot write {count(len(groups), 'parameter group')}: nothing names the parameters of "
                f"group {n}",
                hint="save the optimizer by name (torch's get_optimizer_state_dict), or write DCP",
            )
        named.append(group.parameters)
    trained_names = set(trained)
    for n, names in enumerate(named):
        for name in names:
            if name not in trained_names:
                raise UnsupportedFormat(
                    f"cannot write a universal folder: parameter group {n} has {name}, and the source has no "
                    "moments of it",
                    hint="save after a step in which every parameter of the optimizer had a gradient",
                    name=name,
                )
    return tuple(groups)


def _numbers(objects: Mapping[str, Any], groups: Sequence[ParameterGroup]) -> dict[str, float]:
    """Return parameter -> step count, for counts that are numbers: of its own, or of its group."""
    steps: dict[str, float] = {}
    for group in groups:
        step = group.options.get(STEP)
        if isinstance(step, (int, float)):
            steps |= {name: float(step) for name in group.parameters or ()}
    for key, value in objects.items():
        state = state_of(key)
        if state is not None and state[1] == STEP and isinstance(value, (int, float)):
            steps[state[0]] = float(value)
    return steps


def _require_alike(parameters: Mapping[str, TrainedParameter]) -> None:
    """Raise `UnsupportedFormat` where parameters have different states: DeepSpeed keeps them flat."""
    first = next(iter(parameters))
    keys = parameters[first].states.keys() - {STEP}
    for name, parameter in parameters.items():
        if parameter.states.keys() - {STEP} != keys:
            got, expected = (
                ", ".join(sorted(k)) for k in (parameter.states.keys(), parameters[first].states.keys())
            )
            raise UnsupportedFormat(
                f"cannot write a universal folder: {name} has the states {got}, and {first} has {expected}",
                hint="leave out what only some have, with --exclude",
                name=name,
            )


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """A parameter group.

    Attributes:
        options: Learning rate, betas and so on.
        parameters: Its parameters by name, or None where the source does not name them.
    """

    options: Mapping[str, Any]
    parameters: tuple[str, ...] | None


def is_group_part(name: str) -> bool:
    """Return whether an object is a part of parameter groups."""
    return _PART in name.split(".")


def collect_groups(
    objects: Mapping[str, Any], parameter: Callable[[str], str | None]
) -> tuple[ParameterGroup, ...]:
    """Return the groups of the only optimizer; empty if nothing describes any.

    Args:
        objects: Name -> value of the objects for which `is_group_part` holds.
        parameter: Maps the name that an optimizer uses to that of the parameter, or None.

    Raises:
        UnsupportedFormat: There are groups of several optimizers, or a group is no plain values.
    """
    roots: dict[str, dict[str, Any]] = {}
    for name, value in objects.items():
        parts = name.split(".")
        position = parts.index(_PART)
        roots.setdefault(".".join(parts[: position + 1]), {})[".".join(parts[position + 1 :])] = value
    if len(roots) > 1:
        raise UnsupportedFormat(
            f"cannot write the parameter groups of {len(roots)} optimizers ({', '.join(sorted(roots))}): a "
            "universal folder holds one",
            hint=f"leave the others out, for example --exclude '{max(roots)}*'",
        )
    for root, values in roots.items():
        return tuple(_group(root, n, group, parameter) for n, group in enumerate(_raw_groups(values)))
    return ()


def _raw_groups(values: Mapping[str, Any]) -> list[Any]:
    """Return the raw groups, whatever form they are stored in."""
    if "" in values:
        groups = values[""]
        return list(groups) if isinstance(groups, (list, tuple)) else [groups]
    numbered: dict[int, dict[str, Any]] = {}
    by_parameter: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        number, _, option = name.partition(".")
        if is_number(number) and len(number) < 8 and (option or isinstance(value, dict)):
            numbered.setdefault(int(number), {}).update({option: value} if option else value)
        else:
            fqn, _, option = name.rpartition(".")
            by_parameter.setdefault(fqn, {})[option] = value
    if numbered and not by_parameter:
        return [numbered[n] for n in sorted(numbered)]
    return join_equal_groups(dict(sorted(by_parameter.items())))


def _group(root: str, number: int, group: Any, parameter: Callable[[str], str | None]) -> ParameterGroup:
    if not isinstance(group, dict) or any(type(k) is not str for k in group):
        raise UnsupportedFormat(
            f"cannot read parameter group {number} of {root}: it must be a dict with text as keys "
            f"(got {short_repr(group, 60)})",
            hint=f"leave the groups out with --exclude '{root}*': the engine's own options then stay",
        )
    options = {k: v for k, v in group.items() if k not in _OF_PARAMETERS}
    for key, value in options.items():
        if is_opaque(value):
            raise UnsupportedFormat(
                f"cannot write {key} of parameter group {number} of {root}: it is no plain value",
                hint=f"leave the groups out with --exclude '{root}*': the engine's own options then stay",
            )
    names = next((group[k] for k in (*_NAMES, "params") if _all_text(group.get(k))), None)
    return ParameterGroup(options, None if names is None else tuple(parameter(n) or n for n in names))


def _all_text(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(v) is str for v in value)


def arrange(request: Arrangement, stage: int) -> Iterator[FileLayout]:
    """Lay out the folder that ZeRO-3 loads, or (2) that ZeRO 1, ZeRO 2 and BF16_Optimizer load.

    Raises:
        UnsupportedFormat: As `universal_contents` does, and for what ZeRO-3 would load wrongly.
    """
    contents = universal_contents(request)
    if stage == 3:
        _require_of_stage3(contents)
    tensors: Sequence[TensorSpec] = request.tensors
    if stage == 3:
        tensors = [TensorSpec(t.fqn, t.dtype, (prod(t.shape),)) for t in tensors]
    for name, parameter in contents.parameters.items():
        _require_folder_name(name)
        for key, position in parameter.states.items():
            ref = TensorRef(request.tensors[position].fqn)
            path = f"zero/{name}/{key}.pt"
            if key == STEP:
                yield torch_file(path, ref, request.tensors, [position])
            else:
                tree = ref if stage == 3 else {"param": ref, "cat_dim": 0}
                yield torch_file(path, tree, tensors, [position])
        if parameter.step is not None:
            ref, inline = _number(parameter.step)
            yield torch_file(f"zero/{name}/{STEP}.pt", ref, request.tensors, [], inline=inline)
    yield _states_file(request, contents, stage)
    yield _model_file(request, contents, stage)
    yield FileLayout(LATEST, 1, (), (), (Literal(0, b"."),), commit=True)


def _require_of_stage3(contents: UniversalContents) -> None:
    """Raise `UnsupportedFormat` for what DeepSpeed's ZeRO-3 leaves out of a universal folder silently."""
    options = [repr(sorted(group.options.items())) for group in contents.groups]
    if len(set(options)) > 1:
        differing = sorted(
            {
                key
                for group in contents.groups
                for key, value in group.options.items()
                if contents.groups[0].options.get(key) != value
            }
        )
        raise UnsupportedFormat(
            f"cannot write {count(len(options), 'parameter group')} for ZeRO-3: DeepSpeed gives every group "
            f"the options of the first (they differ in {', '.join(differing)})",
            hint="load it with ZeRO 1 or 2 (--to deepspeed_universal), whose groups keep their options",
        )
    counts = sorted({p.step for p in contents.parameters.values() if p.step is not None})
    if len(counts) > 1:
        raise UnsupportedFormat(
            f"cannot write step counts from {counts[0]:g} to {counts[-1]:g} for ZeRO-3: DeepSpeed gives "
            "every parameter that of the first",
            hint="write DCP, whose optimizers keep one count each: ckptcore reshard SRC DST --mesh fsdp=N",
        )
    states = next(iter(contents.parameters.values())).states
    extra = sorted(states.keys() - {MASTER, STEP, *MOMENTS})
    if extra:
        raise UnsupportedFormat(
            f"cannot write {', '.join(extra)} for ZeRO-3: DeepSpeed loads {' and '.join(MOMENTS)} alone",
            hint=f"leave it out, if the engine makes its own: --exclude '*.{extra[0]}'",
        )


def _require_folder_name(name: str) -> None:
    parts = name.split("/")
    # A lone surrogate is no text, and a folder like `fp32.pt` is in the way of a state's file.
    odd = any(p in ("", ".", "..") or p.endswith(".pt") for p in parts) or "\\" in name or "\0" in name
    if odd or len(name.encode(errors="surrogatepass")) > 240 or any("\ud800" <= c <= "\udfff" for c in name):
        raise NameMismatch(
            f"cannot write {short_repr(name, 80)}: a universal folder has a folder of each parameter's name",
            hint="rename it with --rename",
        )


def _states_file(request: Arrangement, contents: UniversalContents, stage: int) -> FileLayout:
    """Lay out ``zero/optimizer_state.pt``: the state of the optimizer as one rank has it, without tensors."""
    groups = [{**g.options, "params": list(g.parameters or ())} for g in contents.groups]
    tree: dict[str, Any] = {k: _scaler(v) for k, v in contents.states.items() if k not in _OF_STATES}
    tree |= {"zero_stage": stage, "ds_version": contents.states.get("ds_version") or _VERSION}
    if stage < 3:
        return torch_file(
            _STATES, {**tree, "param_groups": groups}, request.tensors, [], classes=Classes.TRAINERS
        )
    first = next(iter(contents.parameters.values()))
    ref, inline, order = TensorRef(""), dict[str, Inline](), list[int]()
    if first.step is None:
        order = [first.states[STEP]]
        ref = TensorRef(request.tensors[order[0]].fqn)
    else:
        ref, inline = _number(first.step)
    tree["optimizer_state_dict"] = {"state": {0: {STEP: ref}}, "param_groups": groups}
    return torch_file(_STATES, tree, request.tensors, order, classes=Classes.TRAINERS, inline=inline)


def _model_file(request: Arrangement, contents: UniversalContents, stage: int) -> FileLayout:
    """Lay out the model-state file of the only rank: what DeepSpeed loads beside ``zero/``."""
    position = {t.fqn: i for i, t in enumerate(request.tensors)}
    client = dict(contents.client)
    module: OrderedDict[str, Any] = OrderedDict()
    for name in sorted({*contents.module, *contents.module_objects}, key=natural):
        stored = contents.module.get(name)
        module[name] = contents.module_objects[name] if stored is None else TensorRef(stored)
    listed = [list(group.parameters or ()) for group in contents.groups]
    grouped_names = {name for names in listed for name in names}
    # Tied to a parameter of another name: a reader of DeepSpeed's own folders gives them its states.
    listed[0] += [name for name in contents.parameters if name not in grouped_names]
    shapes = [
        OrderedDict((name, Named("size", list(contents.parameters[name].shape))) for name in names)
        for names in listed
    ]
    ours = "ds_version" in client
    tree: dict[str, Any] = {
        "module": module,
        "buffer_names": [],  # nothing tells buffers from frozen parameters
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        SCHEDULER: contents.scheduler,
        "data_sampler": client.pop("data_sampler", None),
        "random_ltd": client.pop("random_ltd", None),
        "sparse_tensor_module_names": client.pop("sparse_tensor_module_names", []),
        "skipped_steps": client.pop("skipped_steps", 0),
        "global_steps": _global_steps(client),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": client.pop("ds_config", {"zero_optimization": {"stage": stage}}),
        "ds_version": client.pop("ds_version", _VERSION),
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    client.pop("global_steps", None)
    tree |= client
    tree |= {name: TensorRef(name) for name in contents.loose}
    order = sorted(
        {position[name] for name in tensors_in(tree)}, key=lambda i: natural(request.tensors[i].fqn)
    )
    classes = Classes.TRAINERS if ours else Classes.LIBRARIES
    return torch_file(_MODEL_FILE[stage], tree, request.tensors, order, classes=classes)


def _global_steps(client: Mapping[str, Any]) -> int:
    """Return the number of optimizer steps that the trainer counted; 0 where it kept none."""
    counts = (client[key] for key in _COUNTERS if type(client.get(key)) is int)
    return next(counts, 0)


def _scaler(value: Any) -> Any:
    """Return the loss scaler as an instance of its class, which DeepSpeed sets as its own."""
    if isinstance(value, dict) and value.get("class") in _SCALERS:
        return Named("record", [value["class"], {k: v for k, v in value.items() if k != "class"}])
    return value


def _number(step: float) -> tuple[TensorRef, dict[str, Inline]]:
    """Return a step count as torch's optimizers keep it: a float32 tensor without dims."""
    name = "\0step"  # no tensor has such a name
    if not float(step).is_integer() or abs(step) > _EXACT:
        raise UnsupportedFormat(
            f"cannot write a step count of {step}: torch's optimizers keep it in float32, which has none",
            hint="leave the optimizer out: --exclude 'optimizer*'",
        )
    return TensorRef(name), {name: (TensorSpec(name, "float32", ()), struct.pack("<f", step))}
