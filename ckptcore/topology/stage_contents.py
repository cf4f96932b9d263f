"""Say which layers and other parameters each rank of the pp axis has, for people who check a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptcore.topology.layout import Topology

_NUMBER = re.compile(r"\.(\d{1,6})\.")


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
