"""Recognise files by name: ranks' parts of one save, parts of a series, and what trainers keep beside them.

Every rank writes one file of each kind, and only the name identifies it: verl's
``model_world_size_8_rank_3.pt`` (verl/utils/checkpoint/fsdp_checkpoint_manager.py), Accelerate's
``pytorch_model_fsdp_0_rank3.bin`` (accelerate/utils/fsdp_utils.py), OLMo's ``rank3.pt``
(olmo/checkpoint.py), and many scripts' ``model_rank_3.pt``. torch_checkpointing's ``model_3.pt`` are files of
items, and nanotron's of tensors, which their own readers sort.

Trainers' own files: transformers/trainer.py, accelerate/checkpointing.py, accelerate/utils/constants.py;
torchtune; Megatron-Bridge (training/utils/checkpoint_utils.py). Accelerate numbers the prepared models:
``model_1.safetensors`` is a second model, and no part of the first. Composer and others keep
``latest-rank0.pt`` as a link to the newest save: a link to a sibling is the sibling.

A name with ``N-of-M``, of any width, states how many parts there are. A name of a rank, a shard or a part
numbers them from 0 or 1, and something else must state how many there are (`part_proof`). Sources: split
files of torch and huggingface_hub, Meta's ``consolidated.NN.pth`` (llama-models), torchtune before 0.5
(``hf_model_0001_0.pt``), metaseq and fairseq (``reshard-model_part-0.pt``, ``-shard0.pt``), vLLM
(``model-rank-0-part-0.safetensors``), TensorRT-LLM (``rank0.safetensors``), nanotron
(``_pp-rank-0-of-1_tp-rank-0-of-2``), DeepSpeed, Megatron, GPT-NeoX, Composer, and the scripts of many.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ckptcore.encodings.limits import absent
from ckptcore.encodings.torchzip.reader import Storages
from ckptcore.errors import AmbiguousModel, Finding, finding
from ckptcore.formats.base import Source, natural
from ckptcore.utils.distinct_values import unique
from ckptcore.utils.text import listed

_SUFFIX = r"\.(?:safetensors|pt|pth|bin|ckpt|pkl)"
_COUNTED = re.compile(r"(?i)(?<!\d)(?P<number>\d+)[-_.]?of[-_.]?(?P<count>\d+)(?!\d)")
_WORLD = re.compile(r"(?i)world_?size_?(?P<world>\d+)")
# Words before a number that say "one of several"; ``ep`` alone is an epoch in many names, and TP53 a gene.
_RANKED = re.compile(
    r"(?i:(?<![A-Za-z])(?:(?:[tpecd]p|[sm]p)[-_.]?)?rank[-_.]*(?P<rank>\d+)(?!\d))"
    r"|(?<![A-Za-z])(?:tp|pp|mp|dp|gpu)[-_]?(?P<axis>\d+)(?=[-_.])"
    r"|(?i:(?<![A-Za-z])(?:part|shard|chunk|slice|worker|node)[-_]?(?P<part>\d+)(?=[-_.]))"
)
_RANK_WORD = re.compile(r"(?:(?i:rank)|tp|pp|mp|ep|dp|cp|gpu)[-_.]*$")
_STATE = re.compile(
    r"^(?:(?:optimizer|scheduler)(?:_\d+)?\.(?:bin|pt)|(?:sampler|dl_state_dict)(?:_\d+)?\.bin|scaler\.pt"
    r"|random_states_\d+\.pkl|custom_checkpoint_\d+\.pkl|rng_state(?:_\d+)?\.pth|training_args\.bin|recipe_state\.pt|(?:latest_)?train_state\.pt)$"
)
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_OPTIMIZER = re.compile(r"^optimizer(?:_\d+)?\.(?:bin|pt)$")
_ADAPTERS = ("adapter_model.pt", "adapter_model.bin")
_NUMBERED = re.compile(
    r"^(?:pytorch_)?model_(?P<number>\d+)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?$"
)
_RANK = re.compile(
    r"^(?P<stem>.*?)(?:[_.-]?world_size_(?P<world>\d{1,7}))?[_.-]?(?<![A-Za-z])rank[_.-]?(?P<rank>\d{1,7})"
    r"(?P<suffix>\.(?:pt|pth|bin|ckpt))$"
)
# torch_checkpointing/checkpoint_layout.py: `<item>_<rank>.pt` by default, other names by a user's layout.
ITEM = re.compile(r"^(?P<item>[A-Za-z][\w-]*?)_(?P<rank>\d{1,7})\.(?:pt|safetensors|json)$")
METADATA = "metadata.pkl"  # of torch_checkpointing, where an item can be resharded
# nanotron/serialize/utils.py, `get_path`: of a tensor that ranks share, or of one that each of them has.
NANOTRON_METADATA, NANOTRON_MODEL = "checkpoint_metadata.json", "model/"
NANOTRON = re.compile(
    r"^(?P<folder>(?:[^/]+/)*)model_(?P<leaf>[^/]+?)(?:_pp-rank-(?P<pp>\d{1,6})-of-(?P<pp_size>\d{1,6})"
    r"_tp-rank-(?P<tp>\d{1,6})-of-(?P<tp_size>\d{1,6})"
    r"(?:_exp-rank-(?P<exp>\d{1,6})-of-(?P<exp_size>\d{1,6}))?)?\.safetensors$"
)
_NEWEST = re.compile(r"^(?:latest|last|best|final)[-_.]?$")
_DIGITS = re.compile(r"\d+")
_NUMBER = re.compile(r"(\d+)(\.[a-z]+)$")  # the rank is directly before the suffix
# Ranks along one axis of parallelism: names of other formats, which do not number the ranks of the job.
_AXIS = re.compile(r"(?:^|[_.-])(?:mp|tp|pp|ep|cp|dp|zero_pp)$")
# Stem of a file -> name of its content, for ranks that saved several kinds.
_ROLES = (
    (re.compile(r"^(?:pytorch_)?model(?:_fsdp)?(?:_states?)?(?:_0)?$"), "model"),
    (re.compile(r"^(?:pytorch_)?model(?:_fsdp)?_(?P<number>\d+)$"), "model_{number}"),
    (re.compile(r"^optimizer(?:_states?)?(?:_0)?$"), "optimizer"),
    (re.compile(r"^optim(?:_states?)?(?:_0)?$"), "optim"),
    (re.compile(r"^$"), "rank"),
)
_SAMPLE = 1 << 16  # bytes of a tensor that are read to tell whether it is constant
_DISTINCT = 16  # values of four bytes that a tensor has which is not


@dataclass(frozen=True, slots=True)
class _Row:
    """Names of one writer.

    Attributes:
        pattern: Of the whole name; each group is a number.
        first: The lowest number.
        sole: Whether the writer also makes a complete save of the first part alone.
        full: Whether each part holds tensors in full.
    """

    pattern: re.Pattern[str]
    first: int
    sole: bool = False
    full: bool = False


_ROWS = (
    # Composer: without sharding, rank 0 alone saves (composer/checkpoint/save.py); "ep" is its epoch.
    _Row(re.compile(r"^(?:ep\d+-ba\d+|latest)-rank(\d+)\.(?:pt|tar|tgz)(?:\.\w+)?$"), 0, sole=True),
    _Row(re.compile(r"^consolidated[._-](\d+)\.(?:pth|pt|bin|safetensors)$"), 0),
    # torchtune before 0.5: the last number is the epoch. Those of the hub have tensors in full.
    _Row(re.compile(rf"^hf_model_(\d+)_\d+{_SUFFIX}$"), 1, full=True),
    _Row(re.compile(rf"^(?:meta|torchtune)_model_(\d+)_\d+{_SUFFIX}$"), 1),
    _Row(re.compile(r"^layer_\d+-model_(\d+)-model_states\.pt$"), 0),
    _Row(re.compile(r"^layer_(\d+)-model_states\.pt$"), 0),
)


@dataclass(frozen=True, slots=True)
class PartNumber:
    """One number in a name.

    Attributes:
        number: The number.
        count: How many parts there are according to the name, or None.
        first: The lowest number, or None where writers start at 0 or at 1.
        span: Position of the digits in the name.
    """

    number: int
    count: int | None
    first: int | None
    span: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PartName:
    """The name of one part of several.

    Attributes:
        path: The name.
        axes: Its numbers.
        sole: Whether the first part may be the complete save.
        full: Whether each part holds tensors in full though nothing counts them.
    """

    path: str
    axes: tuple[PartNumber, ...]
    sole: bool = False
    full: bool = False

    @property
    def series(self) -> str:
        """Return the name without its numbers, which all parts of a save share."""
        text, end = "", 0
        for axis in self.axes:
            text += self.path[end : axis.span[0]] + "\0"
            end = axis.span[1]
        return text + self.path[end:]

    @property
    def count(self) -> int | None:
        """Return how many parts the name says there are, None if it does not."""
        total = 1
        for axis in self.axes:
            if axis.count is None:
                return None
            total *= axis.count
        return total

    @property
    def is_run(self) -> bool:
        """Return whether the parts hold tensors in full, as counted ones do; those of ranks are slices."""
        if self.full:
            return True
        (*leading, last) = self.axes
        slices = _RANK_WORD.search(self.path[: last.span[0]])
        return not leading and last.count is not None and last.first is None and slices is None

    @property
    def is_first(self) -> bool:
        """Return whether each number is the lowest that it can be."""
        return all(axis.number == (axis.first or 0) for axis in self.axes)

    def sibling(self, number: int, axis: int = 0) -> str:
        """Return the name of the part with another number, padded as this one's."""
        start, end = self.axes[axis].span
        digits = self.path[start:end]
        # "00" has a fixed width; after "0" and "9" comes "10".
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        return self.path[:start] + str(number).zfill(width) + self.path[end:]

    def neighbours(self) -> tuple[str, ...]:
        """Return the names of parts that exist if there are several: first and adjacent numbers."""
        numbers = {
            (position, n)
            for position, axis in enumerate(self.axes)
            for n in (axis.number - 1, axis.number + 1, 0, 1)
            if n >= (axis.first or 0) and n != axis.number
        }
        return tuple(self.sibling(n, position) for position, n in sorted(numbers))


