"""Read OLMo-core's trainer steps, OLMo's local and unsharded checkpoints; refuse damaged ones."""

from __future__ import annotations

import base64
import io
import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_samples import codes, copied, pickled, sample, tensors, truth, write_local
from safetensors.torch import load_file, save_file
from samples import differences, read_safetensors, value

import ckptcore
from ckptcore.core.object_tree import decode
from ckptcore.errors import AmbiguousModel, MalformedCheckpoint, NotComplete, UnsafeContent, UnsupportedFormat

CORE, LOCAL, UNSHARDED = "v3_bf16params_ws2", "olmo1_local_ws2", "olmo1_unsharded_safetensors"


def objects(path: Path) -> dict[str, Any]:
    return {b.key: decode(b.tree) for b in ckptcore.open(str(path)).blobs if b.known}


def warnings(path: Path) -> list[str]:
    return [f.code for f in ckptcore.open(str(path)).findings if f.severity == "warning"]


@pytest.mark.parametrize("name", [CORE, LOCAL, UNSHARDED])
def test_step_folders_equal_the_saved_state(name: str, request: pytest.FixtureRequest) -> None:
    """Weights and optimizer state of each sample, bit for bit, and nothing more."""
    root = sample(request, name)
    step = next(p for p in root.iterdir() if p.name.startswith("step"))
    manifest = ckptcore.open(str(step))
    assert ckptcore.check(manifest, "bytes").ok
    found = tensors(manifest)
    assert found.keys() == truth(root).keys()
    assert not differences(truth(root), found)


# OLMo-core 1.0 and later


def test_a_step_records_its_writer(request: pytest.FixtureRequest) -> None:
    """Beside tensors it has `.metadata.json`, the trainer's state and the config's name."""
    step = sample(request, CORE) / "step3"
    manifest = ckptcore.open(str(step))
    assert manifest.format == "olmo_core"
    assert manifest.origin["writer_version"] == "3.0.0"
    assert manifest.origin["ephemeral"] is False
    assert manifest.origin["config"] == "config.json"
    found = objects(step)
    assert found["train.global_step"] == 3
    assert found["train.data_loader"] == {"epoch": 1, "batches_processed": 3}
    assert found["optim.param_groups.embeddings.weight.weight_decay"] == 0.0
    assert ckptcore.open(str(step / "model_and_optim")).format == "olmo_core"


