"""Outputs whose loaders look for a trainer's names, of models under the hub's: there is no map back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.errors import UsageError

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(f, marks=pytest.mark.soak) for f in ("gpt2", "mixtral"))]
)
def model(request: pytest.FixtureRequest) -> Any:
    return small_models.filled(request.param)


def test_megatron_does_not_load_names_of_the_hub(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "hub")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for verb, to in (("reshard", "torch_dist"), ("export", "zarr"), ("consolidate", "torch_dist")):
        more = {"mesh": "tp=1"} if verb == "reshard" else {}
        for source in ("hub", "dcp"):
            out = tmp_path / f"{verb}-{source}"
            with pytest.raises(UsageError, match="its loaders look for those of"):
                ckptcore.convert(str(tmp_path / source), str(out), verb=verb, to=to, catalog=False, **more)
            assert not out.exists()


def test_modules_do_not_load_names_that_only_files_have(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "hub")
    options: dict[str, Any] = {"verb": "export", "to": "dcp", "catalog": False}
    if model.config.model_type != "mixtral":  # its modules have the names of its files
        ckptcore.convert(str(tmp_path / "hub"), str(tmp_path / "out"), **options)
    else:
        with pytest.raises(UsageError, match="no module has them"):
            ckptcore.convert(str(tmp_path / "hub"), str(tmp_path / "out"), **options)
        ckptcore.convert(str(tmp_path / "hub"), str(tmp_path / "out"), names="hf-live", **options)
    found = {n: torch.empty_like(t) for n, t in model.state_dict().items() if n in names(tmp_path / "out")}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in found.items())


def names(folder: Path) -> set[str]:
    return {t.fqn for t in ckptcore.open(str(folder)).tensors}
