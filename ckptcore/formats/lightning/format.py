"""Read and write Lightning and Fabric checkpoints: sharded folders and full files.

A sharded checkpoint is a DCP folder with `meta.pt` beside it, which is written last and contains
everything that is neither model nor optimizer. FSDPStrategy keeps the model under ``model``,
ModelParallelStrategy under ``state_dict``; optimizers are ``optimizer_0``, ... (lightning/pytorch/
strategies/fsdp.py and model_parallel.py, save_checkpoint). Fabric keeps the user's own names
(lightning/fabric/strategies/fsdp.py). The output is that of Lightning's consolidation: one dict with the
values of `meta.pt`, ``state_dict`` and the list ``optimizer_states``
(pytorch/utilities/consolidate_checkpoint.py), or Fabric's own structure. For the ranks of a mesh it is
such a folder again: values of modules and optimizers, which are nested at least once, are in the DCP folder.
Loaders open `meta.pt` first.

Values of classes that are not permitted are left out one by one, by name; all others stay.

A full file names the parameters of its optimizers where it proves them itself: the Trainer keeps the numbers
of torch's optimizers, and the FSDP and ModelParallel strategies number in the order of the model's parameters
(lightning/pytorch/strategies/fsdp.py and model_parallel.py, optimizer_state).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Blob, Envelope, Item, Manifest
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.named_values import CONTAINERS, content_of, with_content
from ckptcore.core.object_tree import Named, Refused, RefusedTensor, TensorRef, decode, references, tensors_in
from ckptcore.core.tree_paths import Path, Paths
from ckptcore.encodings.limits import bound_views
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, StoredView
from ckptcore.encodings.pickle.unpickler import Call
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP
from ckptcore.encodings.torchzip.reader import Objects, head_holds, is_torch, read_objects
from ckptcore.errors import Finding, NameMismatch, NotComplete, UnsupportedFormat, finding
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Reader,
    Source,
    Writer,
    natural,
)
from ckptcore.formats.common.join import Part, join
from ckptcore.formats.common.optimizer_numbers import NumberingProof, Shape, numbered, prove
from ckptcore.formats.common.part_proof import part_findings
from ckptcore.formats.common.rank_file_names import without_links
from ckptcore.formats.common.torch_file import torch_file
from ckptcore.formats.common.trees import built, kind_of
from ckptcore.formats.dcp.format import thin
from ckptcore.formats.dcp.objects import adopt
from ckptcore.formats.dcp.reader import DATA, read_folder
from ckptcore.formats.torch_save.tree import add_unread, note_hidden_at
from ckptcore.store.subfolder import FileRange

META, VERSION = "meta.pt", "pytorch-lightning_version"
_MAX_LISTED = 100
_MODELS = ("state_dict", "model")
NAME, DEFAULT = "lightning", "checkpoint.ckpt"
_OPTIMIZER = re.compile(r"optimizer_(\d{1,9})$")
_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
_FACTS = ("epoch", "global_step")
# torch/nn/modules/batchnorm.py, _NormBase.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _no_arguments(*args: Any) -> dict[Any, Any]:
    if args:
        raise ValueError("AttributeDict with arguments")
    return {}


# A container of hyperparameters, Lightning's own: a dict with attributes
# (fabric/utilities/data.py; before 2.0 in the packages pytorch_lightning and lightning_fabric).
TABLE: dict[str, Any] = {
    **OBJECT_TABLE,
    **{
        f"{module}.AttributeDict": Call("AttributeDict", _no_arguments)
        for module in (
            "lightning.fabric.utilities.data",
            "lightning_fabric.utilities.data",
            "lightning.pytorch.utilities.parsing",
            "pytorch_lightning.utilities.parsing",
        )
    },
}


@dataclass(frozen=True, slots=True)
class Contents:
    """A parsed file.

    Attributes:
        objects: Everything that was parsed.
        tree: The dict, without refused values.
        lost: (path of a value, what was refused of it).
    """

    objects: Objects
    tree: dict[Any, Any]
    lost: tuple[tuple[tuple[Any, ...], Refused], ...]


def contents(source: Source, name: str) -> Contents:
    """Parse a file.

    Raises:
        MalformedCheckpoint: The file cannot be parsed.
        UnsafeContent: The file names globals that are not permitted.
        UnsupportedFormat: The file does not contain a dict.
    """
    store, size = source.store, source.listing[name]
    objects = read_objects(FileRange(store, name, 0, size), name, TABLE)
    if not isinstance(objects.tree, dict):
        raise UnsupportedFormat(f"{name} must contain a dict (got {kind_of(objects.tree)})")
    lost: list[tuple[tuple[Any, ...], Refused]] = []
    tree = _without_refused(objects.tree, (), lost)
    return Contents(objects, tree if isinstance(tree, dict) else {}, tuple(lost))


def read_tree(source: Source, name: str, read: Contents, origin: dict[str, Any]) -> Manifest:
    """Return the manifest of a file: each top-level value is an object, the tensors inside are tensors.

    Args:
        source: The folder of the file.
        name: Path of the file.
        read: Its parsed content.
        origin: Origin of the manifest.

    Raises:
        MalformedCheckpoint: The tensors are far larger than the file.
    """
    builder = Builder()
    size = source.listing[name]
    file = builder.file(name, size)
    item = Item(file, 0, size, Envelope.TORCHZIP)
    paths = Paths()
    for key, value in read.tree.items():
        form = adopt(builder, str(key), item, replace(read.objects, tree=value), name)
        builder.blobs.append(Blob(str(key), -1, form))
        paths.add(str(key), (str(key),))
    _add_findings(builder, read, name)
    bound_views(sum(t.nbytes for t in builder.tensors), size, name)
    form = paths.form([t.fqn for t in builder.tensors], [b.key for b in builder.blobs])
    return builder.build(NAME, source.store.url, origin | ({"paths": form} if form else {}))


def _add_findings(builder: Builder, read: Contents, name: str) -> None:
    """Add findings about what was left out, and about tensors inside it."""
    used = {v.key for v in _views(read.tree)} | {
        key for _, v in read.lost if isinstance(v, RefusedTensor) for key in v.storages
    }
    hidden = sum(n for k, (_, n, _) in read.objects.storages.items() if n and k not in used)
    left_out: list[tuple[tuple[Any, ...], Refused]] = []
    for path, value in read.lost:
        where = ".".join(map(str, path))
        if isinstance(value, RefusedTensor):
            add_unread(builder, where, value, name)
        elif hidden and path[0] in _MODELS:  # probably a weight
            note_hidden_at(builder, where, value, hidden, name)
        else:
            left_out.append((path, value))
    for path, value in left_out[:_MAX_LISTED]:
        where = ".".join(map(str, path))
        builder.report(
            "refused-global", "files", f"{where} needs {value.name}: left out", fqn=where, file=name
        )
    if len(left_out) > _MAX_LISTED:
        unlisted = len(left_out) - _MAX_LISTED
        builder.report("refused-global", "files", f"{unlisted} more values of {name} are left out", file=name)
    if hidden:
        gone = sorted({str(path[0]) for path, _ in left_out}) or ([] if read.lost else [name])
        # The pickle does not record the owner: each candidate must be left out by name.
        builder.findings += [
            finding(
                "refused-tensors",
                "coverage",
                f"{key} or another of {name}: cannot read {hidden} bytes of tensors inside refused values",
                fqn=key,
                file=name,
            )
            for key in gone
        ]


def _without_refused(value: Any, path: tuple[Any, ...], lost: list[tuple[tuple[Any, ...], Refused]]) -> Any:
    """Return a value without dict entries and attributes that need refused globals; they go into ``lost``.

    A sequence with such an element is left out completely, because positions have a meaning. What is left out
    is a `Refused` value.
    """
    if isinstance(value, Refused):
        return value
    if isinstance(value, Call):  # a class of the allow-list that is a value itself
        return Refused(value.name)
    if isinstance(value, Named):
        if value.kind == "ndarray" and "refused" in value.value:
            return Refused(value.value["refused"])
        if value.kind in CONTAINERS:
            inside = _without_refused(content_of(value.kind, value.value), path, lost)
            if isinstance(inside, Refused):
                return inside
            return Named(value.kind, with_content(value.kind, value.value, inside))
        if isinstance(value.value, dict) and value.kind != "ndarray":
            return Named(value.kind, _without_refused(value.value, path, lost))
        return value.value if isinstance(value.value, Refused) else value
    if isinstance(value, dict):
        permitted = type(value)()
        for k, v in value.items():
            new = k if isinstance(k, Refused) else _without_refused(v, (*path, k), lost)
            if isinstance(new, Refused):
                lost.append(((*path, k.name if isinstance(k, Refused) else k), new))
            else:
                permitted[k] = new
        return permitted
    if isinstance(value, (list, tuple)):
        items = [_without_refused(v, (*path, n), lost) for n, v in enumerate(value)]
        refused = next((v for v in items if isinstance(v, Refused)), None)
        return refused or (items if isinstance(value, list) else tuple(items))
    if isinstance(value, (set, frozenset)):
        return next((v for v in value if isinstance(v, Refused)), value)
    return value


def _views(tree: Any) -> list[StoredView]:
    views, queue = [], [tree]
    while queue:
        value = queue.pop()
        if isinstance(value, StoredView):
            views.append(value)
        elif isinstance(value, Named):
            queue.append(value.value)
        elif isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, (list, tuple)):
            queue += value
    return views


def detect(source: Source) -> Evidence | None:
    """Recognise `meta.pt` beside a DCP folder, or one torch file with the Trainer's version key."""
    if source.name is None and META in source.listing:
        beside = [p for p in source.listing if "/" not in p and p != META]
        saved = [p for p in beside if DATA.search(p) or p in (".metadata", ".metadata.tmp")]
        if saved:
            evidence = (
                "`.metadata`" if ".metadata" in saved else f"{len(saved)} file(s) of an unfinished save"
            )
            return Evidence(NAME, (f"found {META}", f"and {evidence}"), ("dcp",))
        if not any(p.endswith(_SUFFIXES) for p in beside):
            return Evidence(NAME, (f"found {META} alone",), ("torch_save",))
    name = _file(source)
    size = source.listing.get(name or "", 0)
    if name is None or not is_torch(source.store.read(name, 0, min(size, BEFORE_ZIP))):
        return None
    if not head_holds(lambda start, n: source.store.read(name, start, n), size, VERSION, name):
        return None
    tree = contents(source, name).tree
    if VERSION not in tree or not isinstance(tree.get("state_dict"), dict):
        return None
    return Evidence(NAME, (f"{name} holds state_dict and {VERSION} {tree[VERSION]}",), ("torch_save",))


