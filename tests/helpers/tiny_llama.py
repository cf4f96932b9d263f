"""One tiny Llama for the tests that ask transformers: two layers, grouped queries, seeded random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def tiny_llama(seed: int = 0, **config: Any) -> Any:
    """The live model. config: fields that the config has otherwise, or besides."""
    fields: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "architectures": ["LlamaForCausalLM"],
    }
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields | config))
