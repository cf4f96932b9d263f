"""Test that no damaged checkpoint of any format is silently converted.

Every row of `damage.EVERYWHERE` is applied to every sample, at places that a seed chooses. After each,
validation and conversion must refuse with a documented code, or give the right result, or report what is left
out; damage that cannot be detected is listed in `gaps.UNDETECTABLE`. `test_damage` applies more to folders of
torch.distributed.checkpoint, and through the command line.

`make test` applies a twelfth of the rows once to a sample of every format, each row to other samples; the
full grid is a soak.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from zlib import crc32

import damage
import gaps
import pytest
import soaks
from damage_judge import Run
from damage_plain import MADE, made
from damage_rows import GROUPS, MORE_PLACES, PLACES, chosen, outcome, rows_of, subjects, truth, unexcused
from damage_sites import Tree
from samples import SAMPLES, Sample

# Together they hold every format that is read; every row is done to a twelfth of them.
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
        "z2_bf16_ws4",
        "z3_fp32_ws2",
        "moe_ep2_z2_ws2",
        "pipe2_z1_ws2",
        "z1_bf16_gadfp32_ws2_universal",
        "meta_llama3_tp2",
        "tc_safetensors_2r",
        "nanotron_tp2",
        "dit_pipeline",
    }
)
SEEDS = 12  # of places, until one is found that stays silent
# The part of the table that is about these rows.
ENTRIES = [b for b in gaps.UNDETECTABLE if any(b in gaps.blind(name) for name in damage.EVERYWHERE)]


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
            for number, group in enumerate(GROUPS):
                what = f"{name}-{group.rstrip('-') or 'others'}"
                if sample.name in SHORT and (crc32(name.encode()) + number) % 12 == 0:
                    cases.append(pytest.param(sample, tree, group, PLACES, id=what, marks=mark))
                marks = [mark, pytest.mark.soak]
                cases.append(pytest.param(sample, tree, group, MORE_PLACES, id=f"{what}-more", marks=marks))
    cases = soaks.rows_to_collect(metafunc.config, cases)
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
            verdict, text = outcome(tree, cut, good, tmp_path)
            seen[verdict.outcome] += 1
            flaw = unexcused(name, cut, verdict)
            if flaw:
                wrong.append(f"{name}: {cut.where}: {flaw}; text {text}")
    print(f"--seed {seed}: {dict(seen)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda b: f"{b.damage}-{b.when}")
def test_excuse_is_needed(
    entry: gaps.Blind, truths: dict[Path, Run], plain: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each entry of the table is undetected damage somewhere, some only at a few places."""
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
