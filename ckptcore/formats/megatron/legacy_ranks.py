"""The rank files of a legacy Megatron-LM checkpoint: who wrote what, and who is missing?

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``: the pipeline field is there with more than one stage, the
expert field with more than one expert-parallel rank (megatron/training/checkpointing.py,
get_checkpoint_name), so which field is which is told by the arguments inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import Any

from ckptcore.core.object_tree import Named
from ckptcore.encodings.torchzip.reader import Objects
from ckptcore.errors import Finding, MalformedCheckpoint, UnsupportedFormat, finding
from ckptcore.formats.base import Source
from ckptcore.formats.megatron.pickle_globals import read_megatron
from ckptcore.utils.text import short_repr

FILE = re.compile(r"^(mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?)/model_optim_rng\.pt$")
_MAX_SIZE, _MAX_TOLD = 1 << 20, 20
# Argument -> what it was called before. All ranks of one save agree on these.
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
    """One rank's file: its folder, its place in the parallel groups, and what it holds."""

    folder: str
    path: str
    size: int
    tp: int
    pp: int
    ep: int
    objects: Objects

    @property
    def tree(self) -> Mapping[str, Any]:
        tree: Mapping[str, Any] = self.objects.tree
        return tree


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of a save. args: as the first rank has them. tp, pp, ep, etp: sizes of the groups."""

    files: tuple[RankFile, ...]
    args: Mapping[str, Any]
    tp: int
    pp: int
    ep: int
    etp: int
    findings: tuple[Finding, ...]


def read_ranks(source: Source) -> Ranks:
    """Every rank file of an iteration's folder, parsed.

    Raises `MalformedCheckpoint` for what is no rank's file, and `UnsupportedFormat` for groups
    whose ranks cannot be told from the folders.
    """
    found = [m for p in sorted(source.listing) if (m := FILE.match(p))]
    trees = [(m, _read_rank(source, m[0])) for m in found]
    first = arguments(trees[0][1].tree, trees[0][0][0])
    tp, pp, ep = (_parallel_size(first, key) for key in _SIZES)
    etp = _expert_tensor_size(first, tp, ep)
    files: list[RankFile] = []
    told: list[Finding] = []
    for match, objects in trees:
        path, place = match[0], _rank_place(match, pp, ep)
        told += _unlike(first, trees[0][1].tree, objects.tree, path, trees[0][0][0])
        if place is None or not (place[0] < tp and place[1] < pp and place[2] < ep):
            told.append(
                finding(
                    "item-mismatch",
                    "files",
                    f"{path} is no rank of {tp} tensor x {pp} pipeline x {ep} expert-parallel ranks",
                    file=path,
                )
            )
            continue
        files.append(RankFile(match[1], path, source.listing[path], *place, objects))
    told += _missing(files, tp, pp, ep, etp)
    told += _elsewhere(files, tp, etp)
    told += _copies(files)
    return Ranks(tuple(files), first, tp, pp, ep, etp, tuple(told))


def arguments(tree: Any, path: str) -> Mapping[str, Any]:
    """The arguments that a rank's file keeps. Raises `MalformedCheckpoint` when there are none."""
    if not isinstance(tree, Mapping) or any(type(k) is not str for k in tree):
        raise MalformedCheckpoint(f"{path} holds a {type(tree).__name__}, not a dict", file=path)
    args = tree.get("args")
    if isinstance(args, Named) and args.kind == "namespace":
        return dict(args.value)
    if isinstance(args, dict):
        return args
    raise MalformedCheckpoint(
        f"{path} keeps no arguments: nothing tells how the model is cut over the ranks",
        file=path,
        hint="save it again with a Megatron-LM that stores `args`",
    )


def _read_rank(source: Source, path: str) -> Objects:
    return read_megatron(lambda start, n: source.store.read(path, start, n), source.listing[path], path)


def _parallel_size(args: Mapping[str, Any], key: str) -> int:
    value = next((args[k] for k in (key, *_SIZES[key]) if args.get(k) is not None), 1)
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise MalformedCheckpoint(f"the arguments say {key} is {short_repr(value, 40)}")
    return value


def _expert_tensor_size(args: Mapping[str, Any], tp: int, ep: int) -> int:
    if args.get("moe_extended_tp"):
        raise UnsupportedFormat(
            "experts are cut over tensor and expert ranks at once (moe_extended_tp)",
            hint="save it as torch_dist with the Megatron-LM that wrote it",
        )
    etp = args.get("expert_tensor_parallel_size")
    if etp is None or etp == tp:
        return tp
    if etp != 1:
        raise UnsupportedFormat(
            f"experts are cut over {short_repr(etp, 20)} tensor ranks, everything else over {tp}: "
            "folders of this "
            "format do not say which expert-tensor rank wrote them (Megatron-LM issue 1719)",
            hint="save it as torch_dist with the Megatron-LM that wrote it",
        )
    return 1


