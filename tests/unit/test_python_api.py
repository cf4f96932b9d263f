"""The Python API, as people write it: paths, modules, keyword arguments, and errors that name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.catalog import open_catalog


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint of a small module under ``model.``."""
    torch.manual_seed(0)
    tensors = {f"model.{name}": value for name, value in torch.nn.Linear(4, 3).state_dict().items()}
    folder = tmp_path / "step-20"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_paths_are_taken_everywhere(source: Path, tmp_path: Path) -> None:
    manifest = ckptcore.open(source)
    assert ckptcore.fingerprint(source).tensors == ckptcore.fingerprint(str(source)).tensors
    assert ckptcore.diff(source, [source]).equal
    assert ckptcore.plan(source, tmp_path / "out").plan.files
    result = ckptcore.convert(
        source, tmp_path / "out", verb="export", config="none", catalog=tmp_path / "c.db"
    )
    assert Path(result.destination) == tmp_path / "out"
    assert (tmp_path / "c.db").is_file()
    proof = ckptcore.verify_export(tmp_path / "out", against=source, catalog=tmp_path / "c.db")
    assert all(check.verdict != "failed" for check in proof.checks)
    assert ckptcore.read(manifest, "model.weight").shape == (3, 4)


def test_a_conversion_is_recorded_unless_it_is_asked_not_to_be(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "c.db"))
    assert ckptcore.convert(source, tmp_path / "apart", catalog=False).conversion is None
    assert not (tmp_path / "c.db").exists()
    recorded = ckptcore.convert(source, tmp_path / "out").conversion
    with open_catalog(str(tmp_path / "c.db")) as catalog:
        assert catalog.show(str(tmp_path / "out")).checkpoint.uri == str(tmp_path / "out")
    assert recorded is not None
    assert ckptcore.verify_export(tmp_path / "out").conversion == recorded
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", "/proc/nowhere/c.db")
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.convert(source, tmp_path / "more")
    assert "catalog=False" in error.value.hint
    assert not (tmp_path / "more").exists()


def test_a_module_is_loaded_by_its_own_names(source: Path) -> None:
    manifest, module = ckptcore.open(source), torch.nn.Linear(4, 3)
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.load_into(manifest, module)
    assert (error.value.code, error.value.hint) == ("name-mismatch", "try prefix='model.'")
    assert ckptcore.load_into(manifest, module, prefix="model.") == []
    assert torch.equal(module.weight, ckptcore.read(manifest, "model.weight"))
    other = torch.nn.Linear(4, 3)
    assert ckptcore.load_into(manifest, {"model": other}) == []
    assert torch.equal(other.bias, module.bias)
    with pytest.raises(ckptcore.CkptError, match=r"\[3, 5\] here and \[3, 4\]") as error:
        ckptcore.load_into(manifest, torch.nn.Linear(5, 3), prefix="model.")
    assert "another config" in error.value.hint
    with pytest.raises(ckptcore.CkptError, match="cannot load into a int"):
        ckptcore.load_into(manifest, 3)  # type: ignore[arg-type]


def test_errors_name_what_is_near(source: Path, tmp_path: Path) -> None:
    manifest = ckptcore.open(source)
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.read(manifest, "weight")
    assert (error.value.code, error.value.hint) == ("name-mismatch", "did you mean model.weight?")
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.read(manifest, "model.weight", ckptcore.Box((0, 0), (9, 9)))
    assert error.value.code == "usage"
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.convert(source, tmp_path / "out", exlude="a*")
    assert (error.value.code, error.value.hint) == ("usage", "did you mean exclude?")


def test_hints_are_keyword_arguments(source: Path, tmp_path: Path) -> None:
    ckptcore.convert(source, tmp_path / "out")
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.convert(source, tmp_path / "out")
    assert "overwrite=True" in error.value.hint
    assert "--" not in error.value.hint
    assert ckptcore.convert(source, tmp_path / "out", overwrite=True).destination


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "*.bias", "rename": {"model.": "net."}},
        {"exclude": ["*.bias"], "rename": ["model.=net."]},
        {"exclude": ("*.bias",), "rename": [("model.", "net.")], "max_file_size": "1GB"},
    ],
)
def test_options_as_people_write_them(source: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    ckptcore.convert(source, tmp_path / "out", **options)
    assert [t.fqn for t in ckptcore.open(tmp_path / "out").tensors] == ["net.weight"]


def test_a_mesh_may_be_a_dict_of_its_axes(source: Path, tmp_path: Path) -> None:
    ckptcore.convert(source, tmp_path / "out", verb="reshard", mesh={"fsdp": 2})
    assert len([p for p in (tmp_path / "out").iterdir() if p.suffix == ".distcp"]) == 2


def test_the_module_lists_its_public_names() -> None:
    assert set(dir(ckptcore)) == {*ckptcore.__all__, "__version__"}
    assert ckptcore.open is ckptcore.open
