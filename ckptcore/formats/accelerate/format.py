"""Read and write checkpoints of Accelerate and of the Hugging Face Trainer of an FSDP job, in their parts.

Model and optimizer are each a DCP folder (sharded), a file per rank (``use_dcp=False``) or one file
(full). Names: ``model.<fqn>``, ``optimizer.state.<fqn>.<key>``, ``scheduler.<key>``,
``random_states.<key>``; a second model is ``model_1``. Accelerate numbers the prepared models and optimizers;
file names omit the number of the first one. Sources: accelerate/utils/fsdp_utils.py (save_fsdp_model,
save_fsdp_optimizer), accelerate/checkpointing.py (save_accelerator_state), accelerate/utils/constants.py,
transformers/trainer.py.

Written models and optimizers are DCP folders, in which names begin with ``model`` and ``optimizer``, whatever
their number. Schedulers, samplers and scalers are torch files, and so is the random state of each rank, where
it is kept. `.metadata` of the first model comes last: the folder is recognised by it.

Beside a save of DeepSpeed the Trainer writes ``model.safetensors`` (of a LoRA, ``adapter_model.safetensors``)
beside ``latest`` and ``global_stepN/`` (transformers/trainer.py, `_save_checkpoint`). DeepSpeed's masters are
the model, and the Trainer's file is a copy of the 16-bit weights: the two are compared, neither is stray, and
a copy that lacks trained weights is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptcore.core.columnar_file import canonical_json
from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import TensorRef, decode, encode, tensors_in
from ckptcore.core.tree_paths import Path, Paths
from ckptcore.encodings.json_text import parse
from ckptcore.encodings.limits import absent
from ckptcore.encodings.pickle.writer import Classes
from ckptcore.errors import (
    AmbiguousModel,
    CkptError,
    MalformedCheckpoint,
    MetadataTooLarge,
    UnsupportedFormat,
)
from ckptcore.formats.base import (
    Arrangement,
    Evidence,
    FileLayout,
    Format,
    Layout,
    Literal,
    Reader,
    Source,
    Writer,
    natural,
)
from ckptcore.formats.common.join import Part, join, renamed_tree
from ckptcore.formats.common.rank_file_names import RankFiles
from ckptcore.formats.common.torch_file import torch_file
from ckptcore.formats.common.trees import built
from ckptcore.formats.dcp.format import thin
from ckptcore.formats.dcp.reader import read_folder
from ckptcore.formats.deepspeed.file_names import is_checkpoint
from ckptcore.formats.deepspeed.format import FORMAT as DEEPSPEED
from ckptcore.formats.deepspeed.format import read as read_deepspeed
from ckptcore.formats.huggingface.shards import with_consolidated_folder
from ckptcore.topology.layout import Topology
from ckptcore.utils.foreign_text import InvalidText

_ROLE = re.compile(r"(?P<kind>[a-z_]+?)(?:_(?P<number>\d+))?")
_FOLDERS = {"model": "pytorch_model_fsdp", "optimizer": "optimizer"}
_TRAINER_STATE = "trainer_state"  # of transformers' Trainer: its files have other suffixes
# Kind -> name of its file with a number, of its first file, and of the Trainer's.
_FILES = {
    "scheduler": ("scheduler_{}.bin", "scheduler.bin", "scheduler.pt"),
    "sampler": ("sampler_{}.bin", "sampler.bin", "sampler.bin"),
    "dl_state_dict": ("dl_state_dict_{}.bin", "dl_state_dict.bin", "dl_state_dict.bin"),
    "custom_checkpoint": ("custom_checkpoint_{}.pkl", "custom_checkpoint_0.pkl", "custom_checkpoint_0.pkl"),
    "scaler": ("scaler.pt", "scaler.pt", "scaler.pt"),
}
_OF_RANKS = {"random_states": "random_states_{}.pkl", "rng_state": "rng_state_{}.pth"}
_RANK = re.compile(r"(?P<key>.*)\.rank(?P<rank>\d+)")
# (role, path pattern) of a file that marks a DCP folder, a complete file, or a rank's file.
_FOLDER = r"(?:\.metadata(?:\.tmp)?|__\d+_\d+\.distcp)$"
_MODEL = "pytorch_model_fsdp"
_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("model", re.compile(rf"^(?P<folder>{_MODEL}_(?P<number>\d+))/{_FOLDER}")),
    ("model", re.compile(rf"^{_MODEL}(?:_(?P<number>\d+))?\.bin$")),
    ("model", re.compile(rf"^{_MODEL}(?:_(?P<number>\d+))?_rank(?P<rank>\d+)\.bin$")),
    ("optimizer", re.compile(rf"^(?P<folder>optimizer_(?P<number>\d+))/{_FOLDER}")),
    ("optimizer", re.compile(r"^optimizer(?:_(?P<number>\d+))?\.(?:bin|pt)$")),
    ("optimizer", re.compile(r"^optimizer(?:_(?P<number>\d+))?_rank(?P<rank>\d+)\.bin$")),
)
# The trainer's own state: read where its pickles are plain.
_STATES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("scheduler", re.compile(r"^scheduler(?:_(?P<number>\d+))?\.(?:bin|pt)$")),
    ("scaler", re.compile(r"^scaler\.pt$")),
    ("sampler", re.compile(r"^sampler(?:_(?P<number>\d+))?\.bin$")),
    ("dl_state_dict", re.compile(r"^dl_state_dict(?:_(?P<number>\d+))?\.bin$")),
    ("custom_checkpoint", re.compile(r"^custom_checkpoint_(?P<number>\d+)\.pkl$")),
    ("random_states", re.compile(r"^random_states_(?P<rank>\d+)\.pkl$")),
    ("rng_state", re.compile(r"^rng_state(?:_(?P<rank>\d+))?\.pth$")),
)
_WRITER = re.compile(rf"^(?:(?:{_MODEL}_|optimizer_)\d+/__(?=\d)|(?:{_MODEL}|optimizer)(?:_\d+)?_rank)(\d+)")
_NAME = "accelerate"
_TRAINER = "trainer_state.json"
_MAX_JSON = 64 << 20
_MAX_LISTED = 100
COPIES = ("safetensors", "hf_quantized")  # formats of the Trainer's own file
_16_BIT, _MASTERS, _STATE = "lp/", "module.", "optimizer.state."  # of DeepSpeed's names
# PEFT leaves out the adapter's name, and with it the wrapper of a module that is trained beside adapters
# (peft/utils/save_and_load.py, `get_peft_model_state_dict`).
_ADAPTER = re.compile(r"\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)(?=\.|$)")
_WRAPPER = re.compile(r"\.modules_to_save\.default(?=\.)")


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One part of a folder.

    Attributes:
        role: ``model``, ``optimizer_1``, ``scheduler``...
        folder: Folder of a DCP part, else "".
        files: Files of any other part.
    """

    role: str
    folder: str
    files: RankFiles

    @property
    def label(self) -> str:
        """Return the folder, or the first of the files."""
        return self.folder or next(iter(self.files.paths.values()))


