"""Damage to any format: does a damaged checkpoint ever become a silent good one?

Every row of `damage.EVERYWHERE` is done to every sample, at places that a seed chooses. After each,
validation and conversion must refuse with a documented code, or give the right result, or say what
is left out of it; what passes in silence stands in `gaps.UNDETECTABLE`. `test_damage` does more to
folders of torch.distributed.checkpoint, and through the command line.

`make test` does each row once to a sample of every format; the whole grid is a soak.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import damage
import gaps
import pytest
from damage_judge import Run, Verdict, judge, run
from damage_plain import MADE, made
from damage_sites import BESIDE, Cut, Tree
from samples import SAMPLES, Sample, tree_digest

# Together they hold every format that is read; every row is done to them.
SHORT = frozenset(
    {
        "dcp_nested_2r",
        "dcp_safetensors_fmt_2r",
        "hf_sharded_4r",
        "hf_fp8_block",
        "lightning_trainer_mp_sharded_2r",
        "accelerate_fsdp2_2r",
        "verl_fsdp2_4r",
        "api_torch_dist_0.12.3",
        "api_torch_dist_0.19.2",
        "api_zarr_0.12.3",
        "root_torch_dist_llama_0.19.2",
        "fsdp_dtensor_llama_dp4_0.19.2",
        "legacy_llama_tp2pp2_0.15.3",
        "v01_dtensor_ws4",
        "v3_bf16params_ws2",
        "olmo1_local_ws2",
        "olmo1_unsharded_safetensors",
    }
)
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
SEEDS = 12  # of places, until one is found that stays silent
# The part of the table that is about these rows.
ENTRIES = [b for b in gaps.UNDETECTABLE if any(b in gaps.blind(name) for name in damage.EVERYWHERE)]
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" not in metafunc.fixturenames:
        return
    cases = [
        pytest.param(
            None,
            made_name,
            group,
            PLACES,
            id=f"{made_name}-{group.rstrip('-') or 'others'}",
            marks=pytest.mark.xdist_group(made_name),
        )
        for made_name in MADE
        for group in GROUPS
    ]
    for sample in metafunc.config.stash[SAMPLES]:
        if gaps.lookup(gaps.REFUSED_OTHER, sample.name):
            continue
        for tree in subjects(sample):
            name = f"{sample.name}/{tree.name or tree.root.name}"
            mark = pytest.mark.xdist_group(name)
            for group in GROUPS:
                what = f"{name}-{group.rstrip('-') or 'others'}"
                if sample.name in SHORT:
                    cases.append(pytest.param(sample, tree, group, PLACES, id=what, marks=mark))
                marks = [mark, pytest.mark.soak]
                cases.append(pytest.param(sample, tree, group, MORE_PLACES, id=f"{what}-more", marks=marks))
    metafunc.parametrize(("victim", "tree", "group", "places"), cases)


@pytest.fixture(scope="session")
def truths() -> dict[Path, Run]:
    return {}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where plain checkpoints are made."""
    return tmp_path_factory.mktemp("plain")


def test_damage(
    victim: Sample | None,
    tree: Tree | str,
    group: str,
    places: int,
    truths: dict[Path, Run],
    plain: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if isinstance(tree, str):
        tree = made(tree, plain)
    good = truth(tree, truths, tmp_path / "good")
    if good.refused and victim and victim.corpus:
        pytest.skip(f"refused as it is: {good.refused}")
    assert not good.trouble, good.trouble
    assert not good.refused, good.refused
    seed = request.config.getoption("--seed") or 1
    wrong, seen = list[str](), Counter[str]()
    for name in rows_of(group):
        for cut in chosen(tree, name, places, seed):
            verdict, said = outcome(tree, cut, good, tmp_path)
            seen[verdict.outcome] += 1
            flaw = unexcused(name, cut, verdict)
            if flaw:
                wrong.append(f"{name}: {cut.where}: {flaw}; said {said}")
    print(f"--seed {seed}: {dict(seen)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda b: f"{b.damage}-{b.when}")
def test_excuse_is_needed(
    entry: gaps.Blind, truths: dict[Path, Run], plain: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each entry of the table is a silence that can be heard somewhere, some only at a few places."""
    names = [n for n in damage.EVERYWHERE if entry in gaps.blind(n)]
    own = [s for s in request.config.stash[SAMPLES] if not s.corpus]
    trees = [made(name, plain) for name in MADE]
    trees += [t for s in own if not gaps.lookup(gaps.REFUSED_OTHER, s.name) for t in subjects(s)]
    for seed, tree, name in product(range(1, SEEDS + 1), trees, names):
        for cut in chosen(tree, name, MORE_PLACES, seed):
            if entry.when in cut.facts:
                good = truth(tree, truths, tmp_path / "good")
                if outcome(tree, cut, good, tmp_path)[0].outcome == "silent":
                    return
    pytest.fail(f"never silent: take it off UNDETECTABLE ({entry.why})")


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
