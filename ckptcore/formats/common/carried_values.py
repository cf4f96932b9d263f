"""Make objects of the values that encodings carry past a format's reader.

These are values beside the tensors that no reader asks for: other keys of a safetensors file's
``__metadata__`` or of an index, attributes of a pickled tensor. All readers have them in the same way:
encodings report them to the account of the reading (`ckptcore.core.byte_ledger`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptcore.core.byte_ledger import ByteLedger
from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.metadata_budget import meter
from ckptcore.core.object_tree import encode, weight
from ckptcore.encodings.pickle.torch_globals import storages_in
from ckptcore.encodings.torchzip.reader import refused_in
from ckptcore.errors import finding

_CHAR = 4  # bytes of memory for a character of a key


def with_carried(manifest: Manifest, ledger: ByteLedger) -> Manifest:
    """Add an object for each group of carried values.

    The object is called like the group, and maps keys to values. A value that is equal in all files that have
    its key is in the object once. Where files differ about a key, each has an object ``GROUP/FILE`` with it.
    A value that needs a class that is not on the allow-list is left out, with a finding.
    """
    if not ledger.carried:
        return manifest
    findings = [
        finding(
            "odd-value", "files", f"{key} of {file} is of another type; {group} has it", fqn=group, file=file
        )
        for file, group, key in ledger.odd
    ]
    refused: dict[str, list[str]] = {}
    forms: dict[str, dict[str, _Forms]] = {}  # object -> key -> its values
    for file, group, values in ledger.carried:
        for key, value in values.items():
            form, needs = _encode_value(value)
            if needs:
                refused.setdefault(group, []).extend(needs)
                message = f"object {group} needs {', '.join(needs)} for {key}: left out"
                findings.append(finding("refused-global", "files", message, fqn=group, file=file))
            else:
                forms.setdefault(group, {}).setdefault(key, _Forms()).add(file, form)
    plain_dicts = {b.key: b.tree for b in manifest.blobs if b.known and _is_plain_dict(b.tree)}
    # A group of refused values alone has an object, too, which names the classes.
    trees: dict[str, dict[str, Any]] = {group: {} for group in refused}
    for group, keys in forms.items():
        for key, file_forms in keys.items():
            differs = key in plain_dicts.get(group, {}) and file_forms.first != plain_dicts[group][key]
            if file_forms.alike and not differs:
                trees.setdefault(group, {})[key] = file_forms.first
            else:
                for file, form in file_forms.by_file():
                    trees.setdefault(f"{group}/{file}", {})[key] = form
    merged = _with_objects(
        manifest, trees, plain_dicts, {g: tuple(dict.fromkeys(n)) for g, n in refused.items()}
    )
    return replace(merged, findings=(*manifest.findings, *findings))


def _encode_value(value: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the JSON form of a value, or None and the classes that it needs."""
    needs = refused_in(value)
    if not needs and storages_in([value], refused=True):
        needs = ("torch.Tensor",)
    if needs:
        return None, needs
    try:
        return encode(value), ()
    except TypeError:  # a record of a class, which is only permitted elsewhere
        return None, ("an object of a class",)
    except RecursionError:
        return None, ("too many levels",)


class _Forms:
    """The values of a key in several files; equal ones are kept once."""

    def __init__(self) -> None:
        self._forms: list[Any] = []
        self._files: list[tuple[str, int]] = []

    @property
    def first(self) -> Any:
        """Return the value of the first file."""
        return self._forms[0]

    @property
    def alike(self) -> bool:
        """Return whether all files have the first one's value."""
        return len(self._forms) == 1

    def add(self, file: str, form: Any) -> None:
        """Add the value of a file, as its JSON form."""
        position = next((n for n, earlier in enumerate(self._forms) if earlier == form), len(self._forms))
        if position == len(self._forms):
            meter().keep(weight(form), file)
            self._forms.append(form)
        meter().keep(_CHAR * len(file), file)
        self._files.append((file, position))

    def by_file(self) -> Iterator[tuple[str, Any]]:
        """Yield (file, its value)."""
        for file, position in self._files:
            yield file, self._forms[position]


def _is_plain_dict(tree: Any) -> bool:
    return isinstance(tree, dict) and "$" not in tree


def _with_objects(
    manifest: Manifest,
    trees: Mapping[str, dict[str, Any]],
    plain_dicts: Mapping[str, dict[str, Any]],
    refused: Mapping[str, tuple[str, ...]],
) -> Manifest:
    """Add objects; where there is one of the name that is a plain dict, add to that."""
    blobs = list(manifest.blobs)
    places = {b.key: n for n, b in enumerate(blobs)}
    taken = {t.fqn for t in manifest.tensors} | places.keys()
    for name, values in trees.items():
        needs = refused.get(name, ())
        if name in plain_dicts:
            blob = blobs[places[name]]
            blobs[places[name]] = replace(
                blob, tree={**plain_dicts[name], **values}, refused=(*blob.refused, *needs)
            )
            continue
        key = name
        while key in taken:  # such as a tensor of a pickle, which may have any name
            key += "_"
        taken.add(key)
        blobs.append(Blob(key, -1, _form(values) if values else None, needs, known=bool(values)))
    return replace(manifest, blobs=tuple(blobs), origin=_longer_paths(manifest.origin, len(blobs)))


def _form(values: dict[str, Any]) -> Any:
    """Return the JSON form of a dict of forms with text keys."""
    return values if "$" not in values else {"$": "dict", "items": [[k, v] for k, v in values.items()]}


def _longer_paths(origin: Mapping[str, Any], objects: int) -> Mapping[str, Any]:
    """Return a manifest's origin with a place, of no path, for each added object (`Paths.of`)."""
    form = origin.get("paths")
    added = objects - len(form["objects"]) if form else 0
    if not form or added <= 0:
        return origin
    longer = {key: [*form[key], *[-1] * added] for key in ("objects", "order")}
    return {**origin, "paths": {**form, **longer}}
