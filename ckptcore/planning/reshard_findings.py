"""Warn about what a reshard's trainer must know: uneven meshes, rules without effect, keys that are gone."""

from __future__ import annotations

from collections.abc import Sequence

from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, finding
from ckptcore.naming.optimizer_state import parameters
from ckptcore.planning.model_limits import require_possible
from ckptcore.planning.request import Request
from ckptcore.topology.layout import Topology
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.topology.stage_contents import StageContents, stage_contents
from ckptcore.utils.text import count, some


def reshard_findings(
    request: Request,
    source: Manifest,
    written: Manifest,
    bound: Sequence[tuple[str, str]],
    *,
    ruled: bool,
    repads: bool = False,
) -> list[Finding]:
    """Return the warnings of a reshard.

    Args:
        request: The reshard.
        source: The checkpoint, as it is stored.
        written: The tensors that are written.
        bound: (name, reason) of the state that is dropped.
        ruled: Whether rules on names decide the layout, and not the caller.
        repads: Whether loaders of the output pad the vocabulary for their own tp.

    Raises:
        UsageError: The trainer cannot run the model on the mesh.
    """
    findings: list[Finding] = []
    if ruled:
        shapes = parameters(written, request.model_prefix)[0]
        findings += require_possible(source, shapes, parse_mesh(request.mesh), request.config, repads=repads)
    if request.sharding is not None:
        from ckptcore.planning.unused_rules import unused_rules  # imports pydantic

        findings += unused_rules(written, request.sharding, request.model_prefix)
    if bound:
        keys = sorted(name for name, _ in bound)
        message = f"{count(len(keys), 'key')} of the source cannot be loaded from the output: {some(keys)}"
        hint = "a strict load must not ask for them; --keep-object GLOB carries them"
        findings.append(finding("dropped-keys", "coverage", message, hint=hint))
    return findings


def stages_of(written: Manifest, topology: Topology, model_prefix: str | None) -> tuple[StageContents, ...]:
    """Return what each pipeline stage has of the model's parameters; nothing without stages."""
    if dict(topology.mesh.axes).get("pp", 1) == 1:
        return ()
    owner = parameters(written, model_prefix)[1]
    shapes = {t.fqn: t.shape for t in written.tensors}
    parameter_names = [
        t.fqn for t in written.tensors if t.fqn.endswith(owner.get(t.fqn, "\0")) and not _is_state(t.fqn)
    ]
    return stage_contents(topology, shapes, parameter_names)


def _is_state(name: str) -> bool:
    return "state" in name.split(".")
