"""Judge what became of a damaged checkpoint, compared with the undamaged one."""

from __future__ import annotations

import shutil
import time
import traceback
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from samples import Tensors, flatten, read_torch, tensors_of

import ckptcore
from ckptcore.errors import FINDINGS, CkptError, Finding, InternalError, error_classes
from ckptcore.planning.request import Settings

# Warnings about values that may be wrong: nothing more can be known.
WARNED = frozenset({"total-mismatch", "unusual-layout"})
CODES = {c.code for c in error_classes()}
SECONDS = 120.0  # a hang; a run takes less than one, on a machine with nothing else to do
# One worker and a small budget: quick to start, and the checkpoints are small.
_SETTINGS = Settings(workers=1, memory=64 << 20)


@dataclass
class Run:
    """What inspect, validate and consolidate said, in this process.

    refused: the code of the error of `consolidate`, or None. unsound: whether `validate` failed, too.
    said: findings and errors, by code and what they are about. trouble: what must never happen.
    """

    source: Path
    file: Path
    refused: str | None = None
    unsound: bool = False
    codes_at: set[tuple[str, str | None, str | None]] = field(default_factory=set)
    trouble: list[str] = field(default_factory=list)

    @cached_property
    def raw(self) -> bytes:
        return self.file.read_bytes()

    @cached_property
    def _tree(self) -> dict[str, Any]:
        return read_torch(self.file)

    @cached_property
    def tensors(self) -> Tensors:
        return tensors_of(self._tree)

    @cached_property
    def objects(self) -> dict[str, str]:
        """The values that are no tensors, in words."""
        import torch

        leaves = flatten(self._tree, descend_tuples=False)
        return {k: repr(v) for k, v in leaves.items() if not isinstance(v, torch.Tensor)}

    @property
    def codes(self) -> list[str]:
        return sorted({code for code, _, _ in self.codes_at})


def run(source: Path, folder: Path) -> Run:
    """Opens, checks and consolidates a source into a fresh folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out = Run(source, folder / "model.pt")
    started = time.monotonic()
    try:
        report = ckptcore.check(ckptcore.open(str(source)), "bytes", workers=1)
        out.unsound = not report.ok
        _hear(out, report.findings)
    except CkptError as error:
        out.unsound = True
        _note(out, error)
    except BaseException:
        out.trouble.append(f"validate: {traceback.format_exc(limit=-4)}")
    try:
        done = ckptcore.convert(
            str(source), str(out.file), to="torch_save", settings=_SETTINGS, catalog=False
        )
        _hear(out, done.warnings)
    except CkptError as error:
        out.refused = error.code
        _note(out, error)
    except BaseException:
        out.refused = "traceback"
        out.trouble.append(f"consolidate: {traceback.format_exc(limit=-4)}")
    if out.refused and [p for p in folder.iterdir() if not p.name.startswith(".")]:
        out.trouble.append("published although it failed")
    if out.refused and not out.unsound:
        out.trouble.append(f"refused ({out.refused}), yet validated")
    if time.monotonic() - started > SECONDS:
        out.trouble.append(f"took {time.monotonic() - started:.0f} s")
    return out


def _note(out: Run, error: CkptError) -> None:
    if isinstance(error, InternalError) or error.code not in CODES or not error.message or not error.hint:
        out.trouble.append(f"{error.code}: {error.message!r}, next step {error.hint!r}")
    out.codes_at.add((error.code, None, None))
    _hear(out, error.values.get("findings", ()))


def _hear(out: Run, findings: Any) -> None:
    for found in findings:
        assert isinstance(found, Finding)
        if found.code not in FINDINGS or not found.message:
            out.trouble.append(f"finding {found.code}: {found.message!r}")
        out.codes_at.add((found.code, found.fqn, found.file))


@dataclass(frozen=True, slots=True)
class Verdict:
    """outcome: ``refused``, ``equal`` (the bytes are right), ``told`` (something is left out or called
    otherwise, with a finding that the undamaged one has not), ``silent`` or ``trouble``.

    renamed: whether only names differ. detail: what is wrong.
    """

    outcome: str
    detail: str = ""
    renamed: bool = False


def judge(good: Run, seen: Run) -> Verdict:
    """Judge the outcome of a damaged checkpoint. Values that differ must be refused, not just reported."""
    if seen.trouble:
        return Verdict("trouble", "; ".join(seen.trouble))
    if seen.refused:
        return Verdict("refused", seen.refused)
    if seen.raw == good.raw:
        return Verdict("equal")
    mine, theirs = seen.tensors, good.tensors
    values = [n for n in theirs if n in mine and mine[n] != theirs[n]]
    lost, more = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
    objects = [k for k in {**good.objects, **seen.objects} if good.objects.get(k) != seen.objects.get(k)]
    if not values and not lost and not more and not objects:
        return Verdict("equal")
    detail = f"values {values[:3]} lost {lost[:3]} more {more[:3]} objects {objects[:3]}"
    new = {code for code, _, _ in seen.codes_at - good.codes_at if FINDINGS.get(code, ("info",))[0] != "info"}
    if (not values and new) or new & WARNED:
        return Verdict("reported", f"{', '.join(sorted(new))}: {detail}")
    renamed = set(mine.values()) == set(theirs.values()) and (
        set(seen.objects.values()) == set(good.objects.values())
    )
    return Verdict("silent", detail + (f" though {sorted(new)}" if new else ""), renamed)
