"""Read folders of `.bin` files: what save_pretrained, the Trainer and Accelerate wrote before safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import AmbiguousModel, MalformedCheckpoint

PARTS = ({"a": torch.ones(3), "b": torch.zeros(2, 2)}, {"c": torch.arange(4.0)})
NAMES = [f"pytorch_model-{n:05d}-of-00002.bin" for n in (1, 2)]
INDEX = "pytorch_model.bin.index.json"


def sharded(folder: Path, *, total: int = 44) -> Path:
    rows: dict[str, str] = {}
    for name, part in zip(NAMES, PARTS, strict=True):
        torch.save(part, folder / name)
        rows |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": rows}))
    return folder


def codes(folder: Path) -> list[tuple[str, str | None]]:
    report = validate(ckptcore.open(str(folder)), "bytes")
    return [(f.code, f.file) for f in report.findings if f.severity != "info"]


def trainer(folder: Path, model: str = "pytorch_model.bin") -> Path:
    """Add what a Trainer writes beside a model."""
    torch.save({"a": torch.ones(3)}, folder / model)
    torch.save({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}, folder / "optimizer.pt")
    for name in ("scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"last_epoch": 1}, folder / name)
    return folder


def test_parts_with_an_index(tmp_path: Path) -> None:
    assert codes(sharded(tmp_path)) == []
    manifest = ckptcore.open(str(tmp_path))
    assert {t.fqn: t.shape for t in manifest.tensors} == {"a": (3,), "b": (2, 2), "c": (4,)}
    assert ckptcore.read(manifest, "c").tolist() == [0, 1, 2, 3]


def test_what_the_index_says_otherwise(tmp_path: Path) -> None:
    sharded(tmp_path)
    torch.save({"a": torch.ones(3), "x": torch.ones(1)}, tmp_path / NAMES[0])
    assert codes(tmp_path) == [("hole", NAMES[0]), ("unlisted-tensor", NAMES[0])]
    (tmp_path / NAMES[0]).unlink()
    assert codes(tmp_path) == [("missing-file", NAMES[0])]
    sharded(tmp_path, total=45)
    assert codes(tmp_path) == [("total-mismatch", INDEX)]


def test_a_tied_tensor_counts_once(tmp_path: Path) -> None:
    """accelerate lists both names, and counts the one storage."""
    tied = torch.ones(3)
    torch.save({"a": tied, "b": tied}, tmp_path / "pytorch_model.bin")
    form = {"metadata": {"total_size": 12}, "weight_map": dict.fromkeys("ab", "pytorch_model.bin")}
    (tmp_path / INDEX).write_text(json.dumps(form))
    assert codes(tmp_path) == []


def test_one_name_in_two_parts(tmp_path: Path) -> None:
    for name in NAMES:
        torch.save(PARTS[0], tmp_path / name)
    with pytest.raises(MalformedCheckpoint, match=r"^a is in pytorch_model-00001"):
        ckptcore.open(str(tmp_path))


def test_beside_a_trainers_state(tmp_path: Path) -> None:
    """The model is read, and the optimizer that is not is named."""
    assert codes(trainer(tmp_path)) == [("unread-state", "optimizer.pt")]
    assert [t.fqn for t in ckptcore.open(str(tmp_path)).tensors] == ["a"]
    assert {t.fqn for t in ckptcore.open(str(tmp_path / "optimizer.pt")).tensors} == {"state.0.exp_avg"}


def test_a_state_alone_is_read(tmp_path: Path) -> None:
    torch.save({"state": {"a": torch.ones(2)}}, tmp_path / "optimizer.bin")
    assert len(ckptcore.open(str(tmp_path)).tensors) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("pytorch_model.bin", "pytorch_model_1.bin"),
        ("model.safetensors", "model_1.safetensors"),
        ("model.safetensors", "model_1-00001-of-00002.safetensors"),
        (INDEX, "pytorch_model_1.bin"),
        ("model_0.bin", "model_1.bin"),
        ("pytorch_model_1.bin", "pytorch_model_2.bin"),
    ],
)
def test_a_second_model_is_a_question(first: str, second: str, tmp_path: Path) -> None:
    """`Accelerator.save_state` numbers the models: the second is live, and no stray of the first."""
    if first == INDEX:
        sharded(tmp_path)
    for name in {first, second} - {INDEX}:
        (save_file if name.endswith(".safetensors") else torch.save)({"w": torch.ones(2)}, tmp_path / name)
    torch.save({"state": {}}, tmp_path / "optimizer.bin")
    torch.save({"state": {}}, tmp_path / "optimizer_1.bin")
    with pytest.raises(AmbiguousModel, match="several models"):
        ckptcore.open(str(tmp_path))
    if "of" not in second:
        assert [t.fqn for t in ckptcore.open(str(tmp_path / second)).tensors] == ["w"]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_of_any_name_lists_its_files(kind: str, tmp_path: Path) -> None:
    first, second = f"part-a.{kind}", f"part-b.{kind}"
    (save_file if kind == "safetensors" else torch.save)({"a": torch.ones(2)}, tmp_path / first)
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    (tmp_path / "other.index.json").write_text('{"weight_map": 3}')
    codes = [f.code for f in ckptcore.open(str(tmp_path)).findings if f.severity == "error"]
    assert codes == ["missing-file"]


def test_no_finding_advises_to_delete(tmp_path: Path) -> None:
    """Nothing proves that what is beside a model is anywhere else."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("value_head.safetensors", "consolidated.safetensors"):
        save_file({name: torch.ones(2)}, tmp_path / name)
    found = validate(ckptcore.open(str(tmp_path)), "coverage").findings
    assert {f.file for f in found if f.code == "stray-file"} == {
        "value_head.safetensors",
        "consolidated.safetensors",
    }
    assert not [f for f in found if "delete" in f.hint or "remove" in f.hint]
