"""Test the load format of vLLM: an engine gets the tensors of the export, and refusals come before them.

The engine is a stand-in (`engine_stand_in`); `test_engine.py` starts vLLM itself.
"""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

from driver import REPOSITORY  # noqa: E402
from engine_stand_in import Engine, FileLoader, configs  # noqa: E402
from export_sources import WRITERS, Tiny  # noqa: E402

import ckptcore  # noqa: E402
from ckptcore import errors  # noqa: E402
from ckptcore.live_model import exported_tensors, vllm_plugin  # noqa: E402

Tinies = Callable[[str], Tiny]
LOADER = vllm_plugin.loader_class(FileLoader)


def loaded(folder: Path, engine: Engine, **options: Any) -> Engine:
    """Load an engine, as vLLM does. folder: of the model."""
    given = configs(engine, folder, **options)
    loader = LOADER(given.load)
    loader.download_model(given.model)
    assert loader.load_model(given.engine, given.model) is engine
    assert given.load.model_loader_extra_config.keys() == options.keys() - {"rearrange"}
    return engine


def exported(source: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    ckptcore.convert(source, out, verb="export", catalog=False, **options)
    return load_file(out / "model.safetensors")


def fingerprint(engine: Engine, **options: Any) -> dict[str, Any]:
    """Ask a worker, which has methods of its own and those of the extension."""
    worker = type("Worker", (vllm_plugin.Fingerprinting,), {"get_model": lambda _: engine})()
    form: dict[str, Any] = worker.ckptcore_fingerprint(**options)
    return form


@pytest.mark.parametrize(("family", "source"), [("llama", "megatron"), ("qwen2", "hf-live")])
def test_it_loads_what_the_export_has(
    tinies: Tinies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, source: str
) -> None:
    tiny = tinies(family)
    folder = WRITERS[source](tiny, "layers", tmp_path / "source")
    right = exported(folder, tmp_path / "out", config=tiny.hub)
    largest = max(tensor.nbytes for tensor in right.values())
    monkeypatch.setattr(exported_tensors, "BATCH", largest + 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in right.items()}
    before = sorted(tmp_path.rglob("*"))
    engine = loaded(tiny.hub, Engine(shapes), source=str(folder), fingerprint=True)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written
    twin = Engine(shapes)
    twin.load_weights(right.items())
    assert all(
        torch.equal(*pair) for pair in zip(engine.weights.values(), twin.weights.values(), strict=True)
    )
    of_export = ckptcore.fingerprint(tmp_path / "out").fingerprint
    assert fingerprint(engine)["fingerprint"] == fingerprint(engine, loaded=True)["fingerprint"] == of_export
    next(iter(engine.weights.values())).data.view(torch.int32)[0, 0] ^= 1
    assert fingerprint(engine)["fingerprint"] != of_export == fingerprint(engine, loaded=True)["fingerprint"]


def test_the_folder_of_the_model_may_be_the_checkpoint(tinies: Tinies) -> None:
    hub = tinies("llama").hub
    right = load_file(hub / "model.safetensors")
    engine = loaded(hub, Engine({name: tuple(tensor.shape) for name, tensor in right.items()}))
    with pytest.raises(errors.UsageError, match="was not fingerprinted"):
        fingerprint(engine)


def test_what_the_engine_rearranges_is_not_comparable(tinies: Tinies) -> None:
    hub = tinies("llama").hub
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(hub / "model.safetensors").items()}
    right = ckptcore.fingerprint(hub).fingerprint

    def transpose(model: Engine) -> None:
        model.weights["model/norm/weight"].data = model.weights["model/norm/weight"].data.flip(0)

    def remove(model: Engine) -> None:
        del model.weights["model/norm/weight"]

    for rearrange, reason in (
        (transpose, "vLLM has rearranged model.norm.weight"),
        (remove, "does not take"),
    ):
        engine = loaded(hub, Engine(shapes), rearrange=rearrange, fingerprint=True)
        with pytest.raises(errors.UsageError, match=f"not comparable: .*{reason}"):
            fingerprint(engine)
        assert fingerprint(engine, loaded=True)["fingerprint"] == right


def _cut(source: Path) -> None:
    file = next(source.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1000])


def _remove(source: Path) -> None:
    next(source.glob("*.distcp")).unlink()


def _flip(source: Path) -> None:
    file = max(source.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "checked_before"), [(_cut, True), (_remove, True), (_flip, False)], ids=["cut", "lost", "bit"]
)
def test_a_damaged_source_is_refused(
    tinies: Tinies, tmp_path: Path, damage: Callable[[Path], None], checked_before: bool
) -> None:
    tiny = tinies("llama")
    source = WRITERS["hf-live"](tiny, "", tmp_path / "source")
    damage(source)
    given = configs(None, tiny.hub, source=str(source))
    loader, taken = LOADER(given.load), list[str]()

    class Counting:
        def load_weights(self, weights: Any) -> None:
            taken.extend(name for name, _ in weights)

    with pytest.raises(errors.DamagedCheckpoint):
        loader.load_weights(Counting(), given.model)
    if checked_before:
        assert not taken
        with pytest.raises(errors.DamagedCheckpoint):
            loader.download_model(given.model)


def test_a_flipped_bit_that_many_tensors_share_the_record_of(tinies: Tinies, tmp_path: Path) -> None:
    """Megatron's fused projections: pieces of a record with gaps between them, which never add up."""
    tiny = tinies("llama")
    source = WRITERS["megatron"](tiny, "layers", tmp_path / "source")
    _flip(source)
    given = configs(Engine({}), tiny.hub, source=str(source))
    with pytest.raises(errors.DamagedCheckpoint):
        LOADER(given.load).load_weights(_Taking(), given.model)


class _Taking:
    def load_weights(self, weights: Any) -> None:
        for _ in weights:
            pass


class _Leaving:
    def load_weights(self, weights: Any) -> None:
        next(iter(weights))


def test_what_else_is_refused(tinies: Tinies, tmp_path: Path) -> None:
    tiny = tinies("llama")
    for options, reason in (
        ({"sourec": "x"}, "has no option 'sourec'"),
        ({"fingerprint": "yes"}, "fingerprint in .* must have another type"),
    ):
        with pytest.raises(errors.UsageError, match=reason):
            LOADER(configs(None, tiny.hub, **options).load)
    given = configs(None, tiny.hub)
    with pytest.raises(errors.UsageError, match="vLLM left out tensors"):
        LOADER(given.load).load_weights(_Leaving(), given.model)
    quantised = shutil.copytree(tiny.hub, tmp_path / "quantised")
    form = json.loads((quantised / "config.json").read_text())
    form["quantization_config"] = {"quant_method": "fp8"}
    (quantised / "config.json").write_text(json.dumps(form))
    unmapped = tmp_path / "unmapped"
    unmapped.mkdir()
    save_file({"elsewhere.weight": torch.ones(3, 3)}, unmapped / "model.safetensors")
    shutil.copy(tiny.hub / "config.json", unmapped)
    absent = configs(None, tmp_path / "absent")
    for model, error in (
        (configs(None, quantised).model, errors.UnsupportedDtype),
        (configs(None, unmapped).model, errors.NameMismatch),
        (absent.model, errors.SourceUnreadable),
    ):
        with pytest.raises(error):
            LOADER(given.load).load_weights(_Taking(), model)


def test_vllm_finds_it_by_its_entry_point() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
    assert declared["vllm.general_plugins"] == {"ckptcore": "ckptcore.live_model.vllm_plugin:register"}
    assert resolve_name(declared["vllm.general_plugins"]["ckptcore"]) is vllm_plugin.register
