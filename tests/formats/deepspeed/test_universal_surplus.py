"""Universal folders that hold parameters of another save, or weights that contradict their masters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import samples

import ckptcore
from ckptcore.errors import DamagedCheckpoint

ARCHIVE = samples.FIXTURES / "deepspeed.tar.zst"
UNIVERSAL = [
    "autotp2_z1_fp32_universal",
    "pipe2_z1_ws2_universal",
    "z1_bf16_gadfp32_ws2_universal",
    "z1_fp32_ws2_universal",
    "z2_bf16_ws4_universal",
    "z3_bf16_ws4_universal",
    "z3_fp32_ws2_universal",
]


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        corpus = samples.unpack(request.config.rootpath / ".pytest_cache" / "samples", ARCHIVE)
        return Path(shutil.copytree(corpus / name / "ckpt", tmp_path / name))

    return make


def mixed(folder: Path) -> set[str | None]:
    """Return the files of the findings `mixed-saves`, with which no conversion begins."""
    found = {f.file for f in ckptcore.open(str(folder)).findings if f.code == "mixed-saves"}
    if found:
        with pytest.raises(DamagedCheckpoint):
            ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))
    return found


@pytest.mark.alike(3)
@pytest.mark.parametrize("name", UNIVERSAL)
def test_a_parameter_that_no_file_lists_is_of_another_save(name: str, copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    assert mixed(folder) == set()
    states = next(p for p in sorted((folder / "zero").iterdir()) if (p / "exp_avg.pt").exists())
    shutil.copytree(states, folder / "zero" / "layers.99.weight")
    assert mixed(folder) == {"zero/layers.99.weight/fp32.pt"}


@pytest.mark.alike(2)
@pytest.mark.parametrize("name", UNIVERSAL)
@pytest.mark.parametrize("key", ["fp32", "step", "exp_avg"])
def test_a_lone_file_of_a_parameter_that_nothing_lists_is_of_another_save(
    name: str, key: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    fitting = sorted((folder / "zero").glob(f"*/{key}.pt"))
    if not fitting:
        pytest.skip(f"the sample has no {key}.pt")
    (folder / "zero/layers.99.weight").mkdir()
    shutil.copyfile(fitting[0], folder / f"zero/layers.99.weight/{key}.pt")
    assert mixed(folder) == {f"zero/layers.99.weight/{key}.pt"}


def test_a_stage_s_file_in_the_place_of_another_leaves_parameters_unlisted(
    copied: Callable[[str], Path],
) -> None:
    """The other stage's parameters would be no model's."""
    folder = copied("pipe2_z1_ws2_universal")
    shutil.copyfile(folder / "mp_rank_00_model_states.pt", folder / "mp_rank_01_model_states.pt")
    assert "zero/2.weight/fp32.pt" in mixed(folder)
