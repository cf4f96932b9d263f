"""Read the rank files of a legacy Megatron-LM checkpoint, and find missing and copied ones.

In ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` the pipeline field exists with more than one stage, the
expert field with more than one expert-parallel rank (megatron/training/checkpointing.py,
get_checkpoint_name). So only the arguments inside the file say which field is which. NeMo 1 has folders and
files of other names, and no arguments in them.

An archive of NeMo 1 has ``model_config.yaml``, and of a model of several ranks each one's
``model_weights.ckpt``, in ``mp_rank_TT``, or in ``tp_rank_TT_pp_rank_PPP`` with several stages
(nemo/collections/nlp/parts/nlp_overrides.py, NLPSaveRestoreConnector.save_to). A file is the state dict of a
Lightning module, whose GPT is ``model``. Layers are numbered in their stage, and rows of QKV are by head,
or with ``megatron_legacy`` in the order of version 0 (modules/common/megatron/attention.py).

Nothing in a file states how the model is cut: the config does, and each rank's shapes must agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import prod
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.pickle.torch_globals import StoredView
from ckptcore.encodings.torchzip.reader import Objects
from ckptcore.errors import CkptError, Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.megatron.legacy_names import FILE, NEMO_FILE
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.store.subfolder import FileRange, unrecorded
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.plain_yaml import MAX_YAML, load_yaml
from ckptcore.utils.text import short_repr

CONFIG = "model_config.yaml"
STATED = frozenset({"args", "checkpoint_version"})  # what `nemo_opener` adds to the content of a file
_MODEL = re.compile(r"^model\.(?:module\.)?")  # with `megatron_amp_O2`, a Float16Module is around the model
_NEMO_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
)
_OTHER_SIZES = ("ffn_hidden_size", "num_query_groups", "kv_channels")
_UNNAMED = ("virtual_pipeline_model_parallel_size", "expert_model_parallel_size")  # in no name of a folder
# Matrices that are cut in columns only -> the argument with the full number of them, `_columns` of it.
_CUT = (
    (re.compile(r"\.self_attention\.(?:linear_proj|dense|proj)\.weight$"), "projection_size"),
    (re.compile(r"\.(?:mlp\.(?:linear_fc2|dense_4h_to_h)\.|layernorm_mlp\.fc2_)weight$"), "ffn_hidden_size"),
)
# What every GPT has outside of its layers; output weights of its own only where they are not shared.
_ENDS = (
    (re.compile(r"(?:^|\.)embedding\.word_embeddings\.weight$"), "embedding.word_embeddings.weight"),
    (re.compile(r"\.final_(?:layer)?norm\.weight$"), "decoder.final_layernorm.weight"),
)
_OUTPUT = (re.compile(r"(?:^|\.)output_layer\.weight$"), "output_layer.weight")
_UNTIED = "untie_embeddings_and_output_weights"
_SAVE_ANEW = "save it with the NeMo that wrote it, as a distributed checkpoint"
_MAX_SIZE, _MAX_FINDINGS = 1 << 20, 20
# Argument -> its earlier names. All ranks of one save agree on these.
_SIZES = {
    "tensor_model_parallel_size": ("model_parallel_size", "intra_layer_model_parallel_size"),
    "pipeline_model_parallel_size": ("inter_layer_model_parallel_size",),
    "expert_model_parallel_size": (),
}
_ALIKE = (
    *_SIZES,
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "num_experts",
    "padded_vocab_size",
    "virtual_pipeline_model_parallel_size",
)


def nemo_path(tp: int, pp: int, ep: int, stages: int, expert_ranks: int) -> str:
    """Return the file of a tensor rank ``tp`` and stage ``pp``; there is one expert rank.

    >>> nemo_path(1, 0, 0, 1, 1), nemo_path(0, 2, 0, 4, 1)
    ('mp_rank_01/model_weights.ckpt', 'tp_rank_00_pp_rank_002/model_weights.ckpt')
    """
    folder = f"mp_rank_{tp:02d}" if stages == 1 else f"tp_rank_{tp:02d}_pp_rank_{pp:03d}"
    return f"{folder}/model_weights.ckpt"


def nemo_opener(source: Source) -> Callable[[str], Objects]:
    """Return a function that reads a rank's file, with the arguments of the config beside it.

    Raises:
        MalformedCheckpoint: The config does not state how the model is cut, or a file contradicts it.
        UnsupportedFormat: The model is no GPT, or has virtual stages.
    """
    config = _config(source)

    def read(path: str) -> Objects:
        objects = read_megatron(FileRange(source.store, path, 0, source.listing[path]), path)
        state = _model_state(objects.tree, path)
        arguments = _arguments(config)
        _require_shapes(state, arguments, path)
        version = 0 if config.get("megatron_legacy") is True else 3.0
        tree = {"args": Named("namespace", arguments), "checkpoint_version": version, "model": state}
        return replace(objects, tree=tree)

    return read


def lacking_ends(names: Iterable[str], arguments: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each tensor outside of the layers that a GPT has, and that no rank has.

    Args:
        names: Tensors of all ranks, by the model's own names.
        arguments: From `nemo_opener`.
    """
    names = list(names)
    for pattern, fqn in (*_ENDS, *([_OUTPUT] if arguments[_UNTIED] else [])):
        if not any(pattern.search(name) for name in names):
            yield finding("hole", "coverage", f"{fqn} is in no rank's file, and every GPT has it", fqn=fqn)


