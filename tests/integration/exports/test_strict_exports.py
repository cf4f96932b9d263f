"""Strict exports: names, dtypes, shapes and bytes are those that `save_pretrained` of the model writes.

The source is the live module inside of a user's attribute. For 16 bits, names and dtypes are those of
transformers' own cast. Its values are torch's: some classes fill the row of padding with zeros on loading.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptcore

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402

SOME = ("glm4_moe", "phimoe")
LEFT_OUT = {
    "ernie4_5_vl_moe": "converted by arbitrary Python, which is refused",
    "granite_speech5_ctc": "transformers makes a count of batches, an integer, float32",
    "granite_speech5_encoder": "the same",
    "marian": "its table of positions is exported, which transformers does not save",
    "lfm3_vl_vision": "its names are taken for torchtitan's, and refused",
}

pytestmark = pytest.mark.usefixtures("asked_here")


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize("model_type", SOME)
def test_exports_are_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    assert_strict(small_models.filled(model_type), tmp_path)


@pytest.mark.soak
def test_every_export_is_what_transformers_saves(tmp_path: Path) -> None:
    proven, wrong = 0, []
    for model_type in small_models.model_types():
        try:
            model = small_models.filled(model_type, most=1_500_000)
        except LookupError:
            continue
        if model_type in LEFT_OUT:
            continue
        folder = tmp_path / model_type
        folder.mkdir()
        if not is_reopened(model, folder):
            continue
        try:
            assert_strict(model, folder)
            proven += 1
        except Exception as error:  # all of them are seen, and then none may be
            wrong.append(f"{model_type}: {type(error).__name__}: {error}"[:500])
        shutil.rmtree(folder)
    print(f"{proven} model types")
    assert wrong == []
    assert proven > 192


def is_reopened(model: Any, folder: Path) -> bool:
    """Return whether transformers opens what it saves: a small config need not be one that it accepts."""
    model.save_pretrained(folder / "hub")
    try:
        _, report = type(model).from_pretrained(folder / "hub", output_loading_info=True)
    except Exception:  # any failure of a model class
        return False
    return not (report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"])


def assert_strict(model: Any, folder: Path) -> None:
    hub, source = folder / "hub", str(folder / "w.pt")
    model.save_pretrained(hub)
    state = {f"net.{n}": t.clone() for n, t in model.state_dict().items() if hasattr(t, "shape")}
    torch.save(state, source)
    options: dict[str, Any] = {"verb": "export", "config": str(hub), "catalog": False}
    ckptcore.convert(source, str(folder / "out"), **options)
    assert_equal(tensors(folder / "out"), tensors(hub))
    ckptcore.convert(source, str(folder / "bf16"), dtype="bf16", **options)
    type(model).from_pretrained(hub, dtype=torch.bfloat16).save_pretrained(folder / "wanted")
    narrow, wide = tensors(folder / "wanted"), tensors(hub)
    assert narrow.keys() == wide.keys()
    assert_equal(tensors(folder / "bf16"), {n: wide[n].to(t.dtype) for n, t in narrow.items()})


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in wanted.items()
    }
    assert [n for n, t in found.items() if not torch.equal(t, wanted[n])] == []
