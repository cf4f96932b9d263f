"""What a training that begins from a folder of the hub is compared with: transformers' own first steps.

RELATIVE: how far losses of two computations may be apart, in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

STEPS, RATE = 3, 0.05
RELATIVE = 1e-6
IDS = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(5))


def hub_folder(fields: dict[str, Any], folder: Path) -> Path:
    """A model with random weights of a trained model's size, as `save_pretrained` writes it.

    fields: Of its config.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            drawn = torch.randn(tensor.shape)
            tensor.copy_(1 + drawn / 8 if "norm" in name else drawn / 4)
    model.save_pretrained(folder)
    return folder


def losses(folder: Path, ids: torch.Tensor = IDS) -> list[float]:
    """The losses of transformers' model of a folder, in steps of SGD on one batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    optimizer, found = torch.optim.SGD(model.train().parameters(), lr=RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found