def stated_ranks(source: Source) -> int:
    """Return how many ranks the config beside a file states; 1 where it states nothing."""
    config = _config_beside(source) or {}
    sizes = [config.get(key) for key in _NEMO_SIZES[:2]]
    return prod(n for n in sizes if type(n) is int and n > 0)


def _config(source: Source) -> Mapping[str, Any]:
    config = _config_beside(source)
    if config is None:
        raise _untold(f"{CONFIG}, which states it, is not beside them, or is no YAML object")
    return config


def _config_beside(source: Source) -> Mapping[str, Any] | None:
    store = unrecorded(source.store)
    size = source.listing.get(CONFIG)
    if source.name is not None:
        try:
            size = store.size(CONFIG)
        except CkptError:  # without the right to list, a store denies what is not there
            return None
    if size is None or size > MAX_YAML:
        return None
    try:
        content = load_yaml(store.read(CONFIG, 0, size))
    except InvalidText:
        return None
    return content if isinstance(content, dict) else None


def _model_state(tree: Any, path: str) -> dict[str, Any]:
    """Return the state dict of the GPT in a file, by its own names."""
    if not isinstance(tree, dict) or any(type(name) is not str for name in tree):
        raise MalformedCheckpoint(f"{path} must hold a state dict", file=path)
    foreign_key = next((name for name in tree if not _MODEL.match(name)), None)
    if foreign_key is not None:
        raise UnsupportedFormat(
            "cannot merge the ranks of a NeMo model that is no GPT: "
            f"{path} has {foreign_key!r}, outside of model.",
            hint=_SAVE_ANEW,
        )
    return {_MODEL.sub("", name): value for name, value in tree.items()}


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of Megatron-LM that say what the config says."""
    for key in _NEMO_SIZES:
        if type(config.get(key)) is not int or config[key] < 1:
            raise _untold(f"{key} of {CONFIG} must be a positive integer (got {config.get(key)!r:.40})")
    for key in _UNNAMED:
        if config.get(key) not in (None, 1):
            raise UnsupportedFormat(
                f"cannot merge the ranks of a NeMo model with {key} {short_repr(config[key], 20)}: "
                "the names of their folders do not have that rank",
                hint=_SAVE_ANEW,
            )
    sizes = {key: config[key] for key in (*_NEMO_SIZES, *_OTHER_SIZES) if type(config.get(key)) is int}
    sizes.setdefault("kv_channels", sizes["hidden_size"] // sizes["num_attention_heads"])
    return {
        **sizes,
        "projection_size": sizes["kv_channels"] * sizes["num_attention_heads"],
        "num_experts": config.get("num_moe_experts"),
        _UNTIED: config.get("share_embeddings_and_output_weights") is False,
    }


def _require_shapes(state: Mapping[str, Any], arguments: Mapping[str, Any], path: str) -> None:
    """Require the shapes that the config states; others say that it is another model's, or was edited."""
    for name, value in state.items():
        columns = next((arguments.get(key) for pattern, key in _CUT if pattern.search(name)), None)
        if columns is None or not isinstance(value, StoredView):
            continue
        tp = arguments["tensor_model_parallel_size"]
        if value.shape != (arguments["hidden_size"], columns // tp) or columns % tp:
            raise MalformedCheckpoint(
                f"{name} of {path} is {list(value.shape)}, and {CONFIG} states "
                f"{arguments['hidden_size']} rows, and {columns} columns over {tp} tensor ranks",
                file=path,
                hint=f"use the {CONFIG} of the archive that the ranks are from",
            )


def _untold(why: str) -> MalformedCheckpoint:
    hint = f"copy {CONFIG} from the archive to where the folders of the ranks are"
    return MalformedCheckpoint(f"cannot merge the ranks of a NeMo model: {why}", file=CONFIG, hint=hint)


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file: its folder, its rank in each parallel group, and its objects."""

    folder: str
    path: str
    size: int
    tp: int
    pp: int
    ep: int
    objects: Objects

    @property
    def tree(self) -> Mapping[str, Any]:
        """The dict that the file holds."""
        tree: Mapping[str, Any] = self.objects.tree
        return tree


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of a save. tp, pp, ep, etp: sizes of the groups; beside: keys of trees, not of files."""

    files: tuple[RankFile, ...]
    args: Mapping[str, Any]  # of the first rank
    tp: int
    pp: int
    ep: int
    etp: int
    findings: tuple[Finding, ...]
    beside: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a trainer keeps its ranks.

    Attributes:
        pattern: Of a file; its groups are the folder, the tensor rank, and the other ranks of its name.
        opener: From the folder to a function that reads a file.
        path: From the tensor rank, stage and expert rank, and the numbers of the latter two, to the file.
        beside: Keys of what is read that are in no file.
        lacking: From the tensors of all ranks, and the arguments, to findings about what a model has.
    """

    pattern: re.Pattern[str]
    opener: Callable[[Source], Callable[[str], Objects]]
    path: Callable[[int, int, int, int, int], str]
    beside: frozenset[str] = frozenset()
    lacking: Callable[[Iterable[str], Mapping[str, Any]], Iterable[Finding]] = lambda names, arguments: ()


def read_ranks(source: Source) -> Ranks:
    """Read every rank file of an iteration's folder, or of an unpacked NeMo model.

    Raises:
        MalformedCheckpoint: A file is not a rank's.
        UnsupportedFormat: The folder names do not determine the ranks.
    """
    paths = sorted(source.listing)
    matched = [(layout, [m for p in paths if (m := layout.pattern.match(p))]) for layout in _LAYOUTS]
    layout, matches = next((layout, files) for layout, files in matched if files)
    read_rank = layout.opener(source)
    trees = [(m, read_rank(m[0])) for m in matches]
    first = arguments(trees[0][1].tree, trees[0][0][0])
    tp, pp, ep = (_parallel_size(first, key) for key in _SIZES)
    etp = _expert_tensor_size(first, tp)
    files: list[RankFile] = []
    findings: list[Finding] = []
    for match, objects in trees:
        path, place = match[0], _rank_place(match, pp, ep)
        findings += _unlike(first, trees[0][1].tree, objects.tree, path, trees[0][0][0])
        if place is None or not (place[0] < tp and place[1] < pp and place[2] < ep):
            findings.append(
                finding(
                    "item-mismatch",
                    "files",
                    f"{path} is outside the {tp} tensor x {pp} pipeline x {ep} expert-parallel ranks",
                    file=path,
                )
            )
            continue
        files.append(RankFile(match[1], path, source.listing[path], *place, objects))
    findings += _missing(layout, files, tp, pp, ep, etp)
    # Where a rank is missing, so is what it had.
    if not findings:
        findings += layout.lacking((name for _, objects in trees for name in objects.tree["model"]), first)
    findings += _copies(files)
    return Ranks(tuple(files), first, tp, pp, ep, etp, tuple(findings), layout.beside)


def arguments(tree: Any, path: str) -> Mapping[str, Any]:
    """Return the arguments in a rank's file.

    Raises:
        MalformedCheckpoint: The file has none.
    """
    if not isinstance(tree, Mapping) or any(type(k) is not str for k in tree):
        raise MalformedCheckpoint(f"{path} must hold a dict (got {kind_of(tree)})", file=path)
    args = tree.get("args")
    if isinstance(args, Named) and args.kind == "namespace":
        return dict(args.value)
    if isinstance(args, dict):
        return args
    raise MalformedCheckpoint(
        f"cannot merge the ranks: {path} has no arguments, which record how the model is partitioned",
        file=path,
        hint="save it with a Megatron-LM that stores `args`",
    )


def _opener(source: Source) -> Callable[[str], Objects]:
    return lambda path: read_megatron(FileRange(source.store, path, 0, source.listing[path]), path)


def _path(tp: int, pp: int, ep: int, stages: int, expert_ranks: int) -> str:
    stage, expert = f"_{pp:03d}" if stages > 1 else "", f"_{ep:03d}" if expert_ranks > 1 else ""
    return f"mp_rank_{tp:02d}{stage}{expert}/model_optim_rng.pt"


_LAYOUTS = (_Layout(FILE, _opener, _path), _Layout(NEMO_FILE, nemo_opener, nemo_path, STATED, lacking_ends))


def _parallel_size(args: Mapping[str, Any], key: str) -> int:
    value = next((args[k] for k in (key, *_SIZES[key]) if args.get(k) is not None), 1)
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise MalformedCheckpoint(f"{key} must be 1 to {_MAX_SIZE} (got {short_repr(value, 40)})")
    return value


def _expert_tensor_size(args: Mapping[str, Any], tp: int) -> int:
    if args.get("moe_extended_tp"):
        raise UnsupportedFormat(
            "cannot merge experts that are split over tensor and expert ranks at once (moe_extended_tp)",
            hint="save it as torch_dist with the Megatron-LM that wrote it",
        )
    etp = args.get("expert_tensor_parallel_size")
    if etp is None or etp == tp:
        return tp
    if etp != 1:
        raise UnsupportedFormat(
            f"cannot merge experts that are split over {short_repr(etp, 20)} of {tp} tensor ranks: folder "
            "names do not give the expert-tensor rank (Megatron-LM issue 1719)",
            hint="save it as torch_dist with the Megatron-LM that wrote it",
        )
    return 1


def _rank_place(match: re.Match[str], pp: int, ep: int) -> tuple[int, int, int] | None:
    fields = [int(f) for f in match.groups()[2:] if f is not None]
    if len(fields) != (pp > 1) + (ep > 1):
        return None
    stage = fields.pop(0) if pp > 1 else 0
    return int(match[2]), stage, fields.pop(0) if fields else 0


def _unlike(args: Mapping[str, Any], first: Any, tree: Any, path: str, first_path: str) -> Iterator[Finding]:
    mine = arguments(tree, path)
    pairs = [(key, args.get(key), mine.get(key)) for key in _ALIKE]
    pairs += [(key, first.get(key), tree.get(key)) for key in ("iteration", "checkpoint_version")]
    for key, want, have in pairs:
        if want != have:
            yield finding(
                "item-mismatch",
                "files",
                f"{path} and {first_path} are from different saves: {key} is {short_repr(have, 40)} and "
                f"{short_repr(want, 40)}",
                file=path,
            )


def _copies(files: Sequence[RankFile]) -> Iterator[Finding]:
    """Yield findings for copies of another rank's file: each rank has its own random state at least.

    A tool that stacks layers twice writes equal stages, without a random state.
    """
    first_files: dict[Any, RankFile] = {}
    for file in files:
        records = [r[1:] for _, r in sorted(file.objects.storages.items())]
        if not any(length for length, _ in records) or any(crc is None for length, crc in records if length):
            continue
        stage = None if file.tree.get("rng_state") else file.pp
        first = first_files.setdefault((stage, tuple(records)), file)
        if first is not file and first.tree == file.tree:
            message = f"{file.path} and {first.path} have equal contents: one is a copy of the other"
            yield finding("item-mismatch", "files", message, file=file.path)


def _missing(
    layout: _Layout, files: Sequence[RankFile], tp: int, pp: int, ep: int, etp: int
) -> Iterator[Finding]:
    have = {(f.tp, f.pp, f.ep) for f in files}
    if etp == tp:
        coordinates = product(range(tp), range(pp), range(ep))
        lost = islice((c for c in coordinates if c not in have), _MAX_FINDINGS)
        for t, p, e in lost:
            path = layout.path(t, p, e, pp, ep)
            yield finding("missing-rank", "files", f"{path} is missing", file=path)
        return
    # Experts are not split over tensor ranks: the job's layout decides which (tensor, expert) pairs wrote.
    # Every tensor rank and every expert rank of a stage must occur once.
    for p in range(pp):
        for group, size, ranks in (
            ("tensor", tp, {t for t, q, _ in have if q == p}),
            ("expert-parallel", ep, {e for _, q, e in have if q == p}),
        ):
            for n in islice((n for n in range(size) if n not in ranks), _MAX_FINDINGS):
                yield finding("missing-rank", "files", f"no folder of {group} rank {n} of stage {p}")
