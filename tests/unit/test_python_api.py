"""The Python API, as people write it: paths, modules, keyword arguments, and errors that name them."""

from __future__ import annotations

import traceback
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
    recorded = ckptcore.convert(source, tmp_path / "out", verb="export").conversion
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
    assert traceback.format_exception(error.value)[-1] == "next: did you mean model.weight?\n"
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.read(manifest, "model.weight", ckptcore.Box((0, 0), (9, 9)))
    assert error.value.code == "usage"
    with pytest.raises(ckptcore.CkptError) as error:
        ckptcore.convert(source, tmp_path / "out", exlude="a*")
    assert (error.value.code, error.value.hint) == ("usage", "did you mean exclude?")


PLACES = {
    "open": lambda place, _: ckptcore.open(place),
    "fingerprint": lambda place, _: ckptcore.fingerprint(place),
    "diff": lambda place, source: ckptcore.diff(source, place),
    "plan": lambda place, source: ckptcore.plan(source, place),
    "convert": lambda place, _: ckptcore.convert(place, "out"),
    "merge": lambda place, source: ckptcore.merge([source, place], "out"),
}


@pytest.mark.parametrize("verb", PLACES)
@pytest.mark.parametrize("place", [None, 3, [7]])
def test_what_is_no_place_is_named(source: Path, verb: str, place: Any) -> None:
    with pytest.raises(ckptcore.CkptError, match=r"must be a path or a URL \(got") as error:
        PLACES[verb](place, source)
    assert error.value.code == "usage"


MANIFESTS = {
    "check": lambda place: ckptcore.check(place),
    "read": lambda place: ckptcore.read(place, "model.weight"),
    "load_into": lambda place: ckptcore.load_into(place, {}),
    "model_part": lambda place: ckptcore.model_part(place),
}


@pytest.mark.parametrize("verb", MANIFESTS)
def test_a_place_where_a_manifest_belongs_is_to_be_opened(source: Path, verb: str) -> None:
    for place in (source, str(source), None):
        with pytest.raises(ckptcore.CkptError, match="must be a manifest") as error:
            MANIFESTS[verb](place)
        assert (error.value.code, error.value.hint) == ("usage", "`ckptcore.open(url)` returns one")


WRONG = {
    "box": (lambda m, _: ckptcore.read(m, "model.weight", ((0, 1),)), "usage", "ckptcore.Box(offset, shape)"),
    "device": (lambda m, _: ckptcore.read(m, "model.weight", device="cda"), "device-unavailable", "cpu"),
    "level": (lambda m, _: ckptcore.check(m, "bytez"), "usage", "choose one"),
    "memory": (lambda *_: ckptcore.Settings(memory="1GiB"), "usage", "1073741824 bytes"),
    "workers": (lambda *_: ckptcore.Settings(workers="2"), "usage", "cores"),
    "no workers": (lambda *_: ckptcore.Settings(workers=0), "usage", "cores"),
    "no device": (lambda *_: ckptcore.Settings(device=None), "usage", "cpu"),
    "globs": (lambda m, out: ckptcore.convert(m.root, out, include=3), "usage", "include=['...']"),
    "pairs": (lambda m, out: ckptcore.convert(m.root, out, rename=3), "usage", "rename=['...']"),
    "no source": (lambda _, out: ckptcore.convert([], out), "usage", "`help(ckptcore.convert)`"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_values_of_another_kind_are_named(source: Path, tmp_path: Path, mistake: str) -> None:
    act, code, hint = WRONG[mistake]
    with pytest.raises(ckptcore.CkptError) as error:
        act(ckptcore.open(source), tmp_path / "out")
    assert error.value.code == code
    assert hint in error.value.hint
    assert "--" not in str(error.value)


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
