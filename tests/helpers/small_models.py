"""Small models of every kind that the installed transformers can build, on the meta device."""

from __future__ import annotations

import re
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
_WIDTH = re.compile(
    r"(hidden|intermediate|ffn|embed\w*|mlp|model|head)_(size|dim)$|^(d_model|d_ff|dim|n_embd)$|rank$|channels$"
)
_VOCAB = 320
_ROUTER_BIAS = re.compile(r"(e_score_correction_bias|expert_bias|balancing_biases)$")
_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
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
            with warnings.catch_warnings(action="ignore"):
                config = _few(transformers.CONFIG_MAPPING[model_type]())
                with torch.device("meta"):
                    model = getattr(transformers, name)._from_config(config)
        except Exception as error:  # a default config need not be one that its class takes
            reasons.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        model.config.architectures = [name]
        return model
    raise LookupError("; ".join(reasons) or "no class")


def filled(model_type: str, most: int = 20_000_000) -> Any:
    """A narrow model on the CPU, of the first class that can be built so, whose elements are all random.

    Raises LookupError with each class's reason when none can, or for one of more than ``most`` elements.
    """
    reasons: dict[str, None] = {}
    for name in _classes(model_type):
        for few in (2, 4, 0):
            for factor in (16, 8, 4, 1):
                try:
                    with warnings.catch_warnings(action="ignore"):
                        model = _built_narrow(model_type, name, factor, few)
                        count = sum(t.numel() for t in model.state_dict().values() if hasattr(t, "numel"))
                        saved(model)  # which needs widths that its operations divide
                        if count <= most:
                            model = model.to_empty(device="cpu")
                            model.tie_weights()
                except Exception as error:  # a narrow config need not be one that its class takes
                    reasons[f"{name}: {type(error).__name__}: {error}".splitlines()[0]] = None
                    continue
                if count > most:
                    reasons[f"{name}: {count} elements"] = None
                    if count > 8 * most:  # those that follow are wider; few are narrower
                        break
                    continue
                model.config.architectures = [name]
                refill(model)
                return model.eval()
    raise LookupError("; ".join(reasons) or "no class")


def _built_narrow(model_type: str, name: str, factor: int, few: int) -> Any:
    """A model on the meta device, of a config that is the same after it was saved."""
    config = _narrow(transformers.CONFIG_MAPPING[model_type](), factor)
    config = _few(config, few) if few else config
    config = type(config).from_dict(config.to_dict())
    getattr(config, "validate", lambda: None)()
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(config)


def refill(model: Any) -> None:
    """Random elements everywhere, buffers of files included."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not hasattr(tensor, "shape"):
                continue
            if _ROUTER_BIAS.search(name):  # of a real size, close to each other: bfloat16 has 1 of 16 there
                tensor.copy_(8 + (torch.rand(tensor.shape, generator=generator) - 0.5) * 0.04)
            elif tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1)
            elif not tensor.is_complex():
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))


def live(model: Any) -> Shapes:
    """Names and shapes as the model has them."""
    return {n: tuple(t.shape) for n, t in model.state_dict().items() if hasattr(t, "shape")}


def saved(model: Any) -> Shapes:
    """Names and shapes as `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    found: Mapping[str, Any] = revert_weight_conversion(model, model.state_dict())
    return {n: tuple(t.shape) for n, t in found.items() if hasattr(t, "shape")}


def _classes(model_type: str) -> Iterator[str]:
    """Classes of a model type, those first whose own config is of it: others are a part of its models."""
    names = dict.fromkeys(
        name if isinstance(name, str) else name[0]
        for table in _HEADS
        if (name := getattr(modeling_auto, table, {}).get(model_type))
    )
    yield from sorted(names, key=lambda name: _config_type(name) != model_type)


def _config_type(name: str) -> str:
    """The model type of a class's own config; none where the class needs another library."""
    try:
        return str(getattr(transformers, name).config_class.model_type)
    except (ImportError, AttributeError):
        return ""


def _narrow(config: Any, factor: int) -> Any:
    for name, wide in list(vars(config).items()):
        if isinstance(wide, transformers.PreTrainedConfig):
            _narrow(wide, factor)
        elif type(wide) is int and wide >= 64 and wide % factor == 0 and _WIDTH.search(name):
            setattr(config, name, wide // factor)
    if factor > 1 and vars(config).get("vocab_size", 0) > _VOCAB:
        config.vocab_size = _VOCAB
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if type(vars(config).get(name)) is int:
                setattr(config, name, 1)
    return config


def _few(config: Any, layers: int = 2) -> Any:
    for name, few in _FEW.items():
        fewest = max(few, layers)
        many = getattr(config, name, None) if name in vars(config) else None
        if isinstance(many, int) and many > fewest:
            setattr(config, name, fewest if name != "num_experts_per_tok" else few)
    for value in vars(config).values():
        if isinstance(value, transformers.PreTrainedConfig):
            _few(value, layers)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = vars(config).get(name)
        if isinstance(kinds, list):
            setattr(config, name, kinds[: getattr(config, "num_hidden_layers", 2)])
    return config