@lru_cache(maxsize=1 << 14)  # folders of many saves have the same names, and several formats ask
def part_name(path: str) -> PartName | None:
    """Return the numbers of a part's name; None for a name that does not say that there are more.

    >>> [a.count for a in part_name("model-00001-of-000163.safetensors").axes]
    [163]
    >>> part_name("consolidated.00.pth").sibling(1), part_name("hf_model_0001_0.pt").sibling(2)
    ('consolidated.01.pth', 'hf_model_0002_0.pt')
    >>> [part_name(n) for n in ("model-7b.pt", "epoch-3.pt", "step-1000.pt", "pytorch_model_1.bin", "v2.pt")]
    [None, None, None, None, None]
    """
    if "/" in path:
        return None
    for row in _ROWS:
        match = row.pattern.match(path)
        if match:
            return PartName(
                path, (PartNumber(int(match[1]), None, row.first, match.span(1)),), row.sole, row.full
            )
    counted = tuple(
        PartNumber(int(m["number"]), int(m["count"]), None, m.span("number")) for m in _COUNTED.finditer(path)
    )
    spans = {axis.span for axis in counted}
    world = _WORLD.search(path)
    # With one number, a world size in the name is its count.
    ranks = [(m.span(m.lastgroup), int(m[m.lastgroup])) for m in _RANKED.finditer(path) if m.lastgroup]
    ranks = [(span, number) for span, number in ranks if span not in spans]
    count = int(world["world"]) if world and len(ranks) == 1 else None
    named = tuple(PartNumber(number, count, 0, span) for span, number in ranks)
    axes = tuple(sorted((*counted, *named), key=lambda axis: axis.span))
    return PartName(path, axes) if axes else None


