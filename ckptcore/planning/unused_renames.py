"""Find the renames of a conversion that apply to no tensor: a misspelt one would leave the stored names.

It is a module of its own because composing, which calls it, does not need to know how renames match.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptcore.core.manifest import Manifest
from ckptcore.errors import Finding, finding
from ckptcore.naming.model_part import in_model
from ckptcore.naming.rename import applies, apply_renames, is_kept, strip_wrappers
from ckptcore.planning.request import Request


def unused_renames(request: Request, manifest: Manifest) -> Iterator[Finding]:
    """Yield a finding for each rename that applies to no tensor of a conversion."""
    left = list(dict.fromkeys(old for old, _ in request.rename))
    for name in _names(request, manifest) if left else ():
        for old, new in request.rename:
            if applies(name, old):
                left = [other for other in left if other != old]
            name = apply_renames(name, [(old, new)])
        if not left:
            return
    for old in left:
        yield finding("unused-option", "files", f"--rename {old}= matches no tensor")


def _names(request: Request, manifest: Manifest) -> Iterable[str]:
    """Yield the names that renames see: of an export those in the model, without wrappers."""
    inside = in_model(manifest, request.model_prefix) if request.verb == "export" else None
    for spec in manifest.tensors:
        if is_kept(spec.fqn, request.include, request.exclude):
            inner = spec.fqn if inside is None else inside(spec.fqn)
            if inner is not None:
                yield inner if inside is None else strip_wrappers(inner)
