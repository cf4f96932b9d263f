"""Files of pipeline layers that are missing, or that no parameter is listed for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from deepspeed_files import model_states, moment, partitions, save, shapes_of, tensors

import ckptcore
from ckptcore.errors import DamagedCheckpoint, Finding

ARCHIVE = samples.FIXTURES / "deepspeed.tar.zst"
LAYER = "layer_{:02d}-model_states.pt"
MODEL = "mp_rank_{:02d}_model_states.pt"
OPTIM = "zero_pp_rank_0_mp_rank_{:02d}_optim_states.pt"
TIED = "tied_modules.embed.weight"


@pytest.fixture
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    corpus = samples.unpack(request.config.rootpath / ".pytest_cache" / "samples", ARCHIVE)
    return Path(shutil.copytree(corpus / "pipe2_z1_ws2" / "ckpt", tmp_path / "pipe2_z1_ws2"))


def found(folder: Path, code: str) -> list[Finding]:
    return [f for f in ckptcore.open(str(folder)).findings if f.code == code]


def require_missing(folder: Path, path: str) -> None:
    missing = found(folder, "missing-rank")
    assert [f.file for f in missing] == [path]
    assert missing[0].hint
    with pytest.raises(DamagedCheckpoint):
        ckptcore.convert(str(folder), str(folder.parent / "out.safetensors"))


def tied(folder: Path, extra: dict[str, Any] | None = None) -> Path:
    """Two stages that share an embedding, which both have a file for: layers 0 and 4; 2 is a function."""
    shapes = {TIED: (8, 3), "1.up.weight": (6, 3), "3.down.weight": (3, 6)}
    full = tensors(shapes)
    stages = ([TIED, "1.up.weight"], ["3.down.weight", TIED])
    files: dict[str, Any] = {}
    for stage, names in enumerate(stages):
        group = {n: full[n] for n in names}
        files[MODEL.format(stage)] = model_states(1, 2, module=None, param_shapes=[shapes_of(group)]) | {
            "checkpoint_parallel_dimensions": {"tp_degree": 1, "pp_degree": 2}
        }
        files[OPTIM.format(stage)] = partitions([group], 1)[0]
    files[LAYER.format(0)] = files[LAYER.format(4)] = {"weight": full[TIED]}
    files[LAYER.format(1)] = {"up.weight": full["1.up.weight"]}
    files[LAYER.format(3)] = {"down.weight": full["3.down.weight"]}
    return save(folder, files | (extra or {}))


@pytest.mark.parametrize("number", [4, 17])
def test_a_layer_that_no_file_lists_is_named(pipeline: Path, number: int) -> None:
    """Past the last one, of another run: it is read, and a finding says that nothing speaks of it."""
    assert ckptcore.open(str(pipeline)).findings == ()
    path = LAYER.format(number)
    torch.save({"lin.weight": torch.randn(20, 20), "lin.bias": torch.randn(20)}, pipeline / path)
    (unlisted,) = found(pipeline, "unlisted-tensor")
    assert (unlisted.file, unlisted.severity) == (path, "warning")
    assert path in unlisted.message
    assert f"module.{number}.lin.bias" in unlisted.message
    assert unlisted.hint == "move the file away if it is of another save"
    done = ckptcore.convert(str(pipeline), str(pipeline.parent / "out.safetensors"))
    assert path in {f.file for f in done.warnings}


def test_a_copied_layer_that_no_file_lists_is_named(pipeline: Path) -> None:
    shutil.copyfile(pipeline / LAYER.format(1), pipeline / LAYER.format(9))
    assert [f.file for f in found(pipeline, "unlisted-tensor")] == [LAYER.format(9)]


def test_layers_without_parameters_and_parts_that_are_frozen_are_usual(tmp_path: Path) -> None:
    """A module without parameters has an empty file, buffers are listed, and adapters have frozen weights."""
    extra = {LAYER.format(2): {}, LAYER.format(5): {"mask": torch.ones(3)}}
    folder = tied(tmp_path / "ckpt", extra)
    for stage in (0, 1):
        tree = torch.load(folder / MODEL.format(stage), weights_only=False)
        torch.save({**tree, "buffer_names": ["5.mask"]}, folder / MODEL.format(stage))
    torch.save({"up.weight": tensors({"x": (6, 3)})["x"], "base": torch.ones(5)}, folder / LAYER.format(1))
    codes = {f.code for f in ckptcore.open(str(folder)).findings}
    assert not codes & {"unlisted-tensor", "missing-rank"}


def test_a_surplus_layer_is_wrong_where_frozen_parameters_are_listed(tmp_path: Path) -> None:
    folder = tied(tmp_path / "ckpt", {LAYER.format(7): {"down.weight": torch.randn(3, 6)}})
    for stage in (0, 1):
        tree = torch.load(folder / MODEL.format(stage), weights_only=False)
        torch.save({**tree, "frozen_param_shapes": {}}, folder / MODEL.format(stage))
    assert [f.file for f in found(folder, "mixed-saves")] == [LAYER.format(7)]


@pytest.mark.parametrize("number", range(4))
def test_a_missing_layer_is_named(pipeline: Path, number: int) -> None:
    (pipeline / LAYER.format(number)).unlink()
    require_missing(pipeline, LAYER.format(number))


def test_missing_layers_are_named_where_none_is_left(pipeline: Path) -> None:
    for number in range(4):
        (pipeline / LAYER.format(number)).unlink()
    assert [f.file for f in found(pipeline, "missing-rank")] == [LAYER.format(n) for n in range(4)]


def test_a_missing_tied_layer_is_noticed(tmp_path: Path) -> None:
    """The last one may have no file: with a `forward_fn` it is a function."""
    folder = tied(tmp_path / "ckpt")
    assert ckptcore.check(ckptcore.open(str(folder)), "bytes").ok
    (folder / LAYER.format(4)).unlink()
    assert ckptcore.check(ckptcore.open(str(folder)), "bytes").ok
    (folder / LAYER.format(0)).unlink()
    (missing,) = found(folder, "missing-rank")
    assert TIED in missing.message


def test_flat_states_are_of_no_layer(tmp_path: Path) -> None:
    value = tensors({"w": (4, 3)})["w"]
    inner = {"state": {0: {"exp_avg": value.reshape(-1)}}, "param_groups": [{"params": [0]}]}
    optimizer = {"optimizer_state_dict": inner, "fp32_groups_flat": [value.reshape(-1)]}
    tree = model_states(1, module=None, optimizer=optimizer, ds_config={})
    folder = save(tmp_path / "ckpt", {MODEL.format(0): tree, LAYER.format(0): {"w": value.half()}})
    assert ckptcore.check(ckptcore.open(str(folder)), "bytes").ok


def test_a_missing_layer_is_noticed_by_the_optimizer_s_states(tmp_path: Path) -> None:
    """Without ZeRO no file lists parameters: a state has the shape of one that no layer has."""
    files: dict[str, Any] = {}
    for stage in (0, 1):
        values = tensors({f"w{n}": (4, 3 + n + 2 * stage) for n in (0, 1)}, stage)
        states = {
            n: {"step": torch.tensor(5.0), "exp_avg": moment("exp_avg", v)}
            for n, v in enumerate(values.values())
        }
        optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        tree = model_states(1, 2, module=None, optimizer=optimizer, ds_config={})
        files[MODEL.format(stage)] = tree | {
            "checkpoint_parallel_dimensions": {"tp_degree": 1, "pp_degree": 2}
        }
        for n, value in enumerate(values.values()):
            files[LAYER.format(2 * stage + n)] = {"w": value}
    folder = save(tmp_path / "ckpt", files)
    assert ckptcore.check(ckptcore.open(str(folder)), "bytes").ok
    (folder / LAYER.format(3)).unlink()
    (missing,) = found(folder, "missing-rank")
    assert "[4, 6]" in missing.message
    # A parameter that is tied, or one of several layers that are alike: nothing tells which.
    torch.save({"w": files[LAYER.format(3)]["w"]}, folder / LAYER.format(3))
    other = {**files[MODEL.format(0)], "optimizer": files[MODEL.format(1)]["optimizer"]}
    torch.save(other, folder / MODEL.format(0))
    assert not found(folder, "missing-rank")
    assert len(found(folder, "missing-part")) == 2
