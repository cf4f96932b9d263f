"""Find the names that a model has without its quantisation, to compare quantised weights with its config.

transformers builds quantised modules only with the libraries that compute with them, often only on their
devices. A plain model has the weights that these modules describe. So each quantised weight counts as its
weight, where the config states that its module is quantised, and what belongs to it is no name of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import NameMismatch
from ckptcore.formats.huggingface.quantization_config import quantization_of
from ckptcore.formats.huggingface.quantized import scaleless
from ckptcore.naming.quantized_names import quantized_weights
from ckptcore.planning.config_folder import ConfigFolder
from ckptcore.utils.text import listed

Shapes = dict[str, tuple[int, ...] | None]


def plain_shapes(config: ConfigFolder, tensors: Sequence[TensorSpec]) -> Shapes:
    """Return name -> shape of the weights of an export; None for packed ones, whose shape is another.

    Raises:
        NameMismatch: The config states that a weight has a scale, and it has none.
    """
    shapes: Shapes = {t.fqn: t.shape for t in tensors}
    stated = quantization_of(config.form)
    if not stated.method:
        return shapes
    stored_names: set[str] = set()
    for weight in quantized_weights(tensors):
        if stated.ignores(weight.name):
            continue
        stored_names |= {*weight.stored}
        # Before the names are removed: a weight that is not packed is stored under its own.
        shape = None if weight.packed else shapes[weight.name]
        for name in weight.stored:
            shapes.pop(name, None)
        shapes[weight.name] = shape
    lost = [f.fqn for f in scaleless(tensors, stored_names, stated, ()) if f.fqn is not None]
    if lost:
        raise NameMismatch(
            f"--config {config.url} says that weights are quantised ({stated.method}), and no tensor is the "
            f"scale of {listed(lost)}",
            hint="name the config of these weights, or leave --config out",
            missing=lost,
        )
    return shapes
