"""Find files of pipeline layers that are missing, misplaced, or of another save.

A pipeline writes ``layer_NN-model_TT-model_states.pt`` for every layer that is a module, and no file for a
function (deepspeed/runtime/pipe/module.py, `save_state_dict`): numbers may have gaps. The names in
``param_shapes`` tell the layers: ``<layer>.<name>``, or ``tied_modules.<key>.<name>`` of a tied one. Without
ZeRO there are no names, but states of the optimizer, each of its parameter's shape.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import islice

from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.errors import Finding, finding
from ckptcore.formats.common.equal_files import mixed
from ckptcore.formats.common.optimizer_numbers import numbered
from ckptcore.formats.deepspeed.file_names import CheckpointFiles
from ckptcore.formats.deepspeed.rank_files import ModelStates, StatesFile
from ckptcore.utils.text import short_repr

Shape = tuple[int, ...]
TIED = re.compile(r"^tied_modules\.[^.]+\.(?P<rest>.+)$", re.DOTALL)
_LAYER = re.compile(r"^[0-9]{1,7}\.")
_OF_PARAMETER = ("exp_avg", "momentum_buffer")  # states that have the shape of their parameter
_MAX_REPORTED = 20


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A file of a pipeline layer.

    Attributes:
        file: The file.
        shapes: Name in the model -> shape, of tensors.
        names: Every name in the model.
    """

    file: StatesFile
    shapes: Mapping[str, Shape]
    names: Set[str]


Layers = Mapping[tuple[int, int], LayerFile]  # (layer, tensor-parallel rank) -> file


def missing_layers(
    states: ModelStates, files: CheckpointFiles, trained: Mapping[int, Mapping[str, Shape]]
) -> Iterator[Finding]:
    """Yield findings for missing files of layers: parameters are listed, or other ranks have the layer.

    Args:
        states: The model-state files.
        files: All files, which are no universal folder's.
        trained: Model-parallel rank -> FQN -> shape, of the parameters that it lists.
    """
    # Only a pipeline leaves its weights out of these files.
    if not files.layers and any("module" not in f.tree or f.tree["module"] is not None for f in _of(states)):
        return
    tp = states.world.tp
    layers = {int(n.partition(".")[0]) for s in trained.values() for n in s if _LAYER.match(n)}
    layers |= {layer for layer, _ in files.layers}
    layer_ranks = ((layer, rank) for layer in sorted(layers) for rank in range(tp))
    for layer, rank in islice((w for w in layer_ranks if w not in files.layers), _MAX_REPORTED):
        suffix = f"-model_{rank:02d}" if tp > 1 else ""
        path = f"layer_{layer:02d}{suffix}-model_states.pt"
        message = f"{path} is missing: its parameters are listed, or other ranks have the layer"
        yield finding("missing-rank", "files", message, file=path)


def missing_tied_layers(trained: Mapping[int, Mapping[str, Shape]], layers: Layers) -> Iterator[Finding]:
    """Yield findings for tied parameters that no layer's file holds.

    Not every layer that is tied has a file: one with a ``forward_fn`` is a function.
    """
    names = {name: m["rest"] for shapes in trained.values() for name in shapes if (m := TIED.match(name))}
    have = {name.partition(".")[2] for layer_file in layers.values() for name in layer_file.names}
    for name in [n for n, rest in names.items() if rest not in have][: _MAX_REPORTED if layers else 0]:
        message = f"a layer_*-model_states.pt is missing: none holds {short_repr(name, 80)}, which is listed"
        yield finding("missing-rank", "files", message, fqn=name)


def missing_shapes(states: ModelStates, layers: Layers) -> Iterator[Finding]:
    """Yield findings where optimizers have states of more parameters of a shape than layers have.

    A stage may have states of a tied parameter without a file of the layer, so that a lower count is a
    warning. Shapes of one dim are left out: wrappers for float16 flatten their groups.
    """
    tp, first_files = states.world.tp, states.firsts()
    for rank in sorted({mp % tp for mp in first_files}) if layers else ():  # not all that a field claims
        stored = Counter(
            s for (_, t), layer_file in layers.items() if t == rank for s in layer_file.shapes.values()
        )
        needed: Counter[Shape] = Counter()
        for mp, file in first_files.items():
            if mp % tp == rank:
                needed.update(s for s in _state_shapes(file) if len(s) > 1)
        for shape in islice(needed - stored, _MAX_REPORTED):
            message = (
                f"optimizers have states of {needed[shape]} parameters {list(shape)}, the files of layers "
                f"hold {stored[shape]}: a layer_*-model_states.pt is missing"
            )
            if not stored[shape]:
                yield finding("missing-rank", "files", message)
            else:
                yield finding("missing-part", "files", f"{message}, or a parameter is tied")


def misplaced_layers(layers: Layers, listed: Iterable[str]) -> Iterator[Finding]:
    """Yield findings for files of pipeline layers without parameters that are listed for the layer.

    Args:
        layers: The files.
        listed: Names that ``param_shapes`` has.
    """
    names_by_layer: dict[str, set[str]] = {}
    for name in listed:
        names_by_layer.setdefault(name.partition(".")[0], set()).add(name)
    for (layer, _), layer_file in layers.items():
        lost = min(names_by_layer.get(str(layer), set()) - layer_file.names, default=None)
        if lost is not None:
            path = layer_file.file.path
            yield mixed(f"{path} has no {short_repr(lost, 80)}: it is in the place of another file", path)


def unlisted_layers(
    states: ModelStates, layers: Layers, listed: Set[str], buffers: Set[str], aliases: Set[str]
) -> Iterator[Finding]:
    """Yield findings for files of layers of which no name is listed: surplus ones, or of frozen parameters.

    Pipelines of today do not list frozen parameters (deepspeed/runtime/engine.py, `_save_checkpoint`, does so
    for ZeRO-2 and 3). Where they are listed, such a file is of another save.

    Args:
        states: The model-state files.
        layers: The files of layers.
        listed: Names of parameters that the model-state files list.
        buffers: Names of buffers that they list.
        aliases: Names of tied parameters.
    """
    if len(states.firsts()) < states.world.mp:
        return
    frozen = any(isinstance(f.tree.get("frozen_param_shapes"), dict) for f in _of(states))
    surplus = [
        layer_file
        for layer_file in layers.values()
        if layer_file.names - buffers
        and not layer_file.names & listed
        and not layer_file.names <= buffers | aliases
    ]
    for layer_file in surplus[:_MAX_REPORTED]:
        path, name = layer_file.file.path, f"module.{min(layer_file.names - buffers)}"
        message = f"{path} holds {short_repr(name, 80)}, and no *_model_states.pt lists a parameter of it"
        if frozen:
            yield mixed(f"{message}: it is of another save", path)
            continue
        yield finding(
            "unlisted-tensor",
            "files",
            f"{message}: all of them are frozen, or the file is of another save",
            fqn=name,
            file=path,
            hint="move the file away if it is of another save",
        )


def _of(states: ModelStates) -> Iterable[StatesFile]:
    return states.files.values()


def _state_shapes(file: StatesFile) -> Iterator[Shape]:
    """Return the shapes of parameters by the states of an optimizer without ZeRO."""
    state = file.tree.get("optimizer")
    optimizer = numbered(state.get("optimizer_state_dict", state)) if isinstance(state, dict) else None
    for values in optimizer.state.values() if optimizer else ():
        moments = (values.get(key) for key in _OF_PARAMETER) if isinstance(values, dict) else ()
        shape = next((v.shape for v in moments if isinstance(v, StoredView)), None)
        if shape is not None:
            yield shape
