"""Say what an export leaves out of its source, and ask where evidence and names contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckptcore.core.manifest import Manifest
from ckptcore.errors import AmbiguousModel, Finding, finding
from ckptcore.naming.rename import ModelPart, is_kept
from ckptcore.naming.training_state import AVERAGE, TRAINING_STATE, StoredKinds
from ckptcore.planning.request import Request
from ckptcore.utils.globs import covering
from ckptcore.utils.text import count, some
from ckptcore.utils.units import show_size

_UNKNOWN = "no known kind"
_COPY, _OTHER = "copies of the model", "other"


def require_decided(request: Request, manifest: Manifest, model: ModelPart) -> None:
    """Raise `AmbiguousModel` if tensors outside of the model part were trained, and no option decides.

    Args:
        request: The export.
        manifest: Its source.
        model: The model part; without strays if the user named it.
    """
    strays = [name for name in model.strays if is_kept(name, request.include, request.exclude)]
    if not strays:
        return
    other_names = {spec.fqn for spec in manifest.tensors} - set(strays)
    globs = covering(strays, other_names)[:4]
    place = model.prefix or "the model at the top level"
    raise AmbiguousModel(
        f"the optimizer has state for {count(len(strays), 'tensor')} outside of {place}: {some(strays)}",
        hint=f"leave them out: {' '.join(f'--exclude {glob!r}' for glob in globs)}; or export them, too: "
        "--model-prefix '', with --include and --rename; or say that nothing is missing: "
        f"--model-prefix {model.prefix or chr(39) * 2}",
        candidates=[model.prefix, ""],
    )


def left_out_findings(request: Request, manifest: Manifest, model: ModelPart) -> Iterator[Finding]:
    """Yield findings with the kinds, numbers and bytes of what is not in the model part.

    What globs leave out, and parts that `other-part` names, are not repeated.

    Args:
        request: The export.
        manifest: Its source.
        model: The model part.
    """
    kinds = StoredKinds(manifest)
    inside = (spec for spec in manifest.tensors if model.holds(spec.fqn))
    shapes = {spec.fqn[len(model.prefix) :]: spec.shape for spec in inside}
    tensors: dict[str, list[str]] = {}
    values: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for spec in manifest.tensors:
        name = spec.fqn
        if model.holds(name):
            continue
        if not is_kept(name, request.include, request.exclude) or name.startswith(
            model.other_prefixes or ("\0",)
        ):
            continue
        kind = kinds.kind_of(name) or _unknown_kind(name, spec.shape, shapes, kinds)
        tensors.setdefault(kind, []).append(name)
        sizes[kind] = sizes.get(kind, 0) + spec.nbytes
    for blob in manifest.blobs:
        stored = kinds.kind_of(blob.key)
        kind = stored if stored is not None and stored in TRAINING_STATE else _OTHER
        values[kind] = values.get(kind, 0) + 1
    counted = [kind for kind in {**tensors, **values} if kind in TRAINING_STATE or kind == _COPY]
    counted += [_OTHER] if _OTHER in tensors or _OTHER in values else []
    parts = [_part(k, len(tensors.get(k, ())), values.get(k, 0), sizes.get(k, 0)) for k in counted]
    if parts:
        yield finding("left-out", "coverage", f"left out of the export: {'; '.join(parts)}")
    for kind in (AVERAGE, _UNKNOWN):
        names = tensors.get(kind, [])
        if names:
            label = (
                "an average of weights" if kind == AVERAGE else "outside of the model, and no training state"
            )
            size = f"{count(len(names), 'tensor')}, {show_size(sizes[kind])}"
            yield finding("left-out-weights", "coverage", f"left out, {label} ({size}): {some(names)}")


def _unknown_kind(
    name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], kinds: StoredKinds
) -> str:
    """Return what a tensor without a known kind is called in a finding.

    DeepSpeed keeps ``lp/<name>``, the weight in low precision, beside its master.
    """
    if shapes.get(name.partition("/")[2]) == shape:
        return _COPY
    return _UNKNOWN if kinds.is_weight_like(name) else _OTHER


def _part(kind: str, tensors: int, values: int, nbytes: int) -> str:
    numbers = [count(tensors, "tensor") + f", {show_size(nbytes)}"] if tensors else []
    numbers += [count(values, "value")] if values else []
    return f"{kind} ({', '.join(numbers)})"