def parts(source: Source) -> tuple[SavedPart, ...]:
    """Return the models, then the optimizers; a folder and a file of one name are two parts."""
    return tuple(_parts_by_name(source, _PARTS))


def states(source: Source) -> tuple[SavedPart, ...]:
    """Return the parts of the trainer's own state."""
    return tuple(_parts_by_name(source, _STATES))


def writers(source: Source) -> frozenset[int]:
    """Return the ranks that wrote a file of a model or an optimizer.

    In a DCP folder each rank writes one, empty or not.
    """
    return frozenset(int(m[1]) for p in source.listing if (m := _WRITER.match(p)))


def of_a_rank(part: SavedPart) -> bool:
    """Return whether every rank writes a file of this part."""
    return any(re.search(r"_\d+\.(?:pkl|pth)$", p) for p in part.files.paths.values()) and (
        part.role in ("random_states", "rng_state")
    )


def has_model(source: Source) -> bool:
    """Return whether a folder has the file names of a model that Accelerate saved with FSDP."""
    if source.name is not None or ".metadata" in source.listing:
        return False
    named = [p for p in source.listing if p.startswith(_MODEL)]
    return bool(named) and any(role == "model" and rule.match(p) for role, rule in _PARTS for p in named)


def _parts_by_name(source: Source, table: tuple[tuple[str, re.Pattern[str]], ...]) -> Iterator[SavedPart]:
    for role, rule in table:
        groups: dict[tuple[int, str], dict[int, str]] = {}
        for path in sorted(source.listing, key=natural):
            m = rule.match(path)
            if m is None:
                continue
            fields = m.groupdict()
            number = int(fields.get("number") or 0)
            folder = fields.get("folder") or ""
            groups.setdefault((number, folder), {})[int(fields.get("rank") or 0)] = path
        for (number, folder), paths in sorted(groups.items()):
            name = role if number == 0 else f"{role}_{number}"
            yield SavedPart(name, folder, RankFiles(name, None, paths))