def read(source: Source) -> Manifest:
    """Read the manifest of a sharded or full checkpoint.

    Raises:
        NotComplete: `.metadata` is missing.
        MalformedCheckpoint: A file cannot be parsed.
        UnsafeContent: A file names globals or paths that are not permitted.
    """
    name = _file(source)
    if name is not None:
        content = contents(source, name)
        facts = _writer_facts(content, "trainer")
        facts["lightning"]["full"] = True
        names, unproven = parameter_names(content.tree, name)
        if names:
            facts["lightning"]["parameters"] = names
        manifest = read_tree(source, name, content, facts)
        parts = part_findings(source, (name,), {t.fqn: t.shape for t in manifest.tensors})
        return _with_model(replace(manifest, findings=(*manifest.findings, *unproven, *parts)), "state_dict")
    if not any(DATA.search(p) or p.startswith(".metadata") for p in source.listing):
        raise NotComplete(
            f"{source.store.url} contains {META} of a sharded Lightning checkpoint, but no other file of it",
            hint="copy .metadata and the *.distcp files from where it was saved",
        )
    folder = read_folder(source, NAME)
    content = contents(source, META)
    beside = read_tree(source, META, content, {})
    trainer = VERSION in content.tree
    # Lightning's consolidation puts the Trainer's model and optimizers last, and Fabric's first.
    paths = _both_paths(beside, folder) if trainer else _both_paths(folder, beside)
    origin = {**folder.origin, **_writer_facts(content, "trainer" if trainer else "fabric")}
    findings = []
    if not folder.tensors and not folder.blobs:  # the content of meta.pt must not hide that
        findings.append(finding("no-tensors", "coverage", "the metadata names no tensor and no object"))
    joined = join(NAME, source.store.url, [Part(folder), Part(beside)], origin, findings)
    form = paths.form([t.fqn for t in joined.tensors], [b.key for b in joined.blobs])
    joined = replace(joined, origin={**origin, **({"paths": form} if form else {})})
    tops = {p[0] for p in paths.values()}
    root = next((m for m in ("model", "state_dict") if m in tops), None)
    return _with_model(joined, root) if trainer and root else joined


