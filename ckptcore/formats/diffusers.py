"""Read a pipeline of diffusers as one checkpoint: ``unet.conv_in.weight`` is of the component ``unet``.

An export has all components again, each in a folder of its own, and model_index.json as the last file.

model_index.json maps the name of each component to its library and class, both null for one that a pipeline
goes without (diffusers/pipelines/pipeline_utils.py, `save_pretrained`). Models are folders of safetensors or
``.bin`` files. Schedulers, tokenizers and processors have no weights. A component that is named, and is not
there, is missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import decode, encode
from ckptcore.encodings.json_text import parse
from ckptcore.errors import AmbiguousModel, Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.base import Arrangement, Evidence, FileLayout, Format, Layout, Literal, Reader, Source
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.common.part_proof import lack
from ckptcore.formats.huggingface.quantized import FORMAT as QUANTIZED
from ckptcore.formats.huggingface.safetensors import FORMAT as SAFETENSORS
from ckptcore.formats.huggingface.safetensors import arrange as arrange_model
from ckptcore.formats.torch_save.format import FORMAT as TORCH_SAVE
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import listed, short_repr

_NAME = "diffusers"
_INDEX, _CONFIG = "model_index.json", "config.json"
_OBJECT = "model_index"
_MOST = 1 << 20  # bytes of an index; they have a few hundred
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Classes without weights, by the names that diffusers and transformers give them.
_STATELESS = re.compile(r".*(?:Scheduler|Tokenizer|TokenizerFast|Processor|ProcessorFast|Extractor)")


def detect(source: Source) -> Evidence | None:
    """Recognise model_index.json of a pipeline with a component."""
    if source.name is not None or not 0 < source.listing.get(_INDEX, 0) <= _MOST:
        return None
    index = _read_index(source)
    if index is None or not (components := _components(index)):
        return None
    because = f"found {_INDEX} of {short_repr(index['_class_name'], 60)} with {listed(list(components))}"
    return Evidence(_NAME, (because,), (QUANTIZED.name, SAFETENSORS.name, TORCH_SAVE.name))


def read(source: Source) -> Manifest:
    """Read the manifest of all components; one that is not there is a finding.

    Raises:
        MalformedCheckpoint: A component has no name of a folder.
        AmbiguousModel: A component has several sets of weights.
        UnsupportedFormat: A component is quantised.
    """
    index = _read_index(source)
    if index is None:
        raise MalformedCheckpoint(f"{_INDEX} must be a JSON object", file=_INDEX)
    source.explain(_INDEX)
    parts: list[Part] = []
    findings: list[Finding] = []
    components = _components(index)
    for name, kind in components.items():
        part = _read_component(source.below(name), name, kind, findings)
        parts += [] if part is None else [part]
    libraries = {name: index[name][0] for name in components}
    origin = {"models": [part.folder for part in parts], "components": libraries}
    findings += _exchanged(parts, components)
    builder = Builder()
    builder.blobs.append(Blob(_OBJECT, -1, encode(index)))
    parts.append(Part(builder.build(_NAME, source.store.url, {})))
    beside: dict[str, str] = {}  # folder, or a file at the top -> its first file of weights
    for path in source.listing:
        folder = path.partition("/")[0]
        if folder not in components and path.endswith(_WEIGHTS):
            beside.setdefault(folder, path)
    for path in beside.values():
        message = f"{path} is of no component of {_INDEX}"
        findings.append(finding("stray-file", "files", message, file=path))
    return join(_NAME, source.store.url, parts, origin, findings)


def _read_index(source: Source) -> Mapping[str, Any] | None:
    """Return the content of model_index.json; None where it is none of a pipeline."""
    try:
        index = parse(source.store.read(_INDEX, 0, source.listing[_INDEX]), _INDEX)
    except (InvalidText, MalformedCheckpoint):
        return None
    return index if isinstance(index, dict) and isinstance(index.get("_class_name"), str) else None


def _components(index: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> class of the components that a pipeline has; raise where a name is none of a folder."""
    pairs = {n: v for n, v in index.items() if type(v) is list and len(v) == 2 and not n.startswith("_")}
    components = {n: v[1] for n, v in pairs.items() if all(isinstance(text, str) for text in v)}
    for name in components:
        if not name or "/" in name or "." in name:  # it is an argument's name, and begins names of tensors
            raise MalformedCheckpoint(
                f"a component of {_INDEX} is called {short_repr(name, 60)}", file=_INDEX
            )
    return components


