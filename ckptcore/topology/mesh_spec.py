"""Parse a mesh from a text such as ``fsdp=4,tp=2``.

Whatever their order in the text, axes get the order of trainers, the slowest first: pp, dp_replicate, fsdp,
cp, ep, tp (torchtitan: distributed/parallel_dims.py; Megatron-Core has tp fastest and pp slowest, too).
The number of ranks is the product of all sizes. ``cuda:fsdp=4`` is a mesh of GPUs. The device and the names
that the text has for the axes matter to formats that keep the mesh itself: torch loads nothing into a tensor
from one of another mesh.
"""

from __future__ import annotations

import re

from ckptcore.errors import UsageError
from ckptcore.topology.layout import Mesh

AXES = ("pp", "dp_replicate", "fsdp", "cp", "ep", "tp")
ALIASES = {"dp": "fsdp", "dp_shard": "fsdp", "hsdp": "dp_replicate", "ddp": "dp_replicate"}
_VIRTUAL = "it adds no ranks: give --mesh pp=N, and virtual = N under [stages] of --sharding"
_NO_AXES = {
    "vpp": _VIRTUAL,
    "vp": _VIRTUAL,
    "etp": "leave it out: tp cuts experts, too, and Megatron-Core's loader reads any cut at any etp",
}
DEVICES = ("cpu", "cuda", "npu", "xpu", "hpu")
MAX_RANKS = 1 << 17


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of a text: ``axis=size`` separated by commas, optionally after a device and a colon.

    The ranks of context parallelism (cp) hold parameters like further fsdp ranks (torchtitan flattens
    both to one mesh), so they are counted into that axis.

    >>> parse_mesh("tp=2,dp_replicate=2,dp=4,cp=2").axes
    (('dp_replicate', 2), ('fsdp', 8), ('tp', 2))
    >>> parse_mesh("cuda:fsdp=8").device
    'cuda'
    >>> parse_mesh("fsdp=2,ddp=2").called
    ('ddp', 'fsdp')

    Raises:
        UsageError: An axis is unknown or repeated, or a size is invalid.
    """
    sizes: dict[str, int] = {}
    called: dict[str, str] = {}
    device, colon, axes = text.rpartition(":")
    if colon and device.strip() not in DEVICES:
        raise UsageError(f"--mesh {text}: unknown device {device!r}", hint=f"one of: {', '.join(DEVICES)}")
    for part in axes.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]+)\s*=\s*([0-9]{1,400})\s*", part)
        if match is None:
            raise UsageError(f"--mesh {text}: must be AXIS=SIZE (got {part.strip()!r})", hint=HINT)
        name, size = ALIASES.get(match[1], match[1]), int(match[2])
        if name in _NO_AXES:
            raise UsageError(f"--mesh {text}: {match[1]} is no axis of a mesh", hint=_NO_AXES[name])
        if name not in AXES:
            raise UsageError(f"--mesh {text}: unknown axis {match[1]!r}", hint=HINT)
        if name in sizes:
            raise UsageError(f"--mesh {text}: the axis {name} is given twice", hint=HINT)
        if size > MAX_RANKS:
            raise UsageError(f"--mesh {text}: must have at most {MAX_RANKS} ranks (got {size})", hint=HINT)
        if size < 1:
            raise UsageError(f"--mesh {text}: the axis {name} must have 1 rank or more", hint=HINT)
        sizes[name], called[name] = size, match[1]
    if "cp" in sizes:
        sizes["fsdp"] = sizes.get("fsdp", 1) * sizes.pop("cp")
    sized = tuple((a, sizes[a]) for a in AXES if a in sizes)
    mesh = Mesh(sized, device.strip() or "cpu", tuple(called.get(a, a) for a, _ in sized))
    if mesh.size > MAX_RANKS:
        raise UsageError(f"--mesh {text} must have at most {MAX_RANKS} ranks (got {mesh.size})")
    return mesh


_ALSO = ", ".join(f"{a} for {b}" for a, b in ALIASES.items())
HINT = f"use --mesh AXIS=SIZE, as in --mesh fsdp=4,tp=2; axes: {', '.join(AXES)} (also {_ALSO})"
