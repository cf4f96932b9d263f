"""Read a DCP folder of each pipeline stage as one checkpoint, and never one of them as all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.errors import CkptError, DamagedCheckpoint, NameMismatch, NotComplete
from ckptcore.operations.discover import discover

pytestmark = pytest.mark.filterwarnings("ignore")


def stage(number: int, count: int, step: int = 100) -> dict[str, Any]:
    """Return the state of a stage of two layers; its optimizer names what it trains."""
    numbers = torch.Generator().manual_seed(number)
    model = {f"layers.{2 * number + k}.w": torch.randn(4, 4, generator=numbers) for k in range(2)}
    if number == 0:
        model["tok_embeddings.weight"] = torch.randn(8, 4, generator=numbers)
    if number == count - 1:
        model["norm.weight"] = torch.randn(4, generator=numbers)
    optim = {
        "state": {name: {"exp_avg": w * 2} for name, w in model.items()},
        "param_groups": [{"lr": 0.1, "params": list(model)}],
    }
    return {"model": model, "optim": optim, "step": step, "seed": number}


def saved(folder: Path, count: int = 3, **others: Any) -> Path:
    for number in range(count):
        dcp.save(stage(number, count, **others), checkpoint_id=folder / f"pp{number}", no_dist=True)
    return folder


def expected(count: int = 3) -> dict[str, torch.Tensor]:
    return {
        f"model.{name}": w for number in range(count) for name, w in stage(number, count)["model"].items()
    }


def codes(source: Path, **options: Any) -> set[str]:
    manifest = ckptcore.open(str(source), **options)
    return {f.code for f in ckptcore.check(manifest).findings if f.severity == "error"}


def holds(path: Path) -> bool:
    read = load_file(path)
    return all(torch.equal(read[name], w) for name, w in expected().items())


def test_the_folder_of_all_stages(tmp_path: Path) -> None:
    source = saved(tmp_path / "step-100")
    manifest = ckptcore.open(str(source))
    assert ckptcore.check(manifest, "bytes").ok
    objects = {b.key: b.tree for b in manifest.blobs}
    assert (objects["step"], objects["optim.param_groups.0.lr"]) == (100, 0.1)
    assert objects["optim.param_groups.0.params"] == [name.removeprefix("model.") for name in expected()]
    assert {k: v for k, v in objects.items() if "seed" in k} == {f"seed/pp{n}": n for n in range(3)}
    ckptcore.convert(str(source), str(tmp_path / "out.safetensors"))
    assert holds(tmp_path / "out.safetensors")
    ckptcore.convert(str(source), str(tmp_path / "dcp"), verb="reshard", to="dcp", mesh="fsdp=2")
    target = {"model": {n.removeprefix("model."): torch.zeros_like(w) for n, w in expected().items()}}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(target["model"][n.removeprefix("model.")], w) for n, w in expected().items())


def test_the_folders_of_stages_as_sources(tmp_path: Path) -> None:
    source = saved(tmp_path / "step-100")
    ckptcore.convert([str(source / f"pp{n}") for n in range(3)], str(tmp_path / "a.safetensors"))
    for number in range(3):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (source / f"pp{number}").rename(node / f"pp{number}")
    nodes = [str(tmp_path / f"node{n}" / f"pp{n}") for n in range(3)]
    ckptcore.convert(nodes, str(tmp_path / "b.safetensors"))
    assert holds(tmp_path / "a.safetensors")
    assert holds(tmp_path / "b.safetensors")
    with pytest.raises(DamagedCheckpoint):
        ckptcore.convert(nodes[1:], str(tmp_path / "c.safetensors"))


def test_a_named_stage_that_does_not_exist(tmp_path: Path) -> None:
    """The folder that has the others is complete without it: nothing else would show that it was named."""
    source = saved(tmp_path / "step-100")
    (source / "pp8").mkdir()
    for number in (8, 9):
        named = [str(source / f"pp{n}") for n in (0, 1, 2, number)]
        for arguments in (
            ["validate", *named],
            ["inspect", *named],
            ["consolidate", *named, str(tmp_path / "o")],
        ):
            assert run(arguments) == NotComplete.exit_code, arguments
        with pytest.raises(NotComplete, match=f"pp{number}"):
            ckptcore.open(named)
        with pytest.raises(NotComplete, match=f"pp{number}"):
            ckptcore.convert(named, str(tmp_path / "o"))
        assert ckptcore.check(ckptcore.open(named, allow_incomplete=True)).ok
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("lost", "code"), [(0, "missing-file"), (1, "missing-file"), (2, "unproven-parts")])
def test_a_stage_is_missing(lost: int, code: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "step-100")
    (source / f"pp{lost}").rename(tmp_path / "away")
    assert codes(source) == {code}
    assert codes(source, allow_incomplete=True) == set()


@pytest.mark.parametrize(
    ("number", "code"), [(0, "unproven-parts"), (1, "missing-file"), (2, "missing-file")]
)
def test_one_stage_alone(number: int, code: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "step-100") / f"pp{number}"
    assert codes(source) == {code}
    for verb in ("consolidate", "export", "reshard"):
        more = {"mesh": "fsdp=2", "to": "dcp"} if verb == "reshard" else {}
        with pytest.raises(CkptError) as caught:
            ckptcore.convert(str(source), str(tmp_path / verb), verb=verb, **more)
        assert caught.value.exit_code == (26 if number == 0 else 1)
        assert not (tmp_path / verb).exists()


def test_the_only_stage_is_the_model(tmp_path: Path) -> None:
    source = saved(tmp_path / "step-100", 1)
    assert codes(source) == codes(source / "pp0") == set()


def test_layers_that_no_stage_has(tmp_path: Path) -> None:
    source = saved(tmp_path / "step-100")
    state = stage(1, 3)
    for part in (state["model"], state["optim"]["state"]):
        del part["layers.2.w"]
    dcp.save(state, checkpoint_id=source / "pp1", no_dist=True)
    assert codes(source) == {"missing-file"}


def test_stages_of_two_steps(tmp_path: Path) -> None:
    source = saved(tmp_path / "step-100")
    dcp.save(stage(1, 3, step=90), checkpoint_id=source / "pp1", no_dist=True)
    assert codes(source) == {"mixed-saves"}


def test_names_that_each_stage_begins_anew(tmp_path: Path) -> None:
    for number in range(2):
        dcp.save({"model": stage(0, 2)["model"]}, checkpoint_id=tmp_path / f"pp{number}", no_dist=True)
    with pytest.raises(NameMismatch, match="pp0 and in pp1"):
        ckptcore.open(str(tmp_path))


def test_a_config_proves_the_shapes(tmp_path: Path) -> None:
    """A last norm of another name says nothing; transformers' names and sizes do."""
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2}
    shapes = {
        "self_attn.q_proj.weight": (4, 4),
        "self_attn.o_proj.weight": (4, 4),
        "mlp.down_proj.weight": (4, 6),
        "mlp.up_proj.weight": (6, 4),
    }
    for number in range(2):
        state = {f"model.layers.{number}.{name}": torch.ones(shape) for name, shape in shapes.items()}
        state |= (
            {"model.embed_tokens.weight": torch.ones(8, 4)}
            if number == 0
            else {"model.norm.weight": torch.ones(4)}
        )
        dcp.save(state, checkpoint_id=tmp_path / f"pp{number}", no_dist=True)
    form = {**sizes, "num_attention_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(form))
    assert codes(tmp_path) == set()


def test_a_sweep_sees_one_checkpoint(tmp_path: Path) -> None:
    for step in (100, 200):
        saved(tmp_path / "run" / f"step-{step}", step=step)
    assert [(c.path, c.format) for c in discover(str(tmp_path))] == [
        ("run/step-100", "dcp"),
        ("run/step-200", "dcp"),
    ]