def _read_component(source: Source, name: str, kind: str, findings: list[Finding]) -> Part | None:
    """Return a component's tensors below its name; None for one without weights, or that is not there."""
    # A quantised folder is one of safetensors, too.
    formats = [f for f in (QUANTIZED, SAFETENSORS, TORCH_SAVE) if f.detect(source) is not None]
    if QUANTIZED in formats:
        raise UnsupportedFormat(
            f"cannot read {name} ({kind}) as a part of a pipeline: it is quantised",
            hint=f"name its own folder: {source.store.url}",
        )
    if formats:
        reader = formats[0].reader
        assert reader is not None  # both are read
        return Part(reader.read(source), name, lambda inner: f"{name}.{inner}")
    weights = [path for path in source.listing if path.endswith(_WEIGHTS)]
    if weights:
        raise AmbiguousModel(
            f"{name} has several sets of weights: {listed(weights)}",
            hint="move all but one set away, or name one file",
            candidates=[f"{name}/{path}" for path in weights],
        )
    is_model = _CONFIG in source.listing or not _STATELESS.fullmatch(kind)
    if is_model or not source.listing:
        lacks = f"weights of {name}" if source.listing else name
        message = f"{lacks} ({kind}) is not there, and {_INDEX} lists it"
        findings.append(lack(source, "missing-file", "files", message, file=f"{name}/"))
    return None


def _exchanged(parts: Sequence[Part], components: Mapping[str, str]) -> Iterator[Finding]:
    """Yield findings for files with the same tensors in components of two classes: one is a stranger."""
    owners: dict[frozenset[TensorSpec], tuple[str, str]] = {}
    for part in parts:
        manifest, kind = part.manifest, components[part.folder]
        inside: dict[int, set[TensorSpec]] = {}
        spans = pairwise(manifest.chunks.first.tolist())
        for spec, (chunk, behind) in zip(manifest.tensors, spans, strict=True):
            if chunk < behind and manifest.chunks.item[chunk] >= 0:
                inside.setdefault(int(manifest.items.file[manifest.chunks.item[chunk]]), set()).add(spec)
        for number, specs in inside.items():
            path = f"{part.folder}/{manifest.files[number].path}"
            first_path, of = owners.setdefault(frozenset(specs), (path, kind))
            if of != kind:
                message = (
                    f"{path} ({kind}) has the tensors of {first_path} ({of}): one is in the other's place"
                )
                yield finding("item-mismatch", "files", message, file=path)


def arrange(request: Arrangement, stems: Mapping[str, str]) -> tuple[FileLayout, ...]:
    """Lay out all models of a pipeline, each below its own name.

    Args:
        request: Tensors with the name of their model in front, and the object of model_index.json.
        stems: Model -> what the names of its files begin with.
    """
    positions: dict[str, list[int]] = {}
    for n, spec in enumerate(request.tensors):
        positions.setdefault(spec.fqn.partition(".")[0], []).append(n)
    layouts: list[FileLayout] = []
    for model, inside in positions.items():
        tensors = [request.tensors[n] for n in inside]
        specs = [TensorSpec(t.fqn.removeprefix(f"{model}."), t.dtype, t.shape) for t in tensors]
        alone = Arrangement(specs, max_file_bytes=request.max_file_bytes, stem=stems[model])
        for layout in arrange_model(alone):
            numbers = tuple(inside[n] for n in layout.tensors)
            layouts.append(replace(layout, path=f"{model}/{layout.path}", tensors=numbers, commit=False))
    data = (json.dumps(decode(request.objects[_OBJECT]), indent=2) + "\n").encode()
    layouts.append(FileLayout(_INDEX, len(data), (), (), (Literal(0, data),), commit=True))
    return tuple(layouts)


FORMAT = Format(
    name=_NAME,
    title="pipeline of diffusers",
    recognised_by="`model_index.json`, and a folder for each component",
    detect=detect,
    suffixes=frozenset({"json"}),
    reader=Reader(read, objects=True, several=lambda stems: Layout(partial(arrange, stems=stems))),
)
