"""Report plain values that an output keeps in another form, or that need their classes when it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckptcore.core.object_tree import SCALARS
from ckptcore.encodings.pickle.writer import Classes, keeps_class
from ckptcore.errors import Finding, finding
from ckptcore.formats.base import Layout
from ckptcore.utils.text import count, some

_MOST = 20  # values that a message names
_KEPT = {"trainers": Classes.TRAINERS, "libraries": Classes.LIBRARIES, "plain": Classes.PLAIN}
# Kinds of forms that are values of Python itself.
_PLAIN_KINDS = frozenset(
    {"int", "float", "complex", "bytes", "tensor", "refused", "tuple", "set", "frozenset"}
)
# Arrays become tensors where a format has no arrays; byte tensors are tensors.
_ELSEWHERE = frozenset({"ndarray", "bytetensor"})
# Written as another class, although its own is known: WindowsPath, which opens on Windows only.
_REPLACED = frozenset({"windowspath"})


def value_findings(layout: Layout, objects: Mapping[str, Any]) -> list[Finding]:
    """Return findings for the values of an output's objects.

    Args:
        layout: How the output is laid out.
        objects: Key -> tree in JSON form.
    """
    if layout.values not in _KEPT:
        return []
    classes = _KEPT[layout.values]
    plain: dict[str, str] = {}
    classed: dict[str, str] = {}
    for key, form in objects.items():
        for path, kind in _named(form, key):
            if kind in _ELSEWHERE:
                continue
            if kind in _REPLACED or not keeps_class(kind, classes):
                plain[path] = kind
            elif not keeps_class(kind, Classes.PLAIN):
                classed[path] = kind
    findings: list[Finding] = []
    if plain:
        message = f"{count(len(plain), 'value')} in a plain form: {_listed(plain)}"
        findings.append(finding("restated-value", "files", message, fqn=min(plain)))
    if classed and layout.torch_load:
        message = f"{count(len(classed), 'value')} with a class: {_listed(classed)}"
        findings.append(finding("needs-classes", "files", message, fqn=min(classed)))
    return findings


def _listed(values: Mapping[str, str]) -> str:
    return some([f"{path} ({kind})" for path, kind in sorted(values.items())], _MOST)


def _named(form: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, kind) of the values of libraries and trainers in a JSON form."""
    if isinstance(form, list):
        inside: Iterable[tuple[Any, Any]] = enumerate(form)
    elif not isinstance(form, dict):
        return
    elif (kind := form.get("$")) is None:
        inside = form.items()
    elif kind in ("dict", "odict"):
        for key, _ in form["items"]:
            yield from _named(key, path)
        inside = ((k if type(k) in SCALARS else "", v) for k, v in form["items"])
    elif kind in _PLAIN_KINDS:
        if kind == "frozenset":
            yield path, kind
        inside = enumerate(form.get("items", ()))
    else:
        yield path, kind
        value = form["value"]
        value = value["items"] if kind in ("deque", "defaultdict") else value
        yield from _named(value, path)
        return
    for key, value in inside:
        if type(value) not in SCALARS:
            yield from _named(value, f"{path}.{key}")
