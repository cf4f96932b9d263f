"""Topologies: from a mesh in words and rules on names to which rank holds which box of each tensor."""

from __future__ import annotations

from ckptcore.errors import UsageError
from ckptcore.manifest import Manifest
from ckptcore.sharding import Layout, Mesh, Topology


def lay_out(
    manifest: Manifest, mesh: str, sharding: str | None = None, model_prefix: str | None = None
) -> Topology:
    """Which rank of the mesh holds what of each tensor of the manifest.

    mesh: ``fsdp=4,tp=2``. sharding: the text of a TOML file with rules, or None for the built-in ones.
    model_prefix: where the model is, or None to find it.
    Raises `UsageError` for a mesh or rules that cannot be.
    """
    from torch.distributed.tensor import Shard

    axes = []
    for part in mesh.split(","):
        name, _, size = part.partition("=")
        if name not in ("fsdp", "dp_replicate") or not size.isdigit():
            raise UsageError(f"--mesh {mesh} is not understood", hint="as in --mesh fsdp=4")
        axes.append((name, int(size)))
    whole = Mesh(tuple(axes))
    layout = Layout(("fsdp",), (Shard(0),)) if "fsdp" in dict(axes) else Layout()
    return Topology(whole, {t.fqn: layout for t in manifest.tensors if t.shape})