def _rank_place(match: re.Match[str], pp: int, ep: int) -> tuple[int, int, int] | None:
    fields = [int(f) for f in match.groups()[2:] if f is not None]
    if len(fields) != (pp > 1) + (ep > 1):
        return None
    stage = fields.pop(0) if pp > 1 else 0
    return int(match[2]), stage, fields.pop(0) if fields else 0


def _unlike(args: Mapping[str, Any], first: Any, tree: Any, path: str, other: str) -> Iterator[Finding]:
    mine = arguments(tree, path)
    pairs = [(key, args.get(key), mine.get(key)) for key in _ALIKE]
    pairs += [(key, first.get(key), tree.get(key)) for key in ("iteration", "checkpoint_version")]
    for key, want, have in pairs:
        if want != have:
            yield finding(
                "item-mismatch",
                "files",
                f"{path} says {key} is {short_repr(have, 40)}, {other} says "
                f"{short_repr(want, 40)}: they are of different saves",
                file=path,
            )


def _elsewhere(files: Sequence[RankFile], tp: int, etp: int) -> Iterator[Finding]:
    """Files in another rank's folder: tensor ranks count fastest in a job's ranks, pipeline ranks slowest.

    Each rank's arguments have its own (megatron/core/parallel_state.py, RankGenerator: every order begins
    with tp, and has ep before pp); tools that convert checkpoints write the same one into all of them.
    """
    told = [arguments(f.tree, f.path).get("rank") for f in files]
    ranks = [r for r in told if type(r) is int and r >= 0]
    if len(set(ranks)) != len(files) or len(files) < 2:
        return
    wrong = [(f, rank) for f, rank in zip(files, ranks, strict=True) if rank % tp != f.tp]
    for file, rank in wrong:
        message = f"{file.path} is of rank {rank}, which is tensor rank {rank % tp}, not {file.tp}"
        yield finding("item-mismatch", "files", message, file=file.path)
    # Where experts are cut over fewer tensor ranks, which pairs of them wrote depends on the job's layout.
    whole = etp == tp
    places = {f.path: (f.pp, f.ep, f.tp) if whole else (f.pp,) for f in files}
    order = sorted(zip(files, ranks, strict=True), key=lambda row: places[row[0].path])
    for (one, low), (two, high) in pairwise(order if not wrong else ()):
        if low > high and places[one.path] != places[two.path]:
            message = f"{one.path} is of rank {low}, {two.path} of rank {high}: one has the other's place"
            yield finding("item-mismatch", "files", message, file=two.path)


def _copies(files: Sequence[RankFile]) -> Iterator[Finding]:
    """Files with the same values and bytes as another rank's: each rank has its own random state at least."""
    seen: dict[Any, RankFile] = {}
    for file in files:
        records = [r[1:] for _, r in sorted(file.objects.storages.items())]
        if not any(length for length, _ in records) or any(crc is None for length, crc in records if length):
            continue
        first = seen.setdefault((file.pp, tuple(records)), file)
        if first is not file and first.tree == file.tree:
            message = f"{file.path} holds what {first.path} holds: one is a copy of the other"
            yield finding("item-mismatch", "files", message, file=file.path)


def _missing(files: Sequence[RankFile], tp: int, pp: int, ep: int, etp: int) -> Iterator[Finding]:
    have = {(f.tp, f.pp, f.ep) for f in files}
    if etp == tp:
        wanted = product(range(tp), range(pp), range(ep))
        lost = islice((c for c in wanted if c not in have), _MAX_TOLD)
        for t, p, e in lost:
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
            yield finding(
                "missing-rank",
                "files",
                f"{name}/model_optim_rng.pt is not there",
                file=f"{name}/model_optim_rng.pt",
            )
        return
    # Experts are not cut over tensor ranks: which (tensor, expert) pairs wrote depends on the job's layout,
    # and every tensor rank and every expert rank of a stage must be there once.
    for p in range(pp):
        for what, want, seen in (
            ("tensor", tp, {t for t, q, _ in have if q == p}),
            ("expert-parallel", ep, {e for _, q, e in have if q == p}),
        ):
            for n in islice((n for n in range(want) if n not in seen), _MAX_TOLD):
                yield finding("missing-rank", "files", f"no folder of {what} rank {n} of stage {p}")
