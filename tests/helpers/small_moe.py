"""Train a small mixture of experts with a frozen embedding, and save it as DCP does, step by step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

EXPERTS, WIDTH, VOCABULARY = 4, 16, 32
State = dict[str, dict[str, Any]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(self.norm(x)).softmax(-1)
        outputs = [shares[..., n : n + 1] * torch.tanh(expert(x)) for n, expert in enumerate(self.experts)]
        return x + torch.stack(outputs).sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(steps: int, updates: int = 3) -> Iterator[State]:
    """Yield a copy of the state after each step, a step being some updates."""
    random = torch.random.fork_rng()
    with random:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        for _ in range(steps):
            for _ in range(updates):
                tokens = torch.randint(0, VOCABULARY, (8, 12))
                logits = model(tokens[:, :-1]).flatten(0, 1)
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
                optimizer.step()
            weights, state = get_state_dict(model, optimizer)
            yield copy.deepcopy({"model": weights, "optim": state})


def save(state: State, folder: Path) -> str:
    """Save a state; return its path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group is needed
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return str(folder)
