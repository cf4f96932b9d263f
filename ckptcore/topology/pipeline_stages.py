"""Place parameters on the ranks of the pp and ep axes, by the numbers in their names.

Stage s is on rank s % pp, like in interleaved schedules (Megatron-Core:
transformer/transformer_layer.py, `get_transformer_layer_offset`; torchtitan:
distributed/pipeline_parallel.py). Layers are split evenly; where they do not divide, the first stages
have one more. Embeddings and head may count as layers, as they do for torchtitan
(`generate_llm_fqn_per_model_part`) and on request for Megatron-Core. The experts
of a rank of the ep axis are neighbours: E / ep of them, numbered like Megatron-Core's and torchtitan's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptcore.errors import UsageError
from ckptcore.topology.layout import Topology
from ckptcore.topology.rules import ShardingRules, Stages
from ckptcore.utils.globs import matches
from ckptcore.utils.text import short_repr, some

NUMBER = "{n}"
_NUMBER = re.compile(r"\.(\d{1,6})\.")  # of a layer, in a name


def place_stages(
    shapes: Mapping[str, tuple[int, ...]], stages: Stages, pp: int
) -> dict[str, tuple[int, ...] | None]:
    """Return the coordinates on the pp axis of each parameter.

    Args:
        shapes: Shapes of the parameters, by name.
        stages: Rules that assign parameters to stages.
        pp: Size of the pp axis.

    Returns:
        Name -> coordinates that have it; None for stacked layers, which pp cuts. Parameters that all stages
        have are omitted.

    Raises:
        UsageError: There are more stages than layers, stacked layers do not divide, the split is invalid, or
            a name has no stage.
    """
    last = pp * stages.virtual - 1
    stacked = {n for n, shape in shapes.items() if shape and matches(n, stages.stacked)}
    layer = number_of(shapes, stages.layers)
    # Megatron puts a copy of a tied embedding on the last stage, which has no head then.
    tied = stages.tied if not any(matches(n, stages.head) for n in shapes) else ()
    count = max([0, *(n + 1 for n in layer.values()), *(shapes[n][0] for n in stacked)])
    if stacked and (stages.split is not None or stages.virtual > 1):
        raise UsageError(
            f"cannot split layers in one tensor unevenly: {some(sorted(stacked))}",
            hint="split and virtual are for layers by name",
        )
    if not count:
        globs = [*stages.layers, *stages.stacked]
        raise UsageError(
            f"cannot cut {len(shapes)} parameters into {pp} pipeline stages: [stages] layers, "
            f"{some(globs) if globs else 'absent'}, matches none of {some(sorted(shapes))}",
            hint='write how the name of a layer\'s parameter begins, as in layers = "model.layers.{n}."',
        )
    stage_of = _stage_of_layer(count, last + 1, stages, pp)
    for name in sorted(stacked):  # torch.chunk would leave the last stages without a layer
        n = shapes[name][0]
        if n % pp:
            raise UsageError(
                f"{short_repr(name)}: layers in one tensor must be a multiple of pp={pp} (got {n})",
                hint=f"use a pp that divides {n}; Megatron-Core's loader reads any cut, so that jobs with "
                "uneven stages load it, too",
            )
    coordinates: dict[str, tuple[int, ...] | None] = {}
    for name in shapes:
        if matches(name, stages.first):
            where = {0, last} if matches(name, tied) else {0}
        elif matches(name, stages.last):
            where = {last}
        elif name in layer:
            where = {stage_of[layer[name]]}
        elif name in stacked:
            where = set()
        else:
            continue
        # Virtual stages are dealt out in turn: with pp=2, stages 0 and 2 are on the first rank.
        coordinates[name] = tuple(sorted({s % pp for s in where})) or None
    lost = [n for n in shapes if n not in coordinates and not matches(n, stages.every)]
    if lost:
        raise UsageError(
            f"no pipeline stage for {some(lost)}",
            hint="name them in [stages] of --sharding, under first, last or every",
        )
    return coordinates


def place_experts(shapes: Mapping[str, tuple[int, ...]], rules: ShardingRules, ep: int) -> dict[str, int]:
    """Return the coordinate on the ep axis of each parameter of one expert.

    Raises:
        UsageError: There are no experts, in tensors of their own or stacked, or their number is not a
            multiple of ``ep``.
    """
    templates = [pattern(t) for t in rules.experts]
    number: dict[str, tuple[str, int]] = {}  # (text before the number, the number)
    count: dict[str, int] = {}
    for name in shapes:
        match = next((m for t in templates if (m := t.match(name))), None)
        if match:
            group = name[: match.start("n")]
            number[name] = group, int(match["n"])
            count[group] = max(count.get(group, 0), int(match["n"]) + 1)
    for name, shape in shapes.items():
        rule = rules.find(name)
        if (
            name not in number
            and rule is not None
            and rule.ep is not None
            and -len(shape) <= rule.ep < len(shape)
        ):
            count[name] = shape[rule.ep]
    if not count:
        raise UsageError(f"ep={ep} needs experts, and no parameter is one", hint="leave ep out of --mesh")
    for name, n in count.items():
        if n % ep:
            raise UsageError(
                f"{short_repr(name)}: the number of experts must be a multiple of ep={ep} (got {n})",
                hint=f"a size that divides {n}",
            )
    return {name: n * ep // count[group] for name, (group, n) in number.items()}


@dataclass(frozen=True, slots=True)
class StageContents:
    """What one rank of the pp axis has.

    Attributes:
        stage: Coordinate on the pp axis; several virtual stages may be on it.
        layers: Numbers of its layers, ascending: the first number in a name, or rows of stacked layers.
        others: Names of its parameters that are in no layer.
    """

    stage: int
    layers: tuple[int, ...]
    others: tuple[str, ...]

    @property
    def ranges(self) -> str:
        """Return the layers as ranges.

        >>> StageContents(0, (0, 1, 2, 6), ()).ranges
        '0-2, 6'
        """
        runs: list[list[int]] = []
        for n in self.layers:
            if runs and n == runs[-1][1] + 1:
                runs[-1][1] = n
            else:
                runs.append([n, n])
        return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in runs)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"stage": self.stage, "layers": list(self.layers), "others": list(self.others)}


def stage_contents(
    topology: Topology, shapes: Mapping[str, tuple[int, ...]], names: Iterable[str]
) -> tuple[StageContents, ...]:
    """Return what each rank of the pp axis has; nothing for a mesh without stages.

    Args:
        topology: The layouts, by names as written.
        shapes: Global shapes, by names as written.
        names: Those of the parameters.
    """
    axis = next((k for k, (name, n) in enumerate(topology.mesh.axes) if name == "pp" and n > 1), None)
    if axis is None:
        return ()
    count = topology.mesh.axes[axis][1]
    layers: list[set[int]] = [set() for _ in range(count)]
    outside_layers: list[set[str]] = [set() for _ in range(count)]
    coordinates = list(topology.mesh.coordinates())
    for name in names:
        layout = topology.layout(name)
        number = _NUMBER.search(name)
        only = dict(layout.coordinates).get("pp")
        stacked = only is None and "pp" in layout.axes
        for rank, box in enumerate(topology.boxes(name, shapes[name])):
            stage = coordinates[rank][axis]
            if box is None:
                continue
            if stacked and box.numel:
                layers[stage].update(range(box.offset[0], box.offset[0] + box.shape[0]))
            elif not stacked and number is not None:
                layers[stage].add(int(number[1]))
            elif not stacked:
                outside_layers[stage].add(name)
    return tuple(
        StageContents(s, tuple(sorted(layers[s])), tuple(sorted(outside_layers[s]))) for s in range(count)
    )


def number_of(names: Iterable[str], templates: Sequence[str]) -> dict[str, int]:
    """Return the number at ``{n}`` of each name that begins like one of the templates.

    >>> number_of(["model.layers.12.mlp.w", "norm.w"], ["*layers.{n}."])
    {'model.layers.12.mlp.w': 12}
    """
    patterns = [pattern(t) for t in templates]
    numbers = {}
    for name in names:
        match = next((m for p in patterns if (m := p.match(name))), None)
        if match:
            numbers[name] = int(match["n"])
    return numbers


def pattern(template: str) -> re.Pattern[str]:
    """Return a template as a regular expression; raises `UsageError` unless it has one ``{n}``."""
    head, mark, tail = template.partition(NUMBER)
    if not mark or NUMBER in tail:
        raise UsageError(f"template must have one {NUMBER} (got {template!r})", hint='as in "layers.{n}."')
    return re.compile(_glob(head) + r"(?P<n>[0-9]{1,6})" + _glob(tail), re.DOTALL)


def _glob(text: str) -> str:
    # The shortest match finds the outermost number.
    return re.escape(text).replace(r"\*", ".*?").replace(r"\?", ".")


def _stage_of_layer(layers: int, stages: int, stage_rules: Stages, pp: int) -> Mapping[int, int]:
    """Return layer -> stage, by the split that is given or evenly by weights."""
    if stages > layers:
        asked = f"pp={pp}" + (f", virtual={stage_rules.virtual}" if stage_rules.virtual > 1 else "")
        raise UsageError(
            f"cannot split {layers} layers into {stages} pipeline stages ({asked})",
            hint="a stage has at least one layer",
        )
    if stage_rules.split is None:
        least, longer_stages = divmod(layers + sum(stage_rules.weights), stages)
        sizes = [least + (s < longer_stages) for s in range(stages)]
        sizes[0] -= stage_rules.weights[0]
        sizes[-1] -= stage_rules.weights[1]
        if min(sizes) < 0:
            raise UsageError(
                f"weights {list(stage_rules.weights)} are more than a stage's share of {layers} layers on "
                f"{stages} stages",
                hint="use smaller weights, or give the split",
            )
        return dict(enumerate(s for s, n in enumerate(sizes) for _ in range(n)))
    flat = [n for part in stage_rules.split for n in part]
    if (
        len(stage_rules.split) != stages
        or flat[0] != 0
        or flat[-1] != layers
        or any(a >= b for a, b in stage_rules.split)
        or flat[1:-1:2] != flat[2::2]
    ):
        parts = [list(p) for p in stage_rules.split]
        raise UsageError(
            f"split must cut {layers} layers into {stages} stages (got {parts})",
            hint="give one [first, last + 1] per stage, without gaps",
        )
    return {n: s for s, (a, b) in enumerate(stage_rules.split) for n in range(a, b)}