def place(source: Manifest) -> Callable[[Path], Path]:
    """Return the mapping from the paths of a Lightning checkpoint to those in the single file.

    Raises:
        UnsupportedFormat: The source is not a Lightning checkpoint, or does not record its paths.
    """
    facts = lightning_facts(source, "--to torch_save writes one file from any source")
    if facts["by"] == "fabric":
        return lambda path: path
    values = {b.key for b in source.blobs} if facts.get("full") else None
    recorded_paths = Paths.of(source)  # at least those of the values in meta.pt
    if values is None and not any(t.fqn in recorded_paths for t in source.tensors):
        raise UnsupportedFormat(
            f"{source.root}: .metadata does not record which names are nested in which",
            hint="--to torch_save keeps the names as they are",
        )

    def trainer(path: Path) -> Path:
        top = str(path[0])
        if values is not None:
            if top not in values:
                raise NameMismatch(
                    f"cannot write {top}: it is in a list or tuple with an element that is left out",
                    hint="leave out all of the list, or none of it",
                )
            return path
        if top == "model":
            return ("state_dict", *path[1:])
        index = _OPTIMIZER.match(top)
        return ("optimizer_states", int(index[1]), *path[1:]) if index else path

    return trainer


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out one file with the nested dict; raise `NameMismatch` for names that do not nest."""
    order = sorted(range(len(request.tensors)), key=lambda i: natural(request.tensors[i].fqn))
    trees = {key: decode(form) for key, form in request.objects.items()}
    inside = {name for t in trees.values() for name in tensors_in(t)}
    alone = [t.fqn for t in request.tensors if t.fqn not in inside]
    rank = {name: n for n, name in enumerate(request.paths)}
    names = sorted([*alone, *trees], key=lambda n: rank.get(n, len(rank)))
    tree = built((n, request.paths.get(n, (n,)), trees.get(n, TensorRef(n))) for n in names)
    path = request.single or DEFAULT
    return (torch_file(path, tree, request.tensors, order, commit=True, classes=Classes.TRAINERS),)


def lightning_facts(source: Manifest, hint: str) -> Mapping[str, Any]:
    """Return what a Lightning checkpoint records about itself.

    Args:
        source: The checkpoint.
        hint: The next step if it is none.

    Raises:
        UnsupportedFormat: The source is not a Lightning checkpoint.
    """
    facts: Mapping[str, Any] | None = source.origin.get("lightning")
    if facts is None:
        raise UnsupportedFormat(
            f"{source.root} must be a Lightning checkpoint (got {source.format}, without the {META} that a "
            "Trainer or Fabric writes)",
            hint=hint,
        )
    return facts


def keeps_its_place(source: Manifest) -> Callable[[Path], Path]:
    """Return the mapping of paths for a sharded checkpoint: every path stays as it is.

    Raises:
        UnsupportedFormat: The source is not a sharded Lightning checkpoint, or does not record its paths.
    """
    facts = lightning_facts(source, "--to dcp writes rank files from any source")
    if facts.get("full"):
        raise UnsupportedFormat(
            f"{source.root} is a full checkpoint, whose optimizers number their parameters",
            hint="Lightning loads a full checkpoint on any number of ranks",
        )
    if not Paths.of(source):
        raise UnsupportedFormat(
            f"{source.root}: .metadata does not record which names are nested in which",
            hint="--to dcp keeps the names as they are",
        )
    return lambda path: path


def _file(source: Source) -> str | None:
    """Return the file that the user named, or the only one of a folder."""
    if source.name is not None:
        return source.name
    files = [p for p in source.listing if p.endswith(_SUFFIXES) and "/" not in p]
    # Two names may be a save and a link to it; more than two are several saves.
    files = without_links(source, files) if len(files) == 2 else files
    has_other_format = any(p.endswith((".metadata", ".distcp", ".safetensors")) for p in source.listing)
    return files[0] if len(files) == 1 and not has_other_format and files[0] != META else None


def _writer_facts(content: Contents, by: str) -> dict[str, Any]:
    """Return what the writer records about itself."""
    facts: dict[str, Any] = {"by": by}
    if isinstance(content.tree.get(VERSION), str):
        facts["version"] = content.tree[VERSION]
    facts |= {k: content.tree[k] for k in _FACTS if type(content.tree.get(k)) is int}
    return {"lightning": facts}


def _both_paths(first: Manifest, second: Manifest) -> Paths:
    paths = Paths.of(first)
    for name, path in Paths.of(second).items():
        paths.add(name, path)
    return paths


def _with_model(manifest: Manifest, root: str) -> Manifest:
    """Note where the model is: below the only attribute of the LightningModule, if there is just one."""
    from ckptcore.naming.rename import WRAPPERS

    start = f"{root}."
    names = [t.fqn[len(start) :] for t in manifest.tensors if t.fqn.startswith(start)]
    if not names:
        return manifest
    because = f"Lightning keeps the module's {len(names)} tensors under {root}"
    attribute = _attribute_of_all(names)
    while f"{attribute}." in WRAPPERS:  # the module was compiled
        start += f"{attribute}."
        names = [name[len(attribute) + 1 :] for name in names]
        attribute = _attribute_of_all(names)
    if attribute:
        start += f"{attribute}."
        because += f", all of them under its attribute {attribute}"
    return replace(manifest, origin={**manifest.origin, "model": {"prefix": start, "because": because}})


def _attribute_of_all(names: Iterable[str]) -> str:
    """Return the first part of all names, "" where they differ in it, or one has no other."""
    first = {name.partition(".")[0] if "." in name else "" for name in names}
    return first.pop() if len(first) == 1 else ""


def arrange_sharded(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out the files that the ranks of a mesh write: those of the DCP folder, then `meta.pt`."""
    from ckptcore.formats.dcp.writer import arrange_folder

    beside = {k: v for k, v in request.objects.items() if len(request.paths.get(k, (k,))) == 1}
    inside = {name for form in beside.values() for name in references(form)}
    stored = [i for i, t in enumerate(request.tensors) if t.fqn not in inside]
    part = replace(
        request,
        tensors=[request.tensors[i] for i in stored],
        objects={k: v for k, v in request.objects.items() if k not in beside},
    )
    layouts = [
        replace(layout, tensors=tuple(stored[t] for t in layout.tensors))
        for layout in arrange_folder(part, commit=False)
    ]
    rank = {name: n for n, name in enumerate(request.paths)}
    keys = sorted(beside, key=lambda k: rank.get(k, len(rank)))
    tree = {request.paths.get(key, (key,))[0]: decode(beside[key]) for key in keys}
    number = {t.fqn: i for i, t in enumerate(request.tensors)}
    order = [number[name] for name in sorted(tensors_in(tree), key=natural)]
    return (*layouts, torch_file(META, tree, request.tensors, order, commit=True, classes=Classes.TRAINERS))


