"""Tensors that torch saves and safetensors cannot hold, by a name for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

W, B = torch.arange(12.0).reshape(3, 4), torch.ones(4)


class Scaled(torch.Tensor):
    """A subclass, as quantisation libraries have them."""


def quantized(dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    return torch.quantize_per_tensor(W, 0.1, 0, dtype)


def per_channel(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_channel(torch.randn(4, 4), torch.ones(4) / 10, torch.zeros(4), 0, dtype)


def bytes_as(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(4, 4, dtype=torch.uint8).view(dtype)


KINDS: dict[str, Callable[[], Any]] = {
    "qint8": quantized,
    "quint8": lambda: quantized(torch.quint8),
    "qint32": lambda: quantized(torch.qint32),
    "per channel": lambda: per_channel(torch.qint8),
    "quint4x2": lambda: per_channel(torch.quint4x2),
    "bits8": lambda: bytes_as(torch.bits8),
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([B, W[0, :2]]),
    "jagged": lambda: torch.nested.nested_tensor([B, W[0, :2]], layout=torch.jagged),
    "meta": lambda: torch.empty(3, device="meta"),
    "subclass": lambda: B.as_subclass(Scaled),
    "parameter": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "module": lambda: torch.nn.Linear(2, 3),
}
