"""Strict exports: names, dtypes, shapes and bytes are those that `save_pretrained` of the model writes.

`strict_exports` makes and judges them; docs/reference/strict-exports.md shows the results.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptcore

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402
import strict_exports  # noqa: E402
import transformers_job  # noqa: E402
from older_transformers import Older  # noqa: E402
from paths import JOBS  # noqa: E402
from strict_exports import SOURCES, differences, folders_differ, reopened  # noqa: E402

# Experts in one tensor of the module; tables that are not saved; names of the hub like torchtitan's.
SOME = {"qwen2_moe": "wrapped-pt", "marian": "bare-dcp", "lfm3_vl_vision": "ranks"}
PARTS = 24  # of the types, each a test
# Types that two ranks save: dense, experts, ties, buffers in float32, encoders, towers, renamed parts.
SHARDED = (
    "llama",
    "gemma2",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "gpt_oss",
    "bert",
    "t5",
    "vit",
    "qwen2_vl",
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    strict_exports.quiet()


@pytest.mark.parametrize("model_type", SOME)
def test_exports_are_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    model = reopened(small_models.filled(model_type), tmp_path / "first")
    assert model is not None
    assert differences(model, SOME[model_type], tmp_path) == []
    assert transformers_job.opens(tmp_path / "out") == ""


def test_a_class_that_warns_opens_what_it_saves(tmp_path: Path) -> None:
    """Here a warning is an error, and in the program that writes the results it is none."""
    assert reopened(small_models.filled("lw_detr"), tmp_path) is not None


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_every_export_is_what_transformers_saves(older: Older, part: int) -> None:
    declared = strict_exports.rows()
    assert strict_exports.versions() == (transformers.__version__, older.ask(version=True))
    found, wrong = strict_exports.results(lambda folder: older.ask(open=str(folder)), part, PARTS)
    assert wrong == []
    assert {k: (r, declared.get(k)) for k, r in found.items() if r != declared.get(k)} == {}
    assert any(row.source for row in found.values())


@pytest.mark.soak
def test_exports_of_two_ranks_under_fsdp2_are_what_transformers_saves(tmp_path: Path) -> None:
    for model_type in SHARDED:
        hub = tmp_path / model_type / "hub"
        model = reopened(small_models.filled(model_type), hub)
        assert model is not None
        model.save_pretrained(hub)
    job = [sys.executable, str(JOBS / "fsdp2_models_job.py"), str(tmp_path)]
    subprocess.run(job, check=True, timeout=600)
    for model_type in SHARDED:
        folder = tmp_path / model_type
        assert len([*(folder / "source").glob("*.distcp")]) == 2
        options: dict[str, Any] = {"verb": "export", "config": str(folder / "hub"), "catalog": False}
        ckptcore.convert(str(folder / "source"), str(folder / "out"), **options)
        assert folders_differ(folder / "out", folder / "hub") == [], model_type


def test_the_declared_results_are_of_every_type() -> None:
    declared = strict_exports.rows()
    if strict_exports.versions()[0] == transformers.__version__:
        assert [*declared] == small_models.model_types()
    compared = [row for row in declared.values() if not row.left_out]
    assert len(compared) > 250
    assert {row.source for row in compared} == SOURCES.keys()