def detect(source: Source) -> Evidence | None:
    """Recognise a model by Accelerate's name, unless a *.safetensors beside it is what loaders read."""
    if not has_model(source):
        return None
    saved_parts = parts(source)
    folders = any(p.folder for p in saved_parts if p.role.startswith("model"))
    if not folders and any(p.endswith(".safetensors") and "/" not in p for p in source.listing):
        return None
    return Evidence(
        _NAME, (f"found {', '.join(p.label for p in saved_parts)}",), ("torch_ranks", "torch_save")
    )


def read(source: Source) -> Manifest:
    """Read the manifest of all parts together; a missing part is a finding.

    Raises:
        NotComplete: A DCP folder has no metadata.
        UnsupportedFormat: The ranks saved local state dicts.
        AmbiguousModel: A part exists twice.
    """
    from ckptcore.formats.torch_ranks.reader import RankReader

    builder = Builder()
    reader = RankReader(source, builder)
    folders: list[Part] = []
    by_role: dict[str, SavedPart] = {}
    for part in parts(source):
        if part.role in by_role:
            raise AmbiguousModel(
                f"{by_role[part.role].label} and {part.label} are both the {part.role}: "
                "two saves in one folder",
                hint="move one of them away, or name the folder to read",
            )
        by_role[part.role] = part
        if part.folder:
            inner = read_folder(source.below(part.folder), _NAME)
            folders.append(Part(inner, part.folder, _renaming(part.role)))
        else:
            reader.add(part.files, part.role)
    # After all parts: the files of each show ranks that took part.
    for part in by_role.values():
        builder.findings += () if part.folder else reader.missing(part.files)
    if not any(role.startswith("optimizer") for role in by_role):
        builder.report("missing-part", "files", "there is no optimizer beside the model", file="optimizer_0")
    world = max(writers(source), default=-1) + 1
    for part in states(source):
        try:
            reader.add(part.files, part.role, optional=True)
        except MalformedCheckpoint as error:
            builder.report("malformed-item", "coverage", error.message, file=part.label)
        highest = max(part.files.paths)
        ranks = max(highest + 1, world if of_a_rank(part) else 0)
        for rank in absent(part.files.paths, ranks, _MAX_LISTED):
            path = part.files.name_of(rank)
            builder.report("missing-part", "files", f"{path} is missing; other ranks have theirs", file=path)
        if of_a_rank(part) and 0 < world <= highest:
            path = part.files.paths[highest]
            message = (
                f"{path} is the only file of its rank: rank {world - 1} is the last rank with other files"
            )
            builder.report("missing-part", "files", message, file=path)
    origin: dict[str, Any] = {"parts": list(by_role)}
    _trainer_state(source, builder, origin)
    if reader.world:
        origin["world_size"] = reader.world
    paths = reader.paths
    for folder in folders:
        for name, where in Paths.of(folder.manifest).items():
            renamed = folder.rename(name)
            paths.add(renamed, where if renamed == name else (renamed.split(".", 1)[0], *where[1:]))
    folders.append(Part(builder.build(_NAME, source.store.url, {})))
    joined = join(_NAME, source.store.url, folders, origin)
    form = paths.form([t.fqn for t in joined.tensors], [b.key for b in joined.blobs])
    return replace(joined, origin={**origin, "paths": form}) if form else joined