def test_trainer_state_that_differs_by_rank(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Equal values once, others per rank; tensors among them are tensors."""
    step = copied(request, CORE, tmp_path)
    for rank in (0, 1):
        state = {"global_step": 3, "world_size": 2, "rng": {"torch": torch.arange(4) + rank, "python": rank}}
        torch.save(state, step / "train" / f"rank{rank}.pt")
    found = objects(step)
    assert found["train.world_size"] == 2
    assert [found[f"train.rank{r}.rng.python"] for r in (0, 1)] == [0, 1]
    stored = tensors(ckptcore.open(str(step)))
    assert stored["train.rank1.rng.torch"] == value(torch.arange(4) + 1)
    ckptcore.convert(str(step), str(tmp_path / "out"), to="olmo_v01")
    for rank in (0, 1):
        back = torch.load(tmp_path / "out" / "train" / f"rank{rank}.pt", weights_only=True)
        assert torch.equal(back["rng"]["torch"], torch.arange(4) + rank)
        assert (back["rng"]["python"], back["global_step"]) == (rank, 3)


def test_unfinished_steps(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The temporary folder of a save, a step without tensors, an unfinished DCP save."""
    step = copied(request, CORE, tmp_path)
    working = step.rename(step.with_name("step3-tmp"))
    with pytest.raises(NotComplete, match="renamed"):
        ckptcore.open(str(working))
    step = working.rename(step)
    (step / "model_and_optim" / ".metadata").unlink()
    with pytest.raises(NotComplete):
        ckptcore.open(str(step))
    for path in (step / "model_and_optim").iterdir():
        path.unlink()
    with pytest.raises(NotComplete, match="model_and_optim"):
        ckptcore.open(str(step))


def test_missing_parts(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Without the trainer's own files the tensors are complete: they are read, with a warning."""
    step = copied(request, CORE, tmp_path)
    (step / "train" / "rank1.pt").unlink()
    assert warnings(step) == ["missing-part"]
    (step / "train" / "rank0.pt").unlink()
    (step / ".metadata.json").unlink()
    assert warnings(step) == ["missing-part", "missing-part"]
    assert not codes(step)


def test_files_of_two_steps(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A rank's trainer state of another step, or of another world size, is an error."""
    step = copied(request, CORE, tmp_path)
    torch.save({"global_step": 2, "world_size": 2}, step / "train" / "rank1.pt")
    assert codes(step) == {"mixed-saves"}
    torch.save({"global_step": 3, "world_size": 4}, step / "train" / "rank1.pt")
    assert codes(step) == {"mixed-saves"}


def test_empty_data_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Writer threads without work leave files of 0 bytes: no error and no warning."""
    step = copied(request, CORE, tmp_path)
    (step / "model_and_optim" / "__0_9.distcp").write_bytes(b"")
    assert not codes(step)
    assert not warnings(step)


def test_torch_new_of_olmo(tmp_path: Path) -> None:
    """OLMo's torch_new: plain torch's DCP in model_and_optim/, config.yaml instead of a marker."""
    import torch.distributed.checkpoint as dcp

    step = tmp_path / "step5"
    state = {"model": {"a.w": torch.randn(3, 4)}, "optim": {"state": {"a.w": {"exp_avg": torch.randn(3, 4)}}}}
    dcp.save(state, checkpoint_id=step / "model_and_optim", no_dist=True)
    (step / "train").mkdir()
    torch.save({"global_step": 5, "world_size": 1}, step / "train" / "rank0.pt")
    (step / "config.yaml").write_text("run_name: x\n")
    manifest = ckptcore.open(str(step))
    assert manifest.format == "olmo_core"
    assert not manifest.findings
    assert tensors(manifest)["optim.state.a.w.exp_avg"] == value(state["optim"]["state"]["a.w"]["exp_avg"])


def test_direct_saves_keep_their_flat_weights(tmp_path: Path) -> None:
    """`save_state_dict_direct`: consolidated as stored, never exported as a model."""
    import torch.distributed.checkpoint as dcp

    state = {
        "blocks.0.w.main": torch.randn(12),
        "blocks.0.w.exp_avg": torch.randn(12),
        "blocks.0.w.step": torch.tensor(1.0),
        "router.score_bias": torch.zeros(2),
    }
    dcp.save(state, checkpoint_id=tmp_path / "step1" / "model_and_optim", no_dist=True)
    ckptcore.convert(str(tmp_path / "step1"), str(tmp_path / "out"))
    assert read_safetensors(tmp_path / "out") == {k: value(v) for k, v in state.items()}
    with pytest.raises(AmbiguousModel, match="flat"):
        ckptcore.convert(str(tmp_path / "step1"), str(tmp_path / "hf"), verb="export")


def test_export_takes_the_model(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The export of a step has the weights under their own names, and nothing of the trainer."""
    root = sample(request, CORE)
    ckptcore.convert(str(root / "step3"), str(tmp_path / "hf"), verb="export", names="stored")
    assert read_safetensors(tmp_path / "hf") == read_safetensors(root / "expected.safetensors")


# OLMo local: flat parameters


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("generation", ["infos", "indices"])
def test_flat_parameters_of_every_torch(generation: str, padding: int, tmp_path: Path) -> None:
    """Positions in the forms of torch up to 2.0 and later; padding is never an element."""
    wanted = write_local(tmp_path / "step1", generation, padding=padding)
    manifest = ckptcore.open(str(tmp_path / "step1"))
    assert manifest.format == "olmo_local"
    found = ckptcore.check(manifest, "bytes").findings
    assert [(f.code, f.file) for f in found] == [("unproven", "config.yaml")]
    assert tensors(manifest) == wanted
    groups = objects(tmp_path / "step1")
    assert groups["optim.param_groups.0"]["param_names"] == ["top.w.a", "top.w.b"]


def test_local_damage(tmp_path: Path) -> None:
    """A missing rank, another world size, a changed position, copies of `step` that differ."""
    step = tmp_path / "step1"
    write_local(step, "infos")
    (step / "metadata.yaml").write_text("world_size: 4\n")
    assert codes(step) == {"missing-rank"}
    (step / "metadata.yaml").write_text("world_size: 3\n")
    lost = (step / "model" / "rank1.pt").read_bytes()
    (step / "model" / "rank1.pt").unlink()
    assert codes(step) >= {"missing-rank", "hole"}
    (step / "model" / "rank1.pt").write_bytes(lost[:-100])
    assert codes(step) == {"malformed"}
    (step / "model" / "rank1.pt").write_bytes(lost)
    state = torch.load(step / "optim" / "rank1.pt")
    state["state"][0]["step"] = torch.tensor(9.0)
    torch.save(state, step / "optim" / "rank1.pt")
    assert codes(step) == {"replica-mismatch"}


def test_local_optimizer_without_names(tmp_path: Path) -> None:
    """State without names stops a consolidation, but not an export of the model."""
    wanted = write_local(tmp_path / "step1", "infos", names=False)
    assert codes(tmp_path / "step1") == {"refused-tensors"}
    ckptcore.convert(str(tmp_path / "step1"), str(tmp_path / "hf"), verb="export")
    assert read_safetensors(tmp_path / "hf") == {k.removeprefix("model."): v for k, v in wanted.items()}


def test_unfinished_local_save(tmp_path: Path) -> None:
    """config.yaml and metadata.yaml are written last."""
    write_local(tmp_path / "step1", "infos")
    (tmp_path / "step1" / "config.yaml").unlink()
    (tmp_path / "step1" / "metadata.yaml").unlink()
    with pytest.raises(NotComplete):
        ckptcore.open(str(tmp_path / "step1"))


# OLMo unsharded


def encoded(path: tuple[Any, ...], is_pickled: bool, protocol: int = 4) -> str:
    return base64.urlsafe_b64encode(pickle.dumps((path, is_pickled), protocol)).decode()


def test_a_file_with_pickled_names(request: pytest.FixtureRequest) -> None:
    """Opened alone, its tensors have the names inside the pickles."""
    root = sample(request, UNSHARDED)
    manifest = ckptcore.open(str(root / "step2-unsharded" / "model.safetensors"))
    assert tensors(manifest) == read_safetensors(root / "expected.safetensors")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_names_of_every_protocol(protocol: int, tmp_path: Path) -> None:
    """Names that begin like a pickle identify such a file."""
    save_file({encoded(("a.w",), False, protocol): torch.ones(2)}, tmp_path / "model.safetensors")
    assert tensors(ckptcore.open(str(tmp_path))) == {"model.a.w": value(torch.ones(2))}


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must never be printed",)


def test_a_name_with_a_global_is_unsafe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code in a tensor's name is refused by name and never run."""
    bad = base64.urlsafe_b64encode(pickle.dumps(((Evil(),), False), 4)).decode()
    assert any(op.name == "STACK_GLOBAL" for op, _, _ in pickletools.genops(base64.urlsafe_b64decode(bad)))
    save_file({bad: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsafeContent, match="print"):
        ckptcore.open(str(tmp_path))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "name",
    [
        "plain.name",
        "gASV",
        encoded((("a",),), False),
        encoded((), False),
        base64.urlsafe_b64encode(pickle.dumps("a", 4)).decode(),
    ],
)
def test_names_that_are_not_paths(name: str, tmp_path: Path) -> None:
    """Among pickled names any other name is an error."""
    save_file({encoded(("a.w",), False): torch.ones(2), name: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(MalformedCheckpoint):
        ckptcore.open(str(tmp_path / "model.safetensors"))


def test_a_value_with_a_global_is_kept_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickled value that needs a class is named and left out; tensors beside it are read."""
    save_file(
        {encoded(("a",), False): torch.ones(2), encoded(("b",), True): pickled({"x": Evil()})},
        tmp_path / "model.safetensors",
    )
    manifest = ckptcore.open(str(tmp_path))
    assert [(b.key, b.known) for b in manifest.blobs] == [("model.b", False)]
    assert capsys.readouterr().out == ""


def test_unsharded_torch_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The same checkpoint as `.pt` files, by number and by name, reads as the same tensors."""
    root = sample(request, UNSHARDED)
    model = load_file(root / "expected.safetensors")
    moments = load_file(root / "expected_optim.safetensors")
    names = list(model)
    for spelling in ("numbers", "names"):
        step = tmp_path / spelling
        step.mkdir()
        key = {n: i if spelling == "numbers" else n for i, n in enumerate(names)}
        state: dict[Any, dict[str, torch.Tensor]] = {}
        for name, tensor in moments.items():
            fqn, _, moment = name.partition("::")
            state.setdefault(key[fqn], {})[moment] = tensor
        group = {"lr": 0.1, "params": [key[n] for n in names], "param_names": names}
        torch.save(model, step / "model.pt")
        torch.save({"state": state, "param_groups": [group]}, step / "optim.pt")
        torch.save({"epoch": 0, "rng": {"torch": torch.arange(3)}}, step / "train.pt")
        (step / "config.yaml").write_text("run_name: x\n")
        manifest = ckptcore.open(str(step))
        assert manifest.format == "olmo_unsharded"
        found = tensors(manifest)
        assert found.pop("train.rng.torch") == value(torch.arange(3))
        assert found == truth(root)
        assert objects(step)["optim.param_groups.0"]["param_names"] == names


def test_a_plain_torch_file_is_not_an_olmo_checkpoint(tmp_path: Path) -> None:
    """A model.pt beside any config.yaml keeps its stored names."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    (tmp_path / "config.yaml").write_text("x: 1\n")
    manifest = ckptcore.open(str(tmp_path))
    assert manifest.format == "torch_save"
    assert list(manifest.index) == ["w"]


def test_ordinary_safetensors_are_not_olmo(tmp_path: Path) -> None:
    """Names that are not pickles are used as they are."""
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(2)}, buffer)
    save_file(
        {"gaSV.w": torch.ones(2), "h": torch.ones(1)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt", "note": json.dumps({"a": 1})},
    )
    assert ckptcore.open(str(tmp_path)).format == "safetensors"


def test_a_folder_of_steps_names_them(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The user chooses one of a trainer's steps."""
    for name in (CORE, LOCAL):
        copied(request, name, tmp_path)
    with pytest.raises(UnsupportedFormat, match="step2, step3"):
        ckptcore.open(str(tmp_path))
