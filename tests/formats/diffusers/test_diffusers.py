"""Pipelines of diffusers are read whole: every component by its name, and none silently lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import FIXTURES
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.errors import AmbiguousModel, DamagedCheckpoint, MalformedCheckpoint, UnsupportedFormat

SAMPLE = FIXTURES / "diffusers/dit_pipeline"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE / "ckpt", tmp_path / "pipeline"))


def edit_index(folder: Path, **entries: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def codes(folder: Path) -> list[str]:
    return [f.code for f in ckptcore.check(ckptcore.open(str(folder))).findings if f.severity == "error"]


def test_what_diffusers_itself_wrote() -> None:
    manifest = ckptcore.open(str(SAMPLE / "ckpt"))
    want = load_file(SAMPLE / "expected.safetensors")
    assert {t.fqn for t in manifest.tensors} == want.keys()
    assert all(torch.equal(ckptcore.read(manifest, name), tensor) for name, tensor in want.items())
    (index,) = manifest.blobs
    assert index.key == "model_index"
    assert index.tree["_class_name"] == "DiTPipeline"
    assert not codes(SAMPLE / "ckpt")


@pytest.mark.parametrize("lost", ["vae", "transformer", "scheduler"])
def test_a_component_that_is_not_there(pipeline: Path, lost: str) -> None:
    shutil.rmtree(pipeline / lost)
    assert codes(pipeline) == ["missing-file"]


def test_a_component_without_its_weights(pipeline: Path) -> None:
    (pipeline / "vae" / WEIGHTS).unlink()
    assert codes(pipeline) == ["missing-file"]
    (pipeline / "vae" / "config.json").unlink()
    (pipeline / "vae" / "notes.txt").write_text("nothing")
    assert codes(pipeline) == ["missing-file"]


def test_a_part_of_a_component(pipeline: Path) -> None:
    next((pipeline / "transformer").glob("*-00002-of-*")).unlink()
    assert "missing-file" in codes(pipeline)


def test_components_of_any_library(pipeline: Path) -> None:
    """Torch files, and models of transformers; what is null, and what has no weights, is not missing."""
    state = load_file(pipeline / "vae" / WEIGHTS)
    (pipeline / "vae" / WEIGHTS).unlink()
    torch.save(state, pipeline / "vae" / "diffusion_pytorch_model.bin")
    for name in ("text_encoder", "tokenizer", "image_processor"):
        (pipeline / name).mkdir()
        (pipeline / name / "config.json").write_text("{}") if name == "text_encoder" else None
        (pipeline / name / "tokenizer.json").write_text("{}")
    save_file({"w": torch.ones(2)}, pipeline / "text_encoder" / "model.safetensors")
    edit_index(
        pipeline,
        text_encoder=["transformers", "CLIPTextModel"],
        tokenizer=["transformers", "CLIPTokenizerFast"],
        image_processor=["transformers", "CLIPImageProcessor"],
        safety_checker=[None, None],
        requires_safety_checker=True,
    )
    manifest = ckptcore.open(str(pipeline))
    want = {"text_encoder.w", *(f"vae.{name}" for name in state)}
    names = {t.fqn for t in manifest.tensors if not t.fqn.startswith("transformer.")}
    assert names == want
    assert not codes(pipeline)


def test_two_sets_of_weights_are_not_merged(pipeline: Path) -> None:
    shutil.copy(pipeline / "vae" / WEIGHTS, pipeline / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(AmbiguousModel, match="vae has several sets of weights"):
        ckptcore.open(str(pipeline))


def test_weights_beside_the_components(pipeline: Path) -> None:
    """The hub has many models twice: in one file, too, by names of another program."""
    shutil.copy(SAMPLE / "expected.safetensors", pipeline / "model-v1.safetensors")
    report = ckptcore.check(ckptcore.open(str(pipeline)))
    assert [(f.code, f.file) for f in report.findings if f.code == "stray-file"] == [
        ("stray-file", "model-v1.safetensors")
    ]


@pytest.mark.parametrize("entry", [None, [None, None]])
def test_a_model_that_the_index_does_not_list(pipeline: Path, entry: Any) -> None:
    path = pipeline / "model_index.json"
    index = json.loads(path.read_text())
    del index["vae"]
    path.write_text(json.dumps(index if entry is None else index | {"vae": entry}))
    report = ckptcore.check(ckptcore.open(str(pipeline)))
    assert [(f.code, f.file) for f in report.findings] == [("stray-file", f"vae/{WEIGHTS}")]


def test_a_file_of_another_component(pipeline: Path) -> None:
    """Models of two classes have no file with the same tensors; two of one class may."""
    shard = next((pipeline / "transformer").glob("*-00001-of-*"))
    shutil.copy(shard, pipeline / "vae" / WEIGHTS)
    assert codes(pipeline) == ["item-mismatch"]
    shutil.copytree(SAMPLE / "ckpt/vae", pipeline / "vae", dirs_exist_ok=True)
    shutil.copytree(pipeline / "vae", pipeline / "vae_2")
    edit_index(pipeline, vae_2=["diffusers", "AutoencoderKL"])
    assert not codes(pipeline)


@pytest.mark.parametrize("name", ["..", "a/b", "", "vae.decoder"])
def test_a_component_outside_of_the_folder(pipeline: Path, name: str) -> None:
    edit_index(pipeline, **{name: ["diffusers", "AutoencoderKL"]})
    with pytest.raises(MalformedCheckpoint, match="is called"):
        ckptcore.open(str(pipeline))


def test_a_quantised_component(pipeline: Path) -> None:
    path = pipeline / "vae" / "config.json"
    config = {
        "model_type": "llama",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]},
    }
    path.write_text(json.dumps(config))
    state = {"w.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(2, 2)}
    save_file(state, pipeline / "vae" / WEIGHTS)
    with pytest.raises(UnsupportedFormat, match="it is quantised"):
        ckptcore.open(str(pipeline))


def export(source: Path, target: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", catalog=False, **options)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    manifest = ckptcore.open(str(folder))
    return {t.fqn: ckptcore.read(manifest, t.fqn) for t in manifest.tensors}


def test_an_export_is_a_complete_pipeline(pipeline: Path, tmp_path: Path) -> None:
    (pipeline / "LICENSE.txt").write_text("free")
    (pipeline / "vae" / "notes.png").write_bytes(b"x")
    result = export(pipeline, tmp_path / "out", max_file_size="4KiB")
    got, want = tensors_of(tmp_path / "out"), load_file(SAMPLE / "expected.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    small = {p for p in written if not p.endswith((".safetensors", ".index.json"))}
    assert small == {
        "LICENSE.txt",
        "README.md",
        "model_index.json",
        "scheduler/scheduler_config.json",
        "transformer/config.json",
        "vae/config.json",
    }
    assert len(list((tmp_path / "out/transformer").glob("*-of-*.safetensors"))) > 1
    for path in small - {"README.md", "LICENSE.txt"}:
        assert json.loads((tmp_path / "out" / path).read_text()) == json.loads((pipeline / path).read_text())
    assert [w.message for w in result.warnings if w.code == "left-beside"] == [
        f"files of {pipeline}/vae are left out: notes.png"
    ]


def test_exports_are_equal(pipeline: Path, tmp_path: Path) -> None:
    first, other = (export(pipeline, tmp_path / name) for name in ("one", "two"))
    assert first.manifest_digest == other.manifest_digest
    assert export(tmp_path / "one", tmp_path / "again").manifest_digest == first.manifest_digest


def test_an_export_is_verified(pipeline: Path, tmp_path: Path) -> None:
    """Its card says that each model keeps its names, and so are they mapped again."""
    export(pipeline, tmp_path / "out")
    source = {"against": str(pipeline), "catalog": False}
    proof = ckptcore.verify_export(str(tmp_path / "out"), **source)
    assert {c.verdict for c in proof.checks if c.name in ("elements", "fingerprints")} == {"ok"}
    path = tmp_path / "out/vae" / WEIGHTS
    state = load_file(path)
    next(iter(state.values())).view(-1)[0] += 1
    save_file(state, path, {"format": "pt"})
    failed = [
        c.name
        for c in ckptcore.verify_export(str(tmp_path / "out"), **source).checks
        if c.verdict == "failed"
    ]
    assert failed == ["fingerprints"]


@pytest.mark.parametrize("lost", ["vae", "scheduler", f"vae/{WEIGHTS}"])
def test_an_export_has_every_component(pipeline: Path, lost: str, tmp_path: Path) -> None:
    path = pipeline / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DamagedCheckpoint):
        export(pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [{"config": "none"}, {"exclude": ["vae.*"]}, {"tokenizer": str(SAMPLE)}, {"to": "torch_save"}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_one_model(pipeline: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(AmbiguousModel, match="got transformer, vae") as caught:
        export(pipeline, tmp_path / "out", **options)
    assert f"{pipeline}/transformer" in (caught.value.hint or "")
    with pytest.raises(AmbiguousModel):
        export(pipeline, tmp_path / "out.safetensors")
    export(pipeline / "vae", tmp_path / "vae")
    got, want = (load_file(x / WEIGHTS) for x in (tmp_path / "vae", SAMPLE / "ckpt/vae"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_models_of_other_libraries(pipeline: Path, tmp_path: Path) -> None:
    """By what its config says a model has the names of files that its library looks for."""
    configs = {"own": {"model_type": "own"}, "own_2": {"_class_name": "Own"}}
    for name, config in configs.items():
        (pipeline / name).mkdir()
        save_file({"w": torch.ones(2)}, pipeline / name / "model.safetensors")
        (pipeline / name / "config.json").write_text(json.dumps(config))
        edit_index(pipeline, **{name: ["a_library", "Own"]})
    result = export(pipeline, tmp_path / "out")
    assert load_file(tmp_path / "out/own/model.safetensors").keys() == {"w"}
    assert load_file(tmp_path / "out/own_2" / WEIGHTS).keys() == {"w"}
    unchecked = [w.message for w in result.warnings if w.code == "names-unchecked"]
    assert any("shapes of own were not checked" in m for m in unchecked)