def _renaming(role: str) -> Callable[[str], str]:
    """Return the renaming of a DCP part's keys, which begin with ``model`` or ``optimizer`` in every part."""
    plain = role.rstrip("0123456789").rstrip("_")
    if plain == role:
        return str
    return lambda name: role + name.removeprefix(plain) if name.startswith(plain + ".") else f"{role}.{name}"


def _trainer_state(source: Source, builder: Builder, origin: dict[str, Any]) -> None:
    """Add the Trainer's ``trainer_state.json`` as an object of its own."""
    size = source.listing.get(_TRAINER, 0)
    if not 0 < size <= _MAX_JSON:
        return
    try:
        state = parse(source.store.read(_TRAINER, 0, size), _TRAINER)
        tree = encode(state)
    except MetadataTooLarge:
        raise
    except (CkptError, InvalidText, TypeError) as error:
        builder.report("malformed-metadata", "files", f"{_TRAINER}: {error}", file=_TRAINER, hint="")
        return
    source.explain(_TRAINER)
    builder.blobs.append(Blob("trainer_state", -1, tree))
    if isinstance(state, dict) and type(state.get("global_step")) is int:
        origin["step"] = state["global_step"]


def keeps_its_place(source: Manifest) -> Callable[[Path], Path]:
    """Return the mapping of paths: every path stays as it is.

    Raises:
        UnsupportedFormat: The source is not of a job under Accelerate's FSDP.
    """
    if not (source.origin.get("parts") and Paths.of(source)):
        raise UnsupportedFormat(
            f"{source.root} must be a folder of Accelerate or the Trainer (got {source.format}, without "
            "pytorch_model_fsdp_0 beside its optimizer)",
            hint="--to dcp writes rank files from any source",
        )
    return lambda path: path


def arrange(request: Arrangement) -> tuple[FileLayout, ...]:
    """Lay out all parts; raise `UnsupportedFormat` for a part that no file of Accelerate has."""
    names = [*(t.fqn for t in request.tensors), *request.objects]
    roles: dict[str, list[str]] = {}
    for name in names:
        roles.setdefault(name.partition(".")[0], []).append(name)
    world = 1 if request.topology is None else request.topology.mesh.size
    layouts: list[FileLayout] = []
    for role, inside in sorted(roles.items()):
        match = _ROLE.fullmatch(role)
        kind, number = (match["kind"], int(match["number"] or 0)) if match is not None else (role, 0)
        if kind in _FOLDERS:
            layouts += _folder(request, role, kind, number)
        elif kind in _FILES:
            which = 0 if number else 2 if _TRAINER_STATE in roles else 1
            layouts.append(_file(_FILES[kind][which].format(number), _tree(request, inside), request.tensors))
        elif kind in _OF_RANKS:
            layouts += _of_ranks(request, inside, _OF_RANKS[kind], world)
        elif role == _TRAINER_STATE and inside == [role]:
            data = canonical_json(decode(request.objects[role]))
            layouts.append(FileLayout(f"{role}.json", len(data), (), (), (Literal(0, data),)))
        else:
            raise UnsupportedFormat(
                f"cannot write {inside[0]}: no file of Accelerate has it",
                hint=f"leave it out with --exclude '{role}*'",
            )
    last = f"{_FOLDERS['model']}_0/.metadata"
    return (
        *(x for x in layouts if x.path != last),
        *(replace(x, commit=True) for x in layouts if x.path == last),
    )


def _folder(request: Arrangement, role: str, kind: str, number: int) -> Iterator[FileLayout]:
    """Yield the files of a model or an optimizer, under the names that it has in its own folder."""
    from ckptcore.formats.dcp.writer import arrange_folder

    def inner(name: str) -> str:
        return kind + name.removeprefix(role)

    stored = [i for i, t in enumerate(request.tensors) if _is_of(t.fqn, role)]
    specs = [request.tensors[i] for i in stored]
    topology = request.topology
    if topology is not None:
        layouts = {inner(t.fqn): topology.layout(t.fqn) for t in specs}
        topology = Topology(topology.mesh, layouts)
    part = replace(
        request,
        tensors=[TensorSpec(inner(t.fqn), t.dtype, t.shape) for t in specs],
        objects={inner(k): renamed_tree(v, inner) for k, v in request.objects.items() if _is_of(k, role)},
        paths={inner(n): (kind, *p[1:]) for n, p in request.paths.items() if _is_of(n, role)},
        order=[inner(name) for name in request.order if _is_of(name, role)],
        topology=topology,
    )
    for layout in arrange_folder(part, folder=f"{_FOLDERS[kind]}_{number}", commit=False):
        yield replace(layout, tensors=tuple(stored[t] for t in layout.tensors))