def series(paths: Iterable[str]) -> dict[str, tuple[PartName, ...]]:
    """Return the parts among some files, by what their names share; ``N-of-M`` also by M."""
    parts: dict[str, list[PartName]] = {}
    for path in paths:
        part = part_name(path)
        if part is not None:
            parts.setdefault(part.series, []).append(part)
    return {name: tuple(members) for name, members in parts.items()}


def is_run(paths: Iterable[str]) -> bool:
    """Return whether files are parts of one counted series, each once, with tensors in full.

    >>> is_run(["model-1-of-3.bin", "model-3-of-3.bin"]), is_run(["rank0-of-2.bin", "rank1-of-2.bin"])
    (True, False)
    """
    parts = [part_name(path) for path in paths]
    runs = [part for part in parts if part is not None and part.is_run]
    numbers = {part.axes[0].number for part in runs}
    return len({part.series for part in runs}) == 1 and len(numbers) == len(parts)


def absent_parts(parts: Iterable[PartName], limit: int, count: int | None = None) -> tuple[list[str], int]:
    """Return the missing parts of a series with one number: the names of the first ones, and how many.

    Writers of ``N-of-M`` start at 1, few at 0: a part 0 decides. Without a count, only gaps are missing.

    Args:
        parts: Those that exist, at least one.
        limit: Most names to return; the cost depends on it, not on the count.
        count: How many there are, where the names do not state it.

    >>> absent_parts([part_name("m-2-of-3.bin")], 9)
    (['m-1-of-3.bin', 'm-3-of-3.bin'], 2)
    >>> absent_parts([part_name("m-1-of-1000000000.bin")], 1)
    (['m-2-of-1000000000.bin'], 999999999)
    """
    parts = list(parts)
    numbers = {part.axes[0].number for part in parts}
    first_part = parts[0]
    axis = first_part.axes[0]
    first = axis.first if axis.first is not None else int(0 not in numbers)
    count = axis.count if axis.count is not None else count
    stop = count if count is not None else max(numbers) - first + 1
    inside = {n - first for n in numbers if first <= n < first + stop}
    return [first_part.sibling(n + first) for n in absent(inside, stop, limit)], stop - len(inside)


