"""Damage any file of a checkpoint, whatever its content."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path

from damage_sites import Cut, Row, Rows, Tree, facts_at, put, record_data, safetensors_parts, zip_items
from damaging import flip

TABLE = Rows()
FLIPS = 3  # a file
_RANK = re.compile(r"(?<!\d)\d+(?!\d)")  # the numbers in a name
_RANK_ARGUMENT = re.compile(rb"X\x04\x00\x00\x00rank(?:q.|r....)K(.)", re.DOTALL)  # in a pickle's arguments
_STATE = re.compile(r"(?:^|/)(?:random_states|rng_state|extra_state|train/rank)[^/]*$")
_ZERO = re.compile(r"_(?:model|optim)_states\.pt$|^zero/.+/\w+\.pt$")
_OF_A_RANK = re.compile(
    r"^(.*?)(?:__(\d+)_\d+\.distcp|__(\d+)\.metadata|rank_?(\d+)(?:_\d+)*(?:\.\w+|/\w+\.pt)"
    r"|random_states_(\d+)\.pkl|shard-(\d+)-model.*"
    r"|(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_(?:model|optim)_states\.pt)$"
)


def _each(change: str) -> Row:
    """A row that does one thing to every file."""

    def row(tree: Tree, rng: random.Random) -> Iterator[Cut]:
        for path in tree.files():
            yield Cut(path, partial(CHANGES[change], path=path), _facts(tree, path, change))

    return row


def _remove(root: Path, path: str) -> None:
    (root / path).unlink()


def _empty(root: Path, path: str) -> None:
    put(root, path, b"")


def _one_byte_short(root: Path, path: str) -> None:
    put(root, path, (root / path).read_bytes()[:-1])


def _half(root: Path, path: str) -> None:
    data = (root / path).read_bytes()
    put(root, path, data[: len(data) // 2])


def _one_byte_long(root: Path, path: str) -> None:
    put(root, path, (root / path).read_bytes() + b"\x00")


def _tail(root: Path, path: str) -> None:
    put(root, path, (root / path).read_bytes() + b"\xff" * 5000)


def _zeroed(root: Path, path: str) -> None:
    put(root, path, bytes((root / path).stat().st_size))


def _first_page_lost(root: Path, path: str) -> None:
    data = (root / path).read_bytes()
    put(root, path, bytes(min(4096, len(data))) + data[4096:])


def _is_text(root: Path, path: str) -> None:
    put(root, path, b"404: not found\n")


CHANGES = {
    "removed": _remove,
    "emptied": _empty,
    "one-byte-short": _one_byte_short,
    "half": _half,
    "one-byte-long": _one_byte_long,
    "tail": _tail,
    "zeroed": _zeroed,
    "first-page-lost": _first_page_lost,
    "error-page": _is_text,
}
for _name in CHANGES:
    TABLE.enter(f"file-{_name}", _each(_name))


def _facts(tree: Tree, path: str, change: str) -> frozenset[str]:
    if tree.has_digests:
        return frozenset()
    out = set()
    lost = change in {"zeroed", "first-page-lost"}
    if lost and tree.kinds[path] == "zchunk" and any(tree.read(path)[:4096]):
        out.add("unsummed")
    if change == "removed" and path == "scheduler.bin":
        out.add("optional")
    if change == "removed" and path == "meta.pt" and b"pytorch-lightning_version" not in tree.read(path):
        out.add("own-names")
    return frozenset(out)


# --------------------------------------------------------------------------------- flipped bits


@TABLE
def bit_flipped(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Bits anywhere, a few in every file."""
    for path in tree.files():
        for _ in range(FLIPS):
            yield _flipped(tree, path, rng.randrange(tree.size(path)), rng.randrange(8))


