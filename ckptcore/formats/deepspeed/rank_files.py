"""Read the model-state files of a DeepSpeed checkpoint, and find out which ranks wrote it.

Every ``*_model_states.pt`` records the step, the world sizes and the version of DeepSpeed
(deepspeed/runtime/engine.py, `_save_checkpoint`): files that disagree are of different saves. Optimizer files
record no step: their sizes are compared with the parameters', and their step counts with each other. Beside
what Megatron-LM and torch pickle (client state may hold parsed arguments and random states), a file names a
few classes of DeepSpeed's own. Each becomes a plain value; nothing of DeepSpeed is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from ckptcore.encodings.pickle.trainer_classes import DEEPSPEED_ENUMS, DEEPSPEED_RECORDS
from ckptcore.encodings.pickle.unpickler import Call
from ckptcore.encodings.torchzip.reader import Objects, SharedTrees, read_objects
from ckptcore.errors import Finding, MalformedCheckpoint, NotComplete, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.deepspeed.file_names import CheckpointFiles
from ckptcore.formats.megatron.pickle_globals import MEGATRON_TABLE, dataclass_global, enum_global, plain
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.text import short_repr

_MAX_WORLD = 1 << 20
_MAX_REPORTED = 20
# Keys that every file of one save has in common.
_ALIKE = ("global_steps", "dp_world_size", "mp_world_size", "ds_version", "global_samples")


def _stage_number(*args: Any) -> int:
    # deepspeed/runtime/zero/config.py: an IntEnum, pickled by value.
    if len(args) != 1 or type(args[0]) is not int:
        raise ValueError("a ZeRO stage that is no number")
    return args[0]


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
TABLE: dict[str, Any] = {
    **MEGATRON_TABLE,
    "deepspeed.runtime.zero.config.ZeroStageEnum": Call(
        "ZeroStageEnum", _stage_number, member=_STAGES.__getitem__
    ),
    **{name: dataclass_global(name) for name in DEEPSPEED_RECORDS},
    **{name: enum_global(name) for name in DEEPSPEED_ENUMS},
}


@dataclass(frozen=True, slots=True)
class StatesFile:
    """One parsed file.

    Attributes:
        path: Relative to the checkpoint's folder.
        size: Bytes.
        objects: Its tree, with tensors as `StoredView`, and the byte ranges of its storages.
    """

    path: str
    size: int
    objects: Objects

    @property
    def tree(self) -> dict[Any, Any]:
        """The dict that the file holds."""
        tree: dict[Any, Any] = self.objects.tree
        return tree


def shared_trees() -> SharedTrees:
    """Return an empty store for the trees of one checkpoint's files."""
    return SharedTrees(_finished)


def read_file(source: Source, path: str, shared: SharedTrees | None = None) -> StatesFile:
    """Parse one file; no tensor byte is read.

    Args:
        source: The folder.
        path: Of the file.
        shared: From `shared_trees`, where ranks have equal trees; they are not to be changed.

    Raises:
        MalformedCheckpoint: The file is cut, is no torch zip, or holds no dict.
    """
    size = source.listing[path]
    shared = shared_trees() if shared is None else shared
    objects = read_objects(FileRange(source.store, path, 0, size), path, TABLE, shared)
    return StatesFile(path, size, objects)