def is_state(path: str) -> bool:
    """Return whether a name is that of a trainer's own state, which has no weights of the model.

    >>> is_state("training_args.bin"), is_state("optimizer_1.bin"), is_state("pytorch_model.bin")
    (True, True, False)
    """
    return _STATE.match(path) is not None


def is_adapter(path: str) -> bool:
    """Return whether a name is that of an adapter, which torchtune saves beside the merged model.

    >>> is_adapter("adapter_model.pt"), is_adapter("model.pt")
    (True, False)
    """
    return path in _ADAPTERS


def numbered_model(path: str) -> bool:
    """Return whether a name is that of one of Accelerate's models, the first or a further one."""
    return path == "pytorch_model.bin" or _NUMBERED.match(path) is not None


def require_one_model(source: Source, read: str, files: Iterable[str] = ()) -> None:
    """Raise `AmbiguousModel` where Accelerate saved several models: the second is no stray of the first.

    Args:
        source: The folder.
        read: The file or index that is read.
        files: Its files, where it is an index.
    """
    model, model_files = _NUMBERED.match(read), {read, *files}
    other_models = sorted(
        (
            path
            for path in source.listing
            if path not in model_files
            and (match := _NUMBERED.match(path))
            and (model is None or match["number"] != model["number"])
        ),
        key=natural,
    )
    if other_models:
        raise AmbiguousModel(
            f"{source.store.url} has several models: {read} and {', '.join(other_models[:6])}",
            hint=f"name the file of one of them, such as {read}",
            candidates=[read, *other_models],
        )


