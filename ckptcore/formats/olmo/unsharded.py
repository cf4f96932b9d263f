"""Read OLMo's unsharded checkpoints: ``model.pt``, ``optim.pt``, ``train.pt``; or two `.safetensors`.

In the latter every name is a pickle, urlsafe base64, of (path in the state dict, whether the value is
pickled), and a non-tensor value is the pickle's bytes (olmo/safetensors_util.py). Names may not
contain any global: none needs one. In a folder, names are ``model.<fqn>``,
``optim.state.<fqn>.<key>``, ``optim.param_groups.<i>`` and ``train.<key>``; a file alone keeps its
stored names.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from ckptcore.core.manifest import Envelope, Item, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.metadata_budget import CONTAINER, meter
from ckptcore.encodings.pickle.unpickler import loads
from ckptcore.encodings.safetensors_header import read_header
from ckptcore.errors import Finding, MalformedCheckpoint, NameMismatch, finding
from ckptcore.formats.base import Evidence, Format, Reader, Source
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.common.thinning import thin_files
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.olmo.common import (
    missing_part,
    model_origin,
    names_by_number,
    open_file,
    plain_groups,
    plain_name,
    unpickled,
)
from ckptcore.formats.torch_save.tree import add_object

NAME = "olmo_unsharded"
_PARTS = ("model", "optim", "train")
_SUFFIXES = (".safetensors", ".pt")
# The first name of a header, when it is the base64 of a pickle of protocol 2 to 5.
_PICKLED = re.compile(rb'^\s*\{\s*(?:"__metadata__"\s*:\s*\{[^}]*\}\s*,\s*)?"gA[I-X][A-Za-z0-9_=-]+"\s*:')
_CONFIG = "config.yaml"
_MAX_PICKLE = 64 << 20
_MAX_PATH = 64  # parts of a name
_CHAR = 8  # bytes that a character of a name takes, in its part and in the name
Entry = tuple[tuple[Any, ...], bool]  # path in the state dict, whether the value is pickled


def detect(source: Source) -> Evidence | None:
    """Recognise pickled names in safetensors, or ``model.pt`` with two of optim, train and config."""
    if source.name is not None:
        if source.name.endswith(".safetensors") and _names_are_pickles(source, source.name):
            return Evidence(NAME, (f"the names in {source.name} are pickles",), refines=("safetensors",))
        return None
    for file in ("model.safetensors", "optim.safetensors"):
        if file in source.listing and _names_are_pickles(source, file):
            return Evidence(NAME, (f"the names in {file} are pickles",), refines=("safetensors",))
    beside = [p for p in ("optim.pt", "train.pt") if p in source.listing]
    beside += [_CONFIG] if beside and _CONFIG in source.listing else []
    files = ["model.pt", *beside] if "model.pt" in source.listing else beside
    if len(files) > 2:  # the config is saved last, and users often do not copy it
        return Evidence(NAME, tuple(f"found {p}" for p in files), refines=("torch_save",))
    return None


def read(source: Source) -> Manifest:
    """Read the manifest of a folder, or of one file with pickled names.

    Raises:
        UnsafeContent: A name holds more than plain values.
        MalformedCheckpoint: A file is not what OLMo writes.
    """
    if source.name is not None:
        return _safetensors(source, source.name, "")
    parts: list[Part] = []
    findings: list[Finding] = []
    for part in _PARTS:
        file = next((part + s for s in _SUFFIXES if part + s in source.listing), None)
        if file is None and part == "model":
            message = "the model is missing, only the files beside it exist"
            findings.append(finding("missing-file", "files", message, file=part))
            continue
        if file is None:
            findings.append(missing_part(part, f"{part} beside model"))
            continue
        reader = _safetensors if file.endswith(".safetensors") else _torch
        parts.append(Part(reader(source, file, part)))
    origin = model_origin(["model."])
    if _CONFIG in source.listing:
        origin |= {"config": _CONFIG}
    else:
        findings.append(missing_part(_CONFIG, f"{_CONFIG}, the file that a trainer writes last"))
    return join(NAME, source.store.url, parts, origin, findings)


def _torch(source: Source, file: str, part: str) -> Manifest:
    builder = Builder()
    content, tree = open_file(source, builder, file)
    if not isinstance(content, dict):
        raise MalformedCheckpoint(f"{file} must hold a dict (got {kind_of(content)})", file=file)
    values = dict(content)
    _require_part(part, "param_groups" in values, file)
    if part == "optim":
        groups, state = values.pop("param_groups", None), values.pop("state", None)
        names = names_by_number(groups) or {}
        for name, group in plain_groups(groups).items() if groups is not None else ():
            tree.add(name, group)
        if not isinstance(state, dict):
            raise MalformedCheckpoint(f"{file} must hold an optimizer's state dict", file=file)
        for key, value in state.items():
            tree.add(f"optim.state.{_parameter(key, names)}", value)
    for key, value in values.items():
        tree.add(f"{part}.{key}", value)
    if part != "train":  # the trainer's values may need refused classes
        tree.require_all()
    return builder.build(NAME, source.store.url, {})


def _safetensors(source: Source, file: str, part: str) -> Manifest:
    """Read one safetensors file of an unsharded step, whose pickled values become objects."""
    builder, size = Builder(), source.listing[file]
    tensors, _, begin = read_header(source.store, file, size)
    file_number = builder.file(file, size)
    keys = {key: _decode_key(key, file) for key in tensors}
    _require_part(part, any(path == ("param_groups",) for path, _ in keys.values()), file)
    values: dict[str, Any] = {}
    for key, (path, pickled) in keys.items():
        if pickled:
            dtype, shape, start, stop = tensors[key]
            label = f"{'.'.join(map(str, path))} in {file}"
            if dtype != "uint8" or len(shape) != 1 or stop - start > _MAX_PICKLE:
                raise MalformedCheckpoint(f"{label} must be a pickle (got {dtype} {list(shape)})", file=file)
            raw = source.store.read(file, begin + start, stop - start)
            values[key] = unpickled(raw, label)
            source.explain(file, begin + start, begin + stop)
    groups = next((v for k, v in values.items() if keys[k][0] == ("param_groups",)), None)
    names = (names_by_number(groups) if part == "optim" else None) or {}
    earlier: set[str] = set()
    for key, (path, pickled) in keys.items():
        if part == "optim" and path == ("param_groups",) and pickled:
            for name, group in plain_groups(values[key]).items():
                add_object(builder, name, group, file)
            continue
        if part == "optim" and len(path) > 1 and path[0] == "state":
            path = ("state", _parameter(path[1], names), *path[2:])
        name = ".".join(map(str, (part, *path) if part else path))
        if name in earlier:
            raise NameMismatch(f"{file} has two values with the name {name}")
        earlier.add(name)
        if pickled:
            add_object(builder, name, values[key], file)
            continue
        dtype, shape, start, stop = tensors[key]
        item = builder.item(Item(file_number, begin + start, stop - start, Envelope.RAW))
        builder.chunk(builder.tensor(TensorSpec(name, dtype, shape)), (0,) * len(shape), shape, item)
    return builder.build(NAME, source.store.url, {})


def _require_part(part: str, groups: bool, file: str) -> None:
    """Require that the optimizer's file has parameter groups, and the model's has none."""
    if part == "optim" and not groups:
        raise MalformedCheckpoint(f"{file} must hold an optimizer's state dict", file=file)
    if part == "model" and groups:
        raise MalformedCheckpoint(f"{file} must hold a model's state dict (got an optimizer's)", file=file)


def _names_are_pickles(source: Source, file: str) -> bool:
    size = source.listing[file]
    if size < 16:
        return False
    return _PICKLED.match(source.store.read(file, 8, min(size - 8, 1 << 14))) is not None


def _decode_key(key: str, file: str) -> Entry:
    label = f"the name {key:.40} in {file}"
    try:
        raw = base64.b64decode(key, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedCheckpoint(f"{label} must be base64, like the others", file=file) from error
    value = loads(raw, {}, label=label)
    if type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is bool:
        path, pickled = value
        if 0 < len(path) <= _MAX_PATH and all(type(p) in (str, int) for p in path):
            # Parts may be one text, shared through the memo. Nothing else can be, and no other tree is built.
            meter().take(CONTAINER + _CHAR * sum(len(p) for p in path if type(p) is str), label)
            return path, pickled
    raise MalformedCheckpoint(f"{label} must be a path in a state dict", file=file)


def _parameter(key: Any, names: dict[int, str]) -> str:
    return names.get(key, str(key)) if type(key) is int else plain_name(str(key))


FORMAT = Format(
    name=NAME,
    title="OLMo unsharded checkpoint",
    recognised_by="`model.pt`, `optim.pt`, `train.pt`, `config.yaml`; safetensors whose names are pickles",
    detect=detect,
    suffixes=frozenset({"safetensors", "pt"}),
    reader=Reader(read, checksums="CRC-32 per record (`.pt`)", objects=True),
    thin=thin_files,
)