def _finished(objects: Objects, nbytes: int, path: str) -> Objects:
    refused = list(objects.refused)
    tree = plain(objects.tree, nbytes, path, refused)
    if not isinstance(tree, dict):
        raise MalformedCheckpoint(f"{path} must hold a dict (got {kind_of(tree)})", file=path)
    return replace(objects, tree=tree, refused=tuple(refused))


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks of the job.

    Attributes:
        dp: Data-parallel ranks, which ZeRO partitions over.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages. A model-parallel rank is ``stage * tp + tensor rank``.
    """

    dp: int
    tp: int
    pp: int

    @property
    def mp(self) -> int:
        """Model-parallel ranks, the number in ``mp_rank_NN``."""
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class ModelStates:
    """All model-state files of a checkpoint.

    Attributes:
        world: The ranks of the job.
        files: (data-parallel rank or -1, model-parallel rank) -> file.
        findings: Missing files, and files of other saves.
    """

    world: RankGrid
    files: Mapping[tuple[int, int], StatesFile]
    findings: tuple[Finding, ...]

    def firsts(self) -> dict[int, StatesFile]:
        """Return the first file of every model-parallel rank that has one."""
        first_files: dict[int, StatesFile] = {}
        for (_, mp), file in self.files.items():
            first_files.setdefault(mp, file)
        return {mp: first_files[mp] for mp in sorted(first_files)}

    @property
    def sample(self) -> StatesFile:
        """A file whose values that all ranks share are taken."""
        return next(iter(self.files.values()))


def read_model_states(
    source: Source, files: CheckpointFiles, shared: SharedTrees | None = None
) -> ModelStates:
    """Read every model-state file of a folder; ``shared`` is from `shared_trees`.

    Raises:
        MalformedCheckpoint: A file is damaged, or says impossible sizes.
        UnsupportedFormat: No model-state file is there, or experts are partitioned by AutoEP.
    """
    if not files.model and files.universal:
        raise NotComplete(
            "the folder has zero/<parameter>/ of a universal checkpoint, but no *_model_states.pt: its "
            "conversion did not finish",
            hint="read the checkpoint that it was made of",
        )
    if not files.model:
        raise UnsupportedFormat(
            "the folder holds optimizer partitions of DeepSpeed, but no *_model_states.pt: nothing names the "
            "parameters in them",
            hint="copy the model-state files from where the checkpoint was written",
        )
    if files.twice:
        first_path, second_path = files.twice[0]
        raise MalformedCheckpoint(
            f"{first_path} and {second_path} are of the same rank: nothing says which belongs to this save",
            file=second_path,
            hint="move the files of the other save away",
        )
    states = {rank: read_file(source, path, shared) for rank, path in files.model.items()}
    first = next(iter(states.values()))
    world = _world(first, files)
    for file in states.values():
        if file.tree.get("ds_autoep_layers"):
            raise UnsupportedFormat(
                f"cannot read {file.path}: its experts are partitioned by AutoEP",
                hint="save the model with save_16bit_model in the job that wrote it",
            )
    _require_all_ranks_partitioned(first, world)
    findings = [
        *_mixed_save_findings(states),
        *_mixed_stage_findings(states),
        *_missing_rank_findings(files, states, world, _stage(first)),
    ]
    of_job = {rank: f for rank, f in states.items() if rank[0] < world.dp and rank[1] < world.mp}
    size = f"{world.dp} data-parallel x {world.mp} model-parallel ranks"
    findings += [
        finding("mixed-saves", "files", f"{file.path} is of no rank of {size}", file=file.path)
        for rank, file in states.items()
        if rank not in of_job
    ]
    if not of_job:
        raise MalformedCheckpoint(f"no file of {source.store.url} is of a rank of the job that it records")
    return ModelStates(world, of_job, tuple(findings))


def _require_all_ranks_partitioned(file: StatesFile, world: RankGrid) -> None:
    """Raise `UnsupportedFormat` for MiCS, an old form of ZeRO-3: groups of ranks each have all parts."""
    size = config_value(file.tree, "zero_optimization", "mics_shard_size")
    if type(size) is int and 0 < size < world.dp and _stage(file) == 3:
        raise UnsupportedFormat(
            f"cannot read {file.path}: MiCS partitions over {size} of {world.dp} data-parallel ranks "
            "(mics_shard_size)",
            hint="convert it with the script that DeepSpeed left beside it: python zero_to_fp32.py . OUT",
        )


def config_value(tree: Mapping[str, Any], *keys: str) -> Any:
    """Return a value of the stored ``ds_config``, or None."""
    value: Any = tree.get("ds_config")
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _world(file: StatesFile, files: CheckpointFiles) -> RankGrid:
    dp, mp = (_size(file, key) for key in ("dp_world_size", "mp_world_size"))
    degrees = file.tree.get("checkpoint_parallel_dimensions")
    if isinstance(degrees, dict) and degrees.keys() >= {"tp_degree", "pp_degree"}:
        tp, pp = (_size(file, key, degrees) for key in ("tp_degree", "pp_degree"))
        if tp * pp != mp:
            raise MalformedCheckpoint(
                f"{file.path} records {tp} tensor x {pp} pipeline ranks for mp_world_size {mp}",
                file=file.path,
            )
        return RankGrid(dp, tp, pp)
    # Before 0.19 nothing records the degrees: only pipelines leave layer files, which count tensor ranks.
    tp = 1 + max((t for _, t in files.layers), default=0) if files.layers else mp
    if mp % tp:
        raise MalformedCheckpoint(
            f"{file.path} records mp_world_size {mp}, and layer files are of {tp} tensor ranks",
            file=file.path,
        )
    return RankGrid(dp, tp, mp // tp)


def _size(file: StatesFile, key: str, values: Mapping[str, Any] | None = None) -> int:
    value = (file.tree if values is None else values).get(key)
    if type(value) is not int or not 0 < value <= _MAX_WORLD:
        raise MalformedCheckpoint(
            f"{key} of {file.path} must be a number of ranks (got {short_repr(value, 40)})", file=file.path
        )
    return value


def _stage(file: StatesFile) -> int:
    stage = config_value(file.tree, "zero_optimization", "stage")
    return stage if type(stage) is int and 0 <= stage <= 3 else 0


def _mixed_save_findings(states: Mapping[tuple[int, int], StatesFile]) -> Iterator[Finding]:
    first = next(iter(states.values()))
    for file in states.values():
        for key in _ALIKE:
            in_first, in_file = first.tree.get(key), file.tree.get(key)
            if in_first != in_file:
                text = f"{file.path} has {key} {short_repr(in_file, 40)}"
                message = f"{text}, {first.path} has {short_repr(in_first, 40)}"
                yield finding("mixed-saves", "files", message, file=file.path)


def _mixed_stage_findings(states: Mapping[tuple[int, int], StatesFile]) -> Iterator[Finding]:
    """Yield findings for files of ZeRO-3, one a rank, beside the one for all ranks of the other stages."""
    for dp, mp in states:
        if dp >= 0 and (-1, mp) in states:
            message = f"{states[dp, mp].path} is of ZeRO-3, and {states[-1, mp].path} is of another stage"
            yield finding("mixed-saves", "files", message, file=states[dp, mp].path)


def _missing_rank_findings(
    files: CheckpointFiles, states: Mapping[tuple[int, int], StatesFile], world: RankGrid, stage: int
) -> Iterator[Finding]:
    """Yield findings for rank files that are missing; only ZeRO writes optimizer partitions."""
    is_zero3 = any(dp >= 0 for dp, _ in states)
    # Only a partitioned optimizer has `param_shapes`, whatever the configuration calls its stage.
    partitioned = stage > 0 or any(f.tree.get("param_shapes") for f in states.values())
    expected = [
        (files.model, "{zero}mp_rank_{mp:02d}_model_states.pt", range(world.dp) if is_zero3 else (-1,)),
        (files.optim, "{bf16}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt", range(world.dp)),
    ]
    bf16_prefix = next((p for p in files.optim.values()), "").partition("zero_pp_rank")[0]
    for present, name, ranks in expected:
        if present is files.optim and not present and (files.universal or not partitioned):
            continue
        missing = ((dp, mp) for dp, mp in product(ranks, range(world.mp)) if (dp, mp) not in present)
        for dp, mp in islice(missing, _MAX_REPORTED):
            zero = f"zero_pp_rank_{dp}_" if dp >= 0 else ""
            path = name.format(zero=zero, bf16=bf16_prefix, dp=dp, mp=mp)
            message = f"{path} is missing: {world.dp} data-parallel x {world.mp} model-parallel ranks saved"
            yield finding("missing-rank", "files", message, file=path)