def unread_optimizers(source: Source, paths: Iterable[str]) -> list[Finding]:
    """Return the finding that optimizers beside the weights are not read with them."""
    beside = sorted(p for p in source.listing if _OPTIMIZER.match(p) and p not in set(paths))
    if not beside:
        return []
    message = f"the optimizer's state in {listed(beside, 1)} is not read with the model"
    return [finding("unread-state", "files", message, file=beside[0])]


def without_links(source: Source, paths: Iterable[str]) -> list[str]:
    """Return the paths without suffix names of one file: a name with a number stays, which tells the step.

    An object store has no links: equal stamps mean equal content there, and both files are kept.
    """
    all_paths = list(paths)
    if source.store.local is None or len(all_paths) < 2:
        return all_paths
    identities = {status.identity for path in all_paths if (status := source.seen.get(path)) is not None}
    if None not in identities and len(identities) == len(all_paths):
        return all_paths
    by_stamp: dict[str, str] = {}
    for path in sorted(all_paths, key=lambda path: (not any(map(str.isdigit, _stem(path))), natural(path))):
        status = source.seen.get(path)
        stamp = source.store.stamp(path) if status is None else status.stamp  # with the inode
        by_stamp.setdefault(path if stamp is None else stamp, path)
    return sorted(by_stamp.values(), key=natural)


def unlinked(source: Source, paths: Iterable[str], read_paths: Iterable[str]) -> list[str]:
    """Return the paths that are no other name of a file that is read: links of both kinds are."""
    identities = {source.seen[path].identity for path in read_paths if path in source.seen} - {None}
    return [p for p in paths if p not in source.seen or source.seen[p].identity not in identities]


def _stem(path: str) -> str:
    """Return a name up to the number of its rank."""
    return path.rsplit("/", 1)[-1].partition("rank")[0]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one kind.

    Attributes:
        stem: Common start of their names.
        world: Number of ranks, where the names give it.
        paths: Rank -> path, in the order of the ranks.
    """

    stem: str
    world: int | None
    paths: Mapping[int, str] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """Return the name of the content."""
        for rule, role in _ROLES:
            match = rule.match(self.stem)
            if match:
                return role.format(**match.groupdict())
        return self.stem

    def name_of(self, rank: int) -> str:
        """Return the name that the file of a rank must have, from the name of another rank's file."""
        path = next(iter(self.paths.values()))
        match = _NUMBER.search(path)
        assert match is not None
        digits = match[1]
        # Only zeros in front show a fixed width.
        wide = len(digits) if digits.startswith("0") else 0
        return path[: match.start()] + str(rank).zfill(wide) + match[2]


def is_rank_file(path: str) -> bool:
    """Return whether a name is that of one rank's file."""
    return "rank" in path and _rank_name(path) is not None


@lru_cache(maxsize=1 << 14)  # folders of many saves have the same names, and several formats ask
def _rank_name(path: str) -> re.Match[str] | None:
    """Return the parts of the name of one rank's file; None for another name."""
    match = _RANK.match(path) if "/" not in path else None
    return None if match is None or _AXIS.search(match["stem"]) else match


