"""Rank files: which files of a folder are the ranks' own parts of one save?

Every rank writes one file of each kind; the name is all that says which: verl's
``model_world_size_8_rank_3.pt`` (verl/utils/checkpoint/fsdp_checkpoint_manager.py), Accelerate's
``pytorch_model_fsdp_0_rank3.bin`` (accelerate/utils/fsdp_utils.py), OLMo's ``rank3.pt``
(olmo/checkpoint.py), and many scripts' ``model_rank_3.pt``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckptcore.errors import AmbiguousModel

_RANK = re.compile(
    r"^(?P<stem>.*?)(?:[_.-]?world_size_(?P<world>\d{1,7}))?[_.-]?(?<![A-Za-z])rank[_.-]?(?P<rank>\d{1,7})"
    r"(?P<suffix>\.(?:pt|pth|bin|ckpt))$"
)
_NUMBER = re.compile(r"(\d+)(\.[a-z]+)$")  # the rank is what stands before the suffix
# Ranks along one axis of parallelism: other formats' names, and no rank of the job.
_AXIS = re.compile(r"(?:^|[_.-])(?:mp|tp|pp|ep|cp|dp|zero_pp)$")
# What a file's stem says its content is called, when the ranks saved several kinds.
_ROLES = (
    (re.compile(r"^(?:pytorch_)?model(?:_fsdp)?(?:_states?)?(?:_0)?$"), "model"),
    (re.compile(r"^(?:pytorch_)?model(?:_fsdp)?_(?P<number>\d+)$"), "model_{number}"),
    (re.compile(r"^optimizer(?:_states?)?(?:_0)?$"), "optimizer"),
    (re.compile(r"^optim(?:_states?)?(?:_0)?$"), "optim"),
    (re.compile(r"^$"), "rank"),
)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one kind.

    stem: what their names begin with. world: number of ranks, where the names tell it.
    paths: rank -> path, by rank.
    """

    stem: str
    world: int | None
    paths: Mapping[int, str] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """What the content is called."""
        for rule, role in _ROLES:
            found = rule.match(self.stem)
            if found:
                return role.format(**found.groupdict())
        return self.stem

    def name_of(self, rank: int) -> str:
        """What the file of a rank is called, by the example of another's."""
        path = next(iter(self.paths.values()))
        found = _NUMBER.search(path)
        assert found is not None
        digits = found[1]
        wide = len(digits) if digits.startswith("0") else 0
        return path[: found.start()] + str(rank).zfill(wide) + found[2]


def is_rank_file(path: str) -> bool:
    """Whether a name is that of one rank's file."""
    found = _RANK.match(path)
    return found is not None and "/" not in path and not _AXIS.search(found["stem"])


def unread(listing: Iterable[str], used: Collection[str]) -> tuple[str, ...]:
    """Files that are named by rank, where none of them was read: another checkpoint's, perhaps."""
    found = tuple(p for p in sorted(listing) if is_rank_file(p))
    return () if any(p in used for p in found) else found


def rank_files(listing: Iterable[str]) -> tuple[RankFiles, ...]:
    """The kinds of rank files that lie directly in a folder, models first, optimizers behind.

    Raises `AmbiguousModel` when the names tell of more than one save.
    """
    kinds: dict[tuple[str, int | None], dict[int, str]] = {}
    for path in sorted(listing):
        found = _RANK.match(path)
        if found is None or not is_rank_file(path):
            continue
        world = int(found["world"]) if found["world"] else None
        paths = kinds.setdefault((found["stem"], world), {})
        if int(found["rank"]) in paths:
            raise AmbiguousModel(
                f"{paths[int(found['rank'])]} and {path} are both of rank {int(found['rank'])}",
                hint="move one of them away",
            )
        paths[int(found["rank"])] = path
    worlds = sorted({w for _, w in kinds if w is not None})
    if len(worlds) > 1:
        raise AmbiguousModel(
            f"the files are of saves of {' and '.join(map(str, worlds))} ranks: two saves in one folder",
            hint="move the files of the older one away",
            worlds=worlds,
        )
    made = [RankFiles(s, w, dict(sorted(paths.items()))) for (s, w), paths in kinds.items()]
    return tuple(sorted(made, key=lambda k: (not k.role.startswith("model"), "optim" in k.role, k.stem)))
