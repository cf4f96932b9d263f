"""Read the rank files of a legacy Megatron-LM checkpoint, and find missing and copied ones.

In ``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` the pipeline field exists with more than one stage, the
expert field with more than one expert-parallel rank (megatron/training/checkpointing.py,
get_checkpoint_name). So only the arguments inside the file say which field is which. NeMo 1 has folders and
files of other names, and no arguments in them: `nemo_ranks`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.torchzip.reader import Objects
from ckptcore.errors import Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.common.trees import kind_of
from ckptcore.formats.megatron.legacy_names import FILE, NEMO_FILE
from ckptcore.formats.megatron.nemo_ranks import STATED, lacking_ends, nemo_opener, nemo_path
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.store.subfolder import FileRange
from ckptcore.utils.text import short_repr

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
    etp = _expert_tensor_size(first, tp, ep)
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


def _expert_tensor_size(args: Mapping[str, Any], tp: int, ep: int) -> int:
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