FORMAT = Format(
    name=NAME,
    title="Lightning and Fabric checkpoint (Trainer, FSDPStrategy, ModelParallelStrategy)",
    recognised_by="`meta.pt` beside a DCP folder; a torch zip with the key `pytorch-lightning_version`",
    detect=detect,
    suffixes=frozenset({"pt", "ckpt", "pth", "bin"}),
    reader=Reader(read, checksums="CRC-32 per item or record", objects=True),
    writer=Writer(
        Layout(arrange, nests=True, place=place, values="trainers", torch_load=True),
        for_mesh=Layout(arrange_sharded, nests=True, place=keeps_its_place, values="trainers", flattens=True),
        single_file=True,
    ),
    thin=thin,
)


def parameter_names(tree: Mapping[Any, Any], file: str) -> tuple[dict[str, dict[str, str]], list[Finding]]:
    """Return names of the parameters, and findings for optimizers without a proof.

    Args:
        tree: Content of the file.
        file: Its path, for findings.

    Returns:
        (index in ``optimizer_states`` -> number -> name, with index and number as text; findings).
    """
    states, model = tree.get("optimizer_states"), tree.get("state_dict")
    if not isinstance(states, list) or not isinstance(model, dict):
        return {}, []
    optimizers = {n: o for n, state in enumerate(states) if (o := numbered(state)) is not None}
    proofs = prove(
        _possible_parameters(model),
        list(optimizers.values()),
        lambda v: v.shape if isinstance(v, StoredView) else None,
    )
    names: dict[str, dict[str, str]] = {}
    findings: list[Finding] = []
    for (n, optimizer), proof in zip(optimizers.items(), proofs, strict=True):
        if proof.names:
            names[str(n)] = {str(i): name for i, name in sorted(proof.names.items())}
        elif proof.names is None:
            findings.append(_unproven(f"optimizer_states.{n}", len(optimizer.ids), proof, file))
    return names, findings


def _unproven(where: str, count: int, proof: NumberingProof, file: str) -> Finding:
    message = f"{where} numbers its {count} parameters: {proof.why}"
    return finding("unnamed-states", "files", message, fqn=where, file=file)


def _possible_parameters(model: Mapping[Any, Any]) -> list[tuple[str, Shape]]:
    """Return the possible parameters, tied ones once; a state dict has the order of ``parameters()``."""
    views: set[StoredView] = set()
    parameters: list[tuple[str, Shape]] = []
    for name, value in model.items():
        if isinstance(name, str) and _may_be_parameter(name, value) and value not in views:
            if value.shape.count(0) == 0:  # empty storages are all alike
                views.add(value)
            parameters.append((name, value.shape))
    return parameters


def _may_be_parameter(name: str, value: Any) -> bool:
    """Return whether a value is a tensor that can have a gradient, and no buffer of torch's own norms."""
    if not isinstance(value, StoredView) or BY_NAME[value.dtype].kind not in "fc":
        return False
    return name.rpartition(".")[2] not in _BUFFERS
