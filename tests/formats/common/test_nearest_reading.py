"""A source of no known format is described: what it has, what in it opens, and the next command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from odd_tensors import quantized
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import CkptError, UnknownFormat, UnreadablePart

pytestmark = pytest.mark.filterwarnings("ignore")


def refusal(source: Path) -> CkptError:
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(source))
    return caught.value


def test_files_that_open_alone_are_named(tmp_path: Path) -> None:
    for name in ("a.bin", "other.bin", "pytorch_model.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    error = refusal(tmp_path)
    assert isinstance(error, UnknownFormat)
    assert "3 .bin files" in error.message
    assert "such as pytorch_model.bin" in error.hint


def test_of_numbered_files_the_last_is_named(tmp_path: Path) -> None:
    """Of saves in one folder it is the newest, also where many are older."""
    for number in range(1, 13):
        torch.save({"w": torch.ones(2)}, tmp_path / f"saved_{number}.pt")
    error = refusal(tmp_path)
    assert error.hint == "name the file to read, such as saved_12.pt"
    assert "saved_12.pt, saved_11.pt, saved_10.pt, saved_9.pt" in error.message


def test_folders_that_open_are_named(tmp_path: Path) -> None:
    for name in ("actor", "critic"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / name / "model.pt")
    (tmp_path / "steps" / "step-10").mkdir(parents=True)
    save_file({"w": torch.ones(2)}, tmp_path / "steps" / "step-10" / "model.safetensors")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").write_text("")
    error = refusal(tmp_path)
    assert "actor/ (torch_save), critic/ (torch_save)" in error.message
    assert "steps/step-10/ (safetensors)" in error.message
    assert "logs" not in error.message.split(";")[-1]
    assert error.hint == "name one of them, such as steps/step-10"


def test_what_is_known_by_name_is_named_below_its_root(tmp_path: Path) -> None:
    for path in ("150000/items/manifest.ocdbt", "150000/_CHECKPOINT_METADATA"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    error = refusal(tmp_path)
    assert "Orbax" in error.message
    assert "restore it" in error.hint


def test_no_internal_name_is_in_a_message(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "a.pt")
    assert "got tensor" in refusal(tmp_path / "a.pt").message
    torch.save(torch.nn.Linear(2, 2), tmp_path / "b.pt")
    message = refusal(tmp_path / "b.pt").message
    assert "torch.nn" in message
    for word in ("Refused", "StoredView", "Record", "Named"):
        assert word not in message


def test_nothing_is_proposed_that_leaves_nothing(tmp_path: Path) -> None:
    for more, proposed in (({}, False), ({"b": torch.ones(2)}, True)):
        source = tmp_path / f"ckpt{proposed}"
        dcp.save({"w": quantized(), "epoch": 3, **more}, checkpoint_id=source, no_dist=True)
        with pytest.raises(UnreadablePart) as caught:
            ckptcore.convert(str(source), str(tmp_path / "out.safetensors"))
        assert ("exclude='w'" in caught.value.hint) == proposed


def test_empty_weights_of_one_rank_are_of_no_trainer(tmp_path: Path) -> None:
    """FSDP leaves them on a rank, too, which has the flat elements of other weights."""
    torch.save({"a.weight": torch.ones(10), "b.weight": torch.empty(0)}, tmp_path / "a.pt")
    (error,) = [
        f for f in ckptcore.check(ckptcore.open(str(tmp_path / "a.pt"))).findings if f.fqn == "b.weight"
    ]
    assert error.code == "lost-at-save"
    assert "ZeRO-3" not in error.message
    assert "FSDP" in (error.hint or "")


def test_a_folder_of_runs_names_checkpoints_and_not_their_stages(tmp_path: Path) -> None:
    for step in (1, 2):
        for stage in range(2):
            state = {f"layers.{stage}.w": torch.ones(2)}
            dcp.save(state, checkpoint_id=tmp_path / f"step-{step}" / f"pp{stage}", no_dist=True)
    assert "step-1, step-2" in refusal(tmp_path).message
