"""A model is taken for one with an adapter only where its names are those that peft gives."""

from __future__ import annotations

import pytest

from ckptcore.errors import UsageError
from ckptcore.naming.peft import holds_adapter

SEGMENT_ANYTHING = (
    "prompt_encoder.shared_embedding.positional_embedding",
    "prompt_encoder.mask_embed.conv1.weight",
    "prompt_encoder.no_mask_embed.weight",
    "mask_decoder.iou_token.weight",
)


def test_a_prompt_encoder_of_a_model() -> None:
    assert not holds_adapter(SEGMENT_ANYTHING)
    assert not holds_adapter([*SEGMENT_ANYTHING, "prompt_encoder.embedding.weight"])


@pytest.mark.parametrize("name", ["prompt_encoder.", "prompt_encoder.default."])
def test_a_prompt_encoder_of_peft(name: str) -> None:
    assert holds_adapter([f"{name}embedding.weight", "base_model.lm_head.weight"])
    for part in ("mlp_head.0.weight", "lstm_head.bias_ih_l0", "prefix_task_cols", "delta_embedding.weight"):
        with pytest.raises(UsageError, match="cannot export an adapter"):
            holds_adapter([f"{name}embedding.weight", f"{name}{part}"])
