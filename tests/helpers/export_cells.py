"""Run one cell of the table of exports: a checkpoint is made, exported, and compared with what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from export_results import LOGITS, TENSORS, Cell, Result, declared, has_map, stand_in
from export_sources import WRITERS, Tiny, adapted, weights
from trainer_names import State
from transformers_job import UNOPENED

import ckptcore
from ckptcore.conversion.virtual_folder import open_virtual
from ckptcore.errors import CkptError
from ckptcore.planning.request import Request, Settings

# Compares the logits of (right, made, base of adapters or None); "" when they are equal.
_OWN_CONFIG = ("hf-hub", "verl", "peft")  # whose checkpoints have a config that the export finds
Judge = Callable[[Path, Path, Path | None], str]


def differing(right: State, made: State) -> list[str]:
    """Names of tensors that are not on both sides, or not with the same bits."""
    names = sorted(right.keys() ^ made.keys())
    return names + [n for n in sorted(right.keys() & made.keys()) if not same(right[n], made[n])]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))


def observe(cell: Cell, tinies: Callable[[str], Tiny], folder: Path, judge: Judge) -> Result:
    """What comes of a cell's export.

    Raises AssertionError, with names, for an export that is neither right nor refused.
    """
    tiny, out = tinies(cell.family), folder / "out"
    folder.mkdir(exist_ok=True)
    path = WRITERS[cell.source](tinies(stand_in(cell.family, cell.source)), cell.form, folder / "source")
    if not has_map(cell.family, cell.source):  # the stand-in's own config is another model's
        for name in ("common.pt", "metadata.json", "config.json", "config.yaml"):
            (path / name).unlink(missing_ok=True)
    config = {} if cell.source in _OWN_CONFIG else {"config": str(tiny.hub)}
    try:
        ckptcore.convert(str(path), str(out), verb="export", catalog=False, **config)
    except CkptError as error:
        assert not out.exists()
        return Result("refused", error.message)
    require_virtual(Request(str(path), str(out), verb="export", **config), out)
    right, base = tiny.hub, None
    if cell.source == "peft":
        right, base = folder / "right", tiny.hub
        adapted(tiny).save_pretrained(right)
    else:
        assert json.loads((out / "config.json").read_text()) == tiny.config
    assert not (wrong := differing(weights(right), weights(out))), f"{cell}: {wrong}"
    proof = ckptcore.verify_export(str(out))
    assert proof.verdict == "ok", f"{cell}: {[c.summary for c in proof.checks]}"
    difference = judge(right, out, base)
    if difference.startswith(UNOPENED):
        return Result(TENSORS, difference)
    assert not difference, f"{cell}: logits {difference}"
    return Result(LOGITS)


def require_virtual(request: Request, out: Path) -> None:
    """Raise AssertionError unless the files that are computed on reading are those of an export."""
    with open_virtual(request, Settings(memory=8 << 20, workers=2)) as folder:
        names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        assert names == folder.files.keys()
        for name, file in folder.files.items():
            read = b"".join(folder.read(name, n, 4999) for n in range(0, file.nbytes, 4999))
            assert read == (out / name).read_bytes(), f"{name} is not the exported one"


def require_declared(cell: Cell, found: Result) -> None:
    """Raise AssertionError unless a cell of the table is exactly what was found."""
    expected = declared(cell.family, cell.source)
    assert found.level == expected.level, f"{cell}: the table says {expected}, it is {found}"
    assert expected.why in found.why, f"{cell}: the table says {expected}, it is {found}"
