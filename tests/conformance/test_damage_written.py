"""Test that our own readers detect damage to the outputs of every writer.

The rows and rules are those of `test_damage_formats`; the checkpoints are outputs, consolidated and for
meshes, of samples that use everything that each format can store.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from zlib import crc32

import damage
import pytest
from damage_judge import Run
from damage_rows import GROUPS, MORE_PLACES, PLACES, chosen, outcome, rows_of, subjects, truth, unexcused
from damage_sites import Tree
from meshes import SETTINGS, WRITERS, cut
from samples import SAMPLES, seed_of

import ckptcore

# Name -> (sample, format or writer for a mesh, mesh or nothing).
OUTPUTS: dict[str, tuple[str, str, str]] = {
    "safetensors": ("dcp_torchtitan_like_4r", "safetensors", ""),
    "torch_save": ("dcp_nested_2r", "torch_save", ""),
    "dcp": ("dcp_nested_2r", "dcp", ""),
    "torch_ranks": ("lightning_fabric_mp_nested_2r", "torch_ranks", ""),
    "torch_dist": ("api_torch_dist_0.19.2", "torch_dist", ""),
    "zarr": ("api_zarr_0.12.3", "zarr", ""),
    "olmo_core": ("v3_bf16params_ws2", "olmo_core", ""),
    "olmo_v01": ("v01_fsdp1_fp32_ws2", "olmo_v01", ""),
    "lightning": ("lightning_fabric_mp_nested_2r", "lightning", ""),
    "dcp-mesh": ("dcp_torchtitan_like_4r", "dcp", "fsdp=2,tp=2"),
    "dcp-safetensors-mesh": ("dcp_torchtitan_like_4r", "dcp-safetensors", "fsdp=3"),
    "torch_ranks-mesh": ("dcp_torchtitan_like_4r", "torch_ranks", "fsdp=2,tp=2"),
    "torch_dist-mesh": ("api_torch_dist_0.19.2", "torch_dist", "fsdp=1,tp=2"),
    "olmo_core-mesh": ("v3_bf16params_ws2", "olmo_core", "fsdp=2"),
    "olmo_v01-mesh": ("v01_dtensor_ws4", "olmo_v01", "fsdp=3"),
    "lightning-mesh": ("lightning_fabric_mp_nested_2r", "lightning", "fsdp=2"),
}
SUFFIXES = {"torch_save": ".pt", "lightning": ".ckpt"}  # of outputs that are one file


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tree]:
    """The outputs, made on first use."""
    samples = {s.name: s for s in request.config.stash[SAMPLES]}

    class Outputs(dict[str, Tree]):
        def __missing__(self, name: str) -> Tree:
            sample, to, mesh = OUTPUTS[name]
            tree = next(subjects(samples[sample]))
            # Two levels below, there are no other checkpoints to take files from.
            (folder := tmp_path_factory.mktemp(name) / "family" / "one").mkdir(parents=True)
            source = tree.root / (tree.name or "")
            if mesh:
                cut(source, folder / "out", WRITERS[to], mesh)
                self[name] = Tree(folder / "out")
                return self[name]
            suffix = SUFFIXES.get(to, "")
            out = folder / "out" / f"model{suffix}" if suffix else folder / "out"
            out.parent.mkdir(exist_ok=True)
            ckptcore.convert(str(source), str(out), to=to, settings=SETTINGS)
            self[name] = Tree(out.parent, out.name) if suffix else Tree(out)
            return self[name]

    return Outputs()


@pytest.fixture(scope="module")
def truths() -> dict[Path, Run]:
    return {}


@pytest.mark.parametrize("name", OUTPUTS)
def test_damage(name: str, written: dict[str, Tree], truths: dict[Path, Run], tmp_path: Path) -> None:
    """A quarter of the rows, each once; an eighth of them for what a mesh has cut."""
    share = 8 if name.endswith("-mesh") else 4
    rows = [row for row in damage.EVERYWHERE if crc32(f"{name} {row}".encode()) % share == 1]
    seen = damaged(written[name], rows, PLACES, 1, truths, tmp_path)
    assert seen["refused"] > seen["silent"], seen


@pytest.mark.soak
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", OUTPUTS)
def test_damage_more(
    name: str,
    group: str,
    written: dict[str, Tree],
    truths: dict[Path, Run],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    damaged(written[name], rows_of(group), MORE_PLACES, seed_of(request), truths, tmp_path)


def damaged(
    tree: Tree, rows: list[str], places: int, seed: int, truths: dict[Path, Run], tmp_path: Path
) -> Counter[str]:
    """Count the outcomes; fail for one without an excuse."""
    good = truth(tree, truths, tmp_path / "good")
    assert not good.refused, good.refused
    assert not good.trouble, good.trouble
    wrong, seen = list[str](), Counter[str]()
    for row in rows:
        for cut_ in chosen(tree, row, places, seed):
            verdict, text = outcome(tree, cut_, good, tmp_path)
            seen[verdict.outcome] += 1
            flaw = unexcused(row, cut_, verdict)
            if flaw:
                wrong.append(f"{row}: {cut_.where}: {flaw}; text {text}")
    print(f"--seed {seed}: {dict(seen)}")
    assert not wrong, "\n".join(wrong)
    return seen
