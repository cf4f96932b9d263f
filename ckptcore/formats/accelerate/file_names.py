"""Recognise the parts of a folder that Accelerate and the Hugging Face Trainer save with FSDP, by name.

Sources: accelerate/utils/fsdp_utils.py (save_fsdp_model, save_fsdp_optimizer), accelerate/checkpointing.py
(save_accelerator_state), accelerate/utils/constants.py, transformers/trainer.py. Accelerate numbers the
prepared models and optimizers; file names omit the number of the first one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptcore.formats.base import Source, natural
from ckptcore.formats.common.rank_file_names import RankFiles

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