@TABLE
def head_bit_flipped(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Bits of the first hundred bytes: magic numbers, lengths, the beginning of a header."""
    for path in tree.files():
        for _ in range(FLIPS):
            yield _flipped(tree, path, rng.randrange(min(100, tree.size(path))), rng.randrange(8))


@TABLE
def end_bit_flipped(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Bits of the last hundred bytes: directories of zips, the last tensor."""
    for path in tree.files():
        size = tree.size(path)
        for _ in range(FLIPS):
            yield _flipped(tree, path, size - 1 - rng.randrange(min(100, size)), rng.randrange(8))


def _flipped(tree: Tree, path: str, at: int, bit: int) -> Cut:
    where = f"bit {bit} of byte {at} of {path}"
    return Cut(where, lambda root: flip(root / path, at, bit), facts_at(tree, path, at, bit))


# ----------------------------------------------------------------------------- files exchanged


def peers(tree: Tree, path: str) -> list[str]:
    """Files of the same kind and suffix with other content, those named alike and of equal size first."""
    suffix = Path(path).suffix
    found = [
        p
        for p in tree.files(tree.kinds[path])
        if p != path and Path(p).suffix == suffix and _content(tree, p) != _content(tree, path)
    ]
    alike = _RANK.sub("#", path)
    return sorted(found, key=lambda p: (_RANK.sub("#", p) != alike, abs(tree.size(p) - tree.size(path)), p))


def _content(tree: Tree, path: str) -> object:
    """What a file holds; torch files differ by a serialization id, too."""
    data = tree.read(path)
    if tree.kinds[path] != "zip":
        return data
    return {k: v for k, v in record_data(data).items() if not k.startswith(".data/")}


@TABLE
def file_of_a_peer(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Another file of its kind, another rank's say, copied over it."""
    for path in tree.files():
        for other in peers(tree, path)[:1]:
            yield Cut(
                f"{other} over {path}",
                partial(_copied, path=path, other=other),
                exchangeable(tree, path, other),
            )


@TABLE
def files_swapped_by_name(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Two files of a kind under each other's name."""
    done = set()
    for path in tree.files():
        for other in peers(tree, path)[:1]:
            if frozenset((path, other)) not in done:
                done.add(frozenset((path, other)))
                yield Cut(
                    f"{path} and {other}",
                    partial(_swapped, path=path, other=other),
                    exchangeable(tree, path, other),
                )


def _copied(root: Path, path: str, other: str) -> None:
    put(root, path, (root / other).read_bytes())


def _swapped(root: Path, path: str, other: str) -> None:
    one, two = (root / path).read_bytes(), (root / other).read_bytes()
    put(root, path, two)
    put(root, other, one)


def exchangeable(tree: Tree, one: str, other: str) -> frozenset[str]:
    """``like``: whether two files tell nothing that sets them apart but values. ``unranked``: whether two of
    Megatron's rank files tell no rank of their own. ``zero``: whether two of DeepSpeed's differ in values.
    ``rankless``: whether both are a rank's random state."""
    kind = tree.kinds[one]
    if tree.has_digests:
        return frozenset()
    if _ZERO.search(one) and _ZERO.search(other):
        return frozenset({"zero"} if _like_partitions(tree, one, other) else ())
    same = LIKE.get(kind, lambda *_: False)(tree, one, other)
    ranked = [_RANK_ARGUMENT.search(tree.read(p)) for p in (one, other)]
    unranked = "mp_rank_" in one and (None in ranked or len({m[1] for m in ranked if m}) == 1)
    if all(_STATE.search(p) for p in (one, other)):
        return frozenset({"rankless"})
    return frozenset({"like"} if same else {"unranked"} if unranked else ())


def _like_headers(tree: Tree, one: str, other: str) -> bool:
    a, b = (safetensors_parts(tree.read(p))[0] for p in (one, other))
    return a == b


def _like_objects(tree: Tree, one: str, other: str) -> bool:
    """Whether two torch files have the same pickle, or are objects of a kind: none tells its place."""
    a, b = (record_data(tree.read(p)) for p in (one, other))
    shards = all(re.search(r"/shard_[\d.]+_[\d.]+\.pt$", p) for p in (one, other))
    return shards or (a.keys() == b.keys() and a["data.pkl"] == b["data.pkl"])


def _like_partitions(tree: Tree, one: str, other: str) -> bool:
    """Whether two files of DeepSpeed have tensors of the same sizes under the same keys.

    Copies, lists of slices and numbers of experts set most of them apart.
    """
    a, b = (record_data(tree.read(p)) for p in (one, other))
    sizes = [{k: len(v) for k, v in x.items() if k.startswith("data/")} for x in (a, b)]
    states = [re.search(r"/(\w+)\.pt$", p) for p in (one, other)]
    return sizes[0] == sizes[1] and (a["data.pkl"] == b["data.pkl"] or None not in states)


def _like_sizes(tree: Tree, one: str, other: str) -> bool:
    return tree.size(one) == tree.size(other)


def _like_arrays(tree: Tree, one: str, other: str) -> bool:
    """Whether two arrays have chunks of one size under the same names: then their files fit both."""
    a, b = (json.loads(tree.read(p)) for p in (one, other))
    width = {t: n for n, ts in {2: ("<f2", "bfloat16"), 4: ("<f4",), 8: ("<i8",)}.items() for t in ts}
    grids = [[-(-n // c) for n, c in zip(x["shape"], x["chunks"], strict=True)] for x in (a, b)]
    same = math.prod(a["chunks"]) == math.prod(b["chunks"]) and (
        grids[0] == grids[1] or a["chunks"] == b["chunks"]
    )
    return same and width.get(a["dtype"]) == width.get(b["dtype"])


def _like_items(tree: Tree, one: str, other: str) -> bool:
    """Whether two data files place items of like pickles at the same bytes."""
    if any(k == "metadata" and p.endswith(tuple("0123456789")) for p, k in tree.kinds.items()):
        return False  # ranks' own metadata: replicas are compared
    a, b = (zip_items(tree.read(p)) for p in (one, other))
    return (
        bool(a)
        and [i[:2] for i in a] == [i[:2] for i in b]
        and all(
            (x == y) or b"_rebuild_tensor" not in x + y for (_, _, x), (_, _, y) in zip(a, b, strict=True)
        )
    )


LIKE = {
    "safetensors": _like_headers,
    "zchunk": _like_sizes,
    "zarray": _like_arrays,
    "zip": _like_objects,
    "distcp": _like_items,
}


# --------------------------------------------------------------------------------- wrong ranks


@TABLE
def last_rank_lost(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Every file of the highest rank is gone: what is left looks like a smaller world."""
    for folder, ranks in by_rank(tree).items():
        if len(ranks) > 1:
            last = ranks[max(ranks)]
            yield Cut(f"rank {max(ranks)} in {folder}", partial(_removed, paths=tuple(last)))


@TABLE
def rank_too_many(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """A copy of the highest rank's files under the next number: a rank of a larger world."""
    for folder, ranks in by_rank(tree).items():
        last = max(ranks)
        copies = {p: _renumbered(p, last, last + 1) for p in ranks[last]}
        copies = {p: new for p, new in copies.items() if new not in tree.kinds}
        if copies:
            yield Cut(f"rank {last + 1} in {folder}", partial(_duplicated, copies=copies))


@TABLE
def ranks_swapped(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Every file of two ranks under the other's number: what the files of one rank agree on stays so."""
    for folder, ranks in by_rank(tree).items():
        for one, other in combinations(sorted(ranks), 2):
            pairs = [(p, _renumbered(p, one, other)) for p in ranks[one]]
            pairs = [(a, b) for a, b in pairs if b in ranks[other] and _content(tree, a) != _content(tree, b)]
            facts = [exchangeable(tree, a, b) for a, b in pairs]
            if pairs:
                known = frozenset().union(*facts) if all(facts) else frozenset()
                yield Cut(
                    f"ranks {one} and {other} in {folder}", partial(_exchanged, pairs=tuple(pairs)), known
                )


def _exchanged(root: Path, pairs: tuple[tuple[str, str], ...]) -> None:
    for path, other in pairs:
        _swapped(root, path, other)


@TABLE
def ranks_cut_in_half(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Only the first half of the ranks is there."""
    for folder, ranks in by_rank(tree).items():
        gone = [p for r in sorted(ranks)[(len(ranks) + 1) // 2 :] for p in ranks[r]]
        if len(ranks) > 1 and gone:
            yield Cut(f"upper half of {folder}", partial(_removed, paths=tuple(gone)))


def by_rank(tree: Tree) -> dict[str, dict[int, list[str]]]:
    """Files that are named by rank: folder -> rank -> paths. Megatron's ranks are folders."""
    out: dict[str, dict[int, list[str]]] = {}
    for path in tree.kinds:
        m = _OF_A_RANK.search(path)
        if m:
            rank = int(next(g for g in m.groups()[1:] if g is not None))
            out.setdefault(m[1] + _stem(path), {}).setdefault(rank, []).append(path)
    return {f: r for f, r in out.items() if len(r) > 1}


def _stem(path: str) -> str:
    return " shards" if "shard-" in path else " files"


def _renumbered(path: str, rank: int, new: int) -> str:
    head, _, tail = path.rpartition("/")
    if "mp_rank_" in head:
        return re.sub(r"mp_rank_\d+", f"mp_rank_{new:02d}", path)
    wide = next(m for m in _RANK.finditer(tail.replace("_", " ")) if int(m[0]) == rank)
    tail = tail[: wide.start()] + str(new).zfill(len(wide[0])) + tail[wide.end() :]
    return f"{head}/{tail}" if head else tail


def _removed(root: Path, paths: tuple[str, ...]) -> None:
    for path in paths:
        (root / path).unlink()


def _duplicated(root: Path, copies: dict[str, str]) -> None:
    for path, new in copies.items():
        put(root, new, (root / path).read_bytes())