def _is_of(name: str, role: str) -> bool:
    return name == role or name.startswith(f"{role}.")


def _tree(request: Arrangement, names: Sequence[str]) -> dict[Any, Any]:
    """Return the content of a torch file, whose keys are those below its role."""
    paths = (request.paths.get(name, tuple(name.split(".", 1)))[1:] for name in names)
    return built((name, path, _value(request, name)) for name, path in zip(names, paths, strict=True))


def _value(request: Arrangement, name: str) -> Any:
    return decode(request.objects[name]) if name in request.objects else TensorRef(name)


def _of_ranks(request: Arrangement, names: Sequence[str], pattern: str, world: int) -> Iterator[FileLayout]:
    """Yield the file of each rank: what is its own, and what all have."""
    common = [name for name in names if _RANK.fullmatch(name) is None]
    rank_names: dict[int, dict[str, str]] = {}
    for name in names:
        if (match := _RANK.fullmatch(name)) is not None:
            rank_names.setdefault(int(match["rank"]), {})[match["key"].partition(".")[2]] = name
    for rank in range(max(world, max(rank_names, default=-1) + 1)):
        tree = _tree(request, common)
        tree |= {key: _value(request, name) for key, name in rank_names.get(rank, {}).items()}
        yield _file(pattern.format(rank), tree, request.tensors)


def _file(path: str, tree: Mapping[Any, Any], tensors: Sequence[TensorSpec]) -> FileLayout:
    inside = set(tensors_in(tree))
    order = [i for i, spec in enumerate(tensors) if spec.fqn in inside]
    return torch_file(path, tree, tensors, order, classes=Classes.LIBRARIES)


_LAYOUT = Layout(arrange, nests=True, place=keeps_its_place, values="libraries", flattens=True)
FORMAT = Format(
    name=_NAME,
    title="Accelerate or Hugging Face Trainer checkpoint of an FSDP job",
    recognised_by="`pytorch_model_fsdp_N/` or `pytorch_model_fsdp*.bin`, beside `optimizer_N/`",
    detect=detect,
    reader=Reader(read, checksums="CRC-32 per item", objects=True),
    writer=Writer(_LAYOUT, for_mesh=_LAYOUT),
    thin=thin,
)


def with_copy(folder: str, source: Source) -> Format | None:
    """Return the format that reads a folder with a save of DeepSpeed below it; None without one."""
    if DEEPSPEED.reader is None or not is_checkpoint(source.below(folder).listing):
        return None
    reader = Reader(
        partial(_read_with_copy, folder=folder), DEEPSPEED.reader.checksums, DEEPSPEED.reader.objects
    )
    return replace(DEEPSPEED, reader=reader)


def _read_with_copy(source: Source, /, *, folder: str) -> Manifest:
    """Read the manifest of DeepSpeed's save, with the tensors of the Trainer's file as copies."""
    save = read_deepspeed(source.below(folder))
    names = {t.fqn for t in save.tensors}
    wrapped = {_WRAPPER.sub("", name): name for name in names if _WRAPPER.search(name)}

    def name_of(name: str) -> str:
        for inner in (name, _ADAPTER.sub(r".\1.default", name)):
            for start in (_16_BIT, _MASTERS):
                stored = wrapped.get(start + inner, start + inner)
                if stored in names:
                    return stored
        return _MASTERS + name

    joined = join(save.format, source.store.url, [Part(save, folder)], save.origin)
    # What was trained has optimizer state; frozen weights are in no file of an adapter.
    trained = {n.removeprefix(_STATE).rpartition(".")[0]: None for n in names if n.startswith(_STATE)}
    required = [name_of(name) for name in sorted(trained, key=natural) if _MASTERS + name in names]
    return with_consolidated_folder(replace(joined, order=save.order), source, "", name_of, required)
