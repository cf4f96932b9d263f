"""Give kept tensors and objects their paths in the tree of an output file, and their names.

Writers that nest get a path for every name. A format may move entries (Lightning's one file has the model
under another key than its folders), and names follow their paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import references
from ckptcore.core.subset import select
from ckptcore.core.tree_paths import Path, Paths, renamed
from ckptcore.errors import Finding, NameMismatch, finding
from ckptcore.formats.base import Layout
from ckptcore.naming.rename import Mapped
from ckptcore.utils.text import count, some

Objects = dict[str, Any]


def nest(
    layout: Layout, source: Manifest, mapped: Mapped, objects: Objects
) -> tuple[Mapped, Objects, Paths, Mapping[str, str]]:
    """Return tensors and objects as the layout names them, their paths, and old name -> new name.

    Args:
        layout: Layout of the output.
        source: The source.
        mapped: The kept tensors.
        objects: Key -> tree of the carried objects.

    Raises:
        NameMismatch: Two would have one name. The layout's ``place`` may raise, too.
    """
    if not layout.nests:
        return mapped, objects, Paths(), {}
    rule = layout.place(source) if layout.place is not None else None
    paths, moved = Paths(), dict[str, str]()
    for name, path in _in_order(source, mapped, objects):
        target = rule(path) if rule is not None else path
        moved[name] = ".".join(map(str, target))
        paths.add(moved[name], target)
    for key, tree in objects.items():  # tensors inside an object move with it
        for name in references(tree):
            if name.startswith(f"{key}.") and name not in moved:
                moved[name] = moved.get(key, key) + name[len(key) :]
    if rule is None:
        return mapped, objects, paths, {}
    names = [moved.get(t.fqn, t.fqn) for t in mapped.manifest.tensors]
    _require_distinct([*names, *(moved.get(k, k) for k in objects)])
    trees = {moved.get(key, key): _renamed_references(tree, moved.get) for key, tree in objects.items()}
    return _moved(source, mapped, names, moved), trees, paths, moved


def split_objects(layout: Layout, objects: Objects) -> list[Finding]:
    """Return a warning about values with tensors inside that the output has as their parts.

    torch stores a tuple with tensors as one object, and its loader asks for that.
    """
    keys = sorted(key for key, tree in objects.items() if references(tree)) if layout.flattens else []
    if not keys:
        return []
    are = "are written as their parts" if keys[1:] else "is written as its parts"
    message = f"{count(len(keys), 'object')} with tensors inside {are}: {some(keys)}"
    first = references(objects[keys[0]])[0]
    hint = f"a strict load must ask for the parts, such as {first}, or use ckptcore.load_into"
    return [finding("dropped-keys", "coverage", message, hint=hint)]


LEFT_OUT = object()


def without(tree: Any, gone: set[str]) -> Any:
    """Return an object's tree without dict entries of dropped tensors; `LEFT_OUT` if nothing remains.

    A sequence that loses an element is dropped, because positions have a meaning.
    """
    if isinstance(tree, list):
        items = [without(v, gone) for v in tree]
        return LEFT_OUT if any(v is LEFT_OUT for v in items) else items
    if not isinstance(tree, dict):
        return tree
    kind = tree.get("$")
    if kind == "tensor":
        return LEFT_OUT if tree["fqn"] in gone else tree
    if kind in ("dict", "odict"):
        rows = [(k, without(v, gone)) for k, v in tree["items"]]
        return {"$": kind, "items": [[k, v] for k, v in rows if v is not LEFT_OUT]}
    entries = {k: without(v, gone) for k, v in tree.items()}
    if kind is not None and any(v is LEFT_OUT for v in entries.values()):
        return LEFT_OUT
    return {k: v for k, v in entries.items() if v is not LEFT_OUT}


def _in_order(source: Manifest, mapped: Mapped, objects: Objects) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of kept entries with a path of their own: in saved order, then the others."""
    saved = Paths.of(source)
    new = dict(mapped.renamed)
    tensor_names = {t.fqn for t in mapped.manifest.tensors}
    placed_names: set[str] = set()
    for old in saved:
        name = new.get(old, old)
        if name not in tensor_names and name not in objects:
            continue
        path = saved[old] if name == old else renamed(saved[old], name)
        placed_names.add(name)
        yield name, path or (name,)
    inside = {r for tree in objects.values() for r in references(tree)}
    for name in (*(t.fqn for t in mapped.manifest.tensors if t.fqn not in inside), *objects):
        if name not in placed_names:
            yield name, (name,)


def _moved(source: Manifest, mapped: Mapped, names: Sequence[str], moved: Mapping[str, str]) -> Mapped:
    old_of = {b: a for a, b in mapped.renamed}
    rows = [old_of.get(t.fqn, t.fqn) for t in mapped.manifest.tensors]
    ties = tuple((moved.get(a, a), moved.get(b, b)) for a, b in mapped.ties)
    twins = mapped.twins
    if twins is not None:
        twins = select(twins, range(len(ties)), [a for a, _ in ties])
    return replace(
        mapped,
        manifest=select(mapped.manifest, range(len(names)), names),
        renamed=tuple((old, name) for old, name in zip(rows, names, strict=True) if old != name),
        ties=ties,
        twins=twins,
    )


def _renamed_references(tree: Any, name: Callable[[str, str], str | None]) -> Any:
    if isinstance(tree, list):
        return [_renamed_references(v, name) for v in tree]
    if isinstance(tree, dict):
        if tree.get("$") == "tensor":
            return {"$": "tensor", "fqn": name(tree["fqn"], tree["fqn"])}
        return {k: _renamed_references(v, name) for k, v in tree.items()}
    return tree


def _require_distinct(names: Sequence[str]) -> None:
    earlier_names: set[str] = set()
    for name in names:
        if name in earlier_names:
            raise NameMismatch(
                f"two parts of the output would both be called {name}", hint="leave one out with --exclude"
            )
        earlier_names.add(name)
