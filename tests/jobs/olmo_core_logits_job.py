"""What OLMo-core's own Transformer makes of weights: its names, and its logits, on the CPU.

python olmo_core_logits_job.py ASKED ANSWER

ASKED is a file of torch with a list of questions: ``model``, a config as OLMo-core writes it; ``ids``;
``state``, the weights by its names, or None for random ones, which all differ. ANSWER will hold a list of
``state`` and ``logits``. GPU kernels sort its experts and undo it; plain torch does so here.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch

T = torch.Tensor


class _Kernels:
    """A replacement for olmo_core.kernels.moe: rows by expert, and back."""

    @staticmethod
    def gather(x: T, indices: T, bin_ids: T, weights: None, bins: T, top_k: int) -> T:
        return x[indices.long() // top_k]

    @staticmethod
    def scatter(x: T, indices: T, bin_ids: T, weights: T, bins: T, top_k: int) -> T:
        out = torch.zeros_like(x)
        out[indices.long()] = x * weights[indices.long()][:, None]
        return out.view(-1, top_k, x.shape[-1]).sum(1)

    @staticmethod
    def binned_gather(x: T, indices: T, weights: None, bins: T, size: int, top_k: int) -> T:
        out = x.new_zeros(len(bins), size, x.shape[-1])
        for e, rows in enumerate(_rows(indices, bins)):
            assert len(rows) <= size, "a token would be dropped"
            out[e, : len(rows)] = x[rows // top_k]
        return out

    @staticmethod
    def binned_scatter(x: T, indices: T, weights: T, bins: T, top_k: int) -> T:
        out = x.new_zeros(len(indices), x.shape[-1])
        for e, rows in enumerate(_rows(indices, bins)):
            out[rows] = x[e, : len(rows)] * weights[rows][:, None]
        return out.view(-1, top_k, x.shape[-1]).sum(1)


def _rows(indices: T, bins: T) -> list[T]:
    ends = [0, *bins.tolist()]
    return [indices[a:b].long() for a, b in itertools.pairwise(ends)]


@torch.no_grad()
def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    from olmo_core.nn.transformer import TransformerConfig

    torch.manual_seed(0)
    model = TransformerConfig.from_dict(asked["model"]).build(init_device="cpu").eval()
    own = model.state_dict()
    given = asked["state"] or {n: _random(n, t) for n, t in own.items()}
    assert given.keys() == own.keys(), sorted(given.keys() ^ own.keys())
    model.load_state_dict(given)
    return {"state": given, "logits": model(asked["ids"]).float()}


def _random(name: str, tensor: T) -> T:
    """Values of a trained model's size, so that every tensor counts in the logits."""
    if name.endswith("w_out.bias"):  # no model on the hub has it beside biases of queries alone
        return torch.zeros(tensor.shape)
    values = torch.randn(tensor.shape)
    return 1 + values / 8 if "norm" in name else values / 4


def main() -> None:
    """Writes the answers."""
    from olmo_core.ops import moe

    moe.kernels = _Kernels
    torch.save([_answer(asked) for asked in torch.load(sys.argv[1], weights_only=True)], sys.argv[2])


if __name__ == "__main__":
    main()
