"""Define rows of damage to any format: which apply to a checkpoint, their result, and their excuses."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import damage
import gaps
from damage_judge import Run, Verdict, judge, run
from damage_sites import BESIDE, Cut, Tree
from samples import Sample, tree_digest

# Rows that are done together, by how their names begin.
GROUPS = (
    "file-",
    "files-",
    "bit-",
    "head-",
    "end-",
    "last-",
    "rank",
    "json-",
    "header-",
    "array-",
    "pickle-",
    "foreign-",
    "",
)
PLACES, MORE_PLACES = 1, 8  # of one row in one sample
SINGLE = {".ckpt", ".pt", ".safetensors"}


def subjects(sample: Sample) -> Iterator[Tree]:
    """What the sample's user would name on the command line."""
    if any(p.name.startswith("latest_") for p in sample.root.iterdir()):
        yield Tree(sample.root)
        return
    for path in sorted(sample.root.iterdir()):
        if BESIDE.match(path.name) or gaps.lookup(gaps.REFUSED_DCP, sample.name, path.name):
            continue
        if path.is_dir():
            yield Tree(path)
        elif path.suffix in SINGLE:
            yield Tree(sample.root, path.name)


def truth(tree: Tree, truths: dict[Path, Run], folder: Path) -> Run:
    """What the undamaged sample gives; test_read and others prove that it is right."""
    key = tree.root / (tree.name or "")
    if key not in truths:
        shutil.rmtree(folder, ignore_errors=True)
        truths[key] = kept(run(tree.copy_to(folder / "in"), folder / "out"))
    return truths[key]


def kept(good: Run) -> Run:
    """Reads a result now: its file is written over by the next."""
    if not good.refused:
        assert good.raw
        assert good.tensors or good.objects
    return good


def rows_of(group: str) -> list[str]:
    """The rows whose name begins so, and with nothing longer that is a group, too."""
    return [n for n in damage.EVERYWHERE if next(g for g in GROUPS if n.startswith(g)) == group]


def chosen(tree: Tree, name: str, places: int, seed: int) -> list[Cut]:
    """The cuts of a row, a seeded choice of so many where there are more."""
    rng = random.Random(f"{seed} {tree.root.parent.name} {name}")
    cuts = list(damage.EVERYWHERE[name](tree, rng))
    return rng.sample(cuts, places) if len(cuts) > places else cuts


def outcome(tree: Tree, cut: Cut, good: Run, tmp_path: Path) -> tuple[Verdict, list[str]]:
    """Makes a damaged copy, runs it and judges it."""
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    source = tree.copy_to(folder)
    if cut.first:
        cut.first(folder)
        good = run(source, tmp_path / "other")
        assert not good.refused, f"{cut.where}: refused before it was damaged: {good.refused}"
        kept(good)
    cut.do(folder)
    before = tree_digest(source) if source.exists() else ""
    seen = run(source, tmp_path / "out")
    assert not before or tree_digest(source) == before, f"{cut.where}: the source was modified"
    return judge(good, seen), seen.codes


def unexcused(name: str, cut: Cut, verdict: Verdict) -> str | None:
    """What is wrong with an outcome, or None."""
    excuses = [b for b in gaps.blind(name) if b.when in cut.facts]
    if verdict.outcome == "trouble" or (verdict.outcome == "silent" and not excuses):
        return f"{verdict.outcome}: {verdict.detail}"
    strict = [b for b in excuses if not b.sometimes]
    if verdict.outcome != "silent" and strict:
        return f"{verdict.outcome} ({verdict.detail}): take {strict[0]} off UNDETECTABLE"
    return None
