"""Strict exports: names, dtypes, shapes and bytes are those that `save_pretrained` writes, for every model type.

The source is the live module inside of a user's attribute. For 16 bits the oracle is transformers' own cast.
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

SOME = ("bloom", "falcon_h1", "glm4_moe", "phimoe")
# What transformers does not open again itself, or converts by arbitrary Python.
LEFT_OUT = ("ernie4_5_vl_moe", "shieldgemma2")

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
        try:
            assert_strict(model, folder)
            proven += 1
        except Exception as error:  # all of them are seen, and then none may be
            wrong.append(f"{model_type}: {type(error).__name__}: {error}"[:500])
        shutil.rmtree(folder)
    print(f"{proven} model types")
    assert wrong == []
    assert proven > 192


def assert_strict(model: Any, folder: Path) -> None:
    hub, source = folder / "hub", str(folder / "w.pt")
    model.save_pretrained(hub)
    state = {f"net.{n}": t.clone() for n, t in model.state_dict().items() if hasattr(t, "shape")}
    torch.save(state, source)
    options: dict[str, Any] = {"verb": "export", "config": str(hub), "catalog": False}
    ckptcore.convert(source, str(folder / "out"), **options)
    assert_equal(folder / "out", hub)
    ckptcore.convert(source, str(folder / "bf16"), dtype="bf16", **options)
    type(model).from_pretrained(hub, dtype=torch.bfloat16).save_pretrained(folder / "wanted")
    assert_equal(folder / "bf16", folder / "wanted")


def assert_equal(one: Path, other: Path) -> None:
    found, wanted = (
        {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
        for folder in (one, other)
    )
    assert found.keys() == wanted.keys()
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in wanted.items()
    }
    different = [n for n, t in found.items() if not torch.equal(t, wanted[n])]
    assert different == []
