"""Small models of every kind that the installed transformers can build, on the meta device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

Shapes = dict[str, tuple[int, ...]]

# The fields of configs that say how many of something there are: two layers and four experts show all.
_FEW = {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "depth": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
}
_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def model_types() -> list[str]:
    """Every model type that has a config class."""
    return sorted(transformers.CONFIG_MAPPING.keys())


def build(model_type: str) -> Any:
    """A small model of the first class that can be built of its default config.

    Raises LookupError with each class's reason when none can.
    """
    reasons = []
    for name in _classes(model_type):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = _few(transformers.CONFIG_MAPPING[model_type]())
                with torch.device("meta"):
                    model = getattr(transformers, name)._from_config(config)
        except Exception as error:  # a default config need not be one that its class takes
            reasons.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        model.config.architectures = [name]
        return model
    raise LookupError("; ".join(reasons) or "no class")


def live(model: Any) -> Shapes:
    """Names and shapes as the model has them."""
    return {n: tuple(t.shape) for n, t in model.state_dict().items() if hasattr(t, "shape")}


def saved(model: Any) -> Shapes:
    """Names and shapes as `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    found: Mapping[str, Any] = revert_weight_conversion(model, model.state_dict())
    return {n: tuple(t.shape) for n, t in found.items() if hasattr(t, "shape")}


def _classes(model_type: str) -> Iterator[str]:
    for table in _HEADS:
        name = getattr(modeling_auto, table, {}).get(model_type)
        if name:
            yield name if isinstance(name, str) else name[0]


def _few(config: Any) -> Any:
    for name, few in _FEW.items():
        many = getattr(config, name, None) if name in vars(config) else None
        if isinstance(many, int) and many > few:
            setattr(config, name, few)
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            _few(value)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = vars(config).get(name)
        if isinstance(kinds, list):
            setattr(config, name, kinds[: getattr(config, "num_hidden_layers", 2)])
    return config