def _require_one_save(kinds: Mapping[tuple[str, int | None], Mapping[int, str]]) -> None:
    """Raise `AmbiguousModel` where stems differ in a number alone: they are steps, not kinds of content."""
    saves: dict[str, list[tuple[str, str]]] = {}
    for (stem, _), paths in kinds.items():
        if any(rule.match(stem) for rule, _ in _ROLES):
            continue  # numbered models are models
        saves.setdefault(_DIGITS.sub("#", stem), []).append((stem, next(iter(paths.values()))))
    newest = [key for key in saves if _NEWEST.match(key)]
    if newest and len(kinds) > 1:  # a copy of a save beside it
        saves = {"": [row for rows in saves.values() for row in rows]}
    for several in saves.values():
        if len({stem for stem, _ in several}) > 1:
            files = [path for _, path in several]
            raise AmbiguousModel(
                f"the folder has {len(files)} saves of one content: {', '.join(files[:8])}",
                hint=f"name one, such as {files[-1]}, or move the files of one into a folder of its own",
                candidates=files,
            )


def rank_files(listing: Iterable[str]) -> tuple[RankFiles, ...]:
    """Return the kinds of rank files directly in a folder, models first, optimizers last.

    Raises:
        AmbiguousModel: The names are those of more than one save.
    """
    kinds: dict[tuple[str, int | None], dict[int, str]] = {}
    for path in sorted(listing):
        match = _rank_name(path) if "rank" in path else None
        if match is None:
            continue
        world = int(match["world"]) if match["world"] else None
        paths = kinds.setdefault((match["stem"], world), {})
        if int(match["rank"]) in paths:
            raise AmbiguousModel(
                f"{paths[int(match['rank'])]} and {path} are both files of rank {int(match['rank'])}",
                hint="move one of them away",
            )
        paths[int(match["rank"])] = path
    _require_one_save(kinds)
    worlds = sorted({w for _, w in kinds if w is not None})
    if len(worlds) > 1:
        raise AmbiguousModel(
            f"the files belong to saves of {' and '.join(map(str, worlds))} ranks: two saves in one folder",
            hint="move the files of the older one away",
            worlds=worlds,
        )
    file_kinds = [RankFiles(s, w, dict(sorted(paths.items()))) for (s, w), paths in kinds.items()]
    if len(file_kinds) > 1:
        file_kinds.sort(key=lambda kind: (not kind.role.startswith("model"), "optim" in kind.role, kind.stem))
    return tuple(file_kinds)


def item_files(source: Source) -> dict[str, dict[int, str]]:
    """Return item -> rank -> file, by the default names, of files directly in a folder."""
    items: dict[str, dict[int, str]] = {}
    for path in source.listing:
        match = ITEM.match(path)
        if match is not None and not is_state(path):
            items.setdefault(match["item"], {})[int(match["rank"])] = path
    return {item: {rank: ranks[rank] for rank in sorted(ranks)} for item, ranks in sorted(items.items())}


def equal_files(source: Source, files: Iterable[tuple[str, Storages]]) -> Iterator[Finding]:
    """Yield findings for files whose storages have the same checksums in the same order.

    Args:
        source: The folder. Where checksums are equal, a part of a tensor is read: a constant proves nothing.
        files: Path and storages that are compared, of which no two may be equal.
    """
    first: dict[tuple[tuple[int, int | None], ...], str] = {}
    for path, stored in files:
        rows = tuple((length, crc) for _, length, crc in stored.values())
        if not rows or any(crc is None for _, crc in rows):
            continue
        first_path = first.setdefault(rows, path)
        if first_path != path and _varies(source, path, max(stored.values(), key=lambda row: row[1])):
            text = f"{path} and {first_path} hold the same values: one is in the place of another file"
            yield mixed(text, path)


def mixed(message: str, path: str) -> Finding:
    """Return the finding that a file is in the place of another."""
    hint = "copy the file again from the rank that wrote it, and keep its name"
    return finding("mixed-saves", "files", message, file=path, hint=hint)


def _varies(source: Source, path: str, storage: tuple[int, int, int | None]) -> bool:
    """Report whether a storage of a file has several values."""
    start, length, _ = storage
    size = min(length, _SAMPLE) // 4 * 4
    values = np.frombuffer(source.store.read(path, start, size), "<u4")
    return len(unique(values)) >= _DISTINCT
