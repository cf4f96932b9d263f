"""Values that no reader asks for become objects, and are written where the target has a place."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damaging import Folder
from safetensors import safe_open
from safetensors.torch import save_file
from samples import SAMPLES, Sample

import ckptcore
from ckptcore.core.object_tree import decode

LORA = {"format": "pt", "ss_network_dim": "16", "ss_tag_frequency": '{"a": 1}'}
USERS = {k: v for k, v in LORA.items() if k != "format"}
WRITTEN = ("safetensors", "dcp", "torch_save", "torch_dist", "zarr", "olmo_core", "olmo_v01", "torch_ranks")


def objects(path: Path) -> dict[str, Any]:
    return {b.key: decode(b.tree) for b in ckptcore.open(str(path)).blobs if b.known}


def metadata(path: Path) -> dict[str, str]:
    """As the safetensors library reads it."""
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())


def numbered(folder: Path, files: list[tuple[dict[str, torch.Tensor], dict[str, str]]], **index: Any) -> Path:
    """A folder of safetensors files with an index."""
    folder.mkdir()
    places: dict[str, str] = {}
    for n, (tensors, about) in enumerate(files, 1):
        name = f"model-{n:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name, metadata=about)
        places |= dict.fromkeys(tensors, name)
    form = {"metadata": {}, **index, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(form))
    return folder


# ------------------------------------------------------------------------- keys of `__metadata__`


def test_keys_of_users_are_an_object(tmp_path: Path) -> None:
    """LoRA tools keep the training's options there; they vanished from a plain consolidate."""
    save_file({"w": torch.ones(4)}, tmp_path / "lora.safetensors", metadata=LORA)
    assert objects(tmp_path / "lora.safetensors") == {"__metadata__": USERS}


@pytest.mark.parametrize("to", WRITTEN)
def test_they_come_back_through_every_format(to: str, tmp_path: Path) -> None:
    source = tmp_path / "lora.safetensors"
    save_file({"w": torch.ones(4)}, source, metadata=LORA)
    there = tmp_path / ("there.pt" if to == "torch_save" else "there")
    ckptcore.convert(str(source), str(there), to=to)
    assert objects(there)["__metadata__"] == USERS
    ckptcore.convert(str(there), str(tmp_path / "back"), to="safetensors")
    assert metadata(tmp_path / "back" / "model.safetensors") == LORA
    assert ckptcore.diff(str(source), str(tmp_path / "back")).equal


def test_a_file_without_them_has_no_object(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert objects(tmp_path) == {}
    ckptcore.convert(str(tmp_path / "model.safetensors"), str(tmp_path / "out"), to="safetensors")
    assert metadata(tmp_path / "out" / "model.safetensors") == {"format": "pt"}


def test_equal_ones_of_several_files_are_there_once(tmp_path: Path) -> None:
    first, second = {"a": torch.ones(2)}, {"b": torch.ones(3)}
    folder = numbered(tmp_path / "a", [(first, LORA | {"of": "one"}), (second, LORA | {"of": "two"})])
    name = "__metadata__/model-0000{}-of-00002.safetensors"
    stated = {"__metadata__": USERS, name.format(1): {"of": "one"}, name.format(2): {"of": "two"}}
    assert objects(folder) == stated
    ckptcore.convert(str(folder), str(tmp_path / "b"), to="safetensors")
    assert objects(tmp_path / "b") == stated, "where files differ nothing is lost"


def test_keys_like_ckptcores_own_confuse_nobody(tmp_path: Path) -> None:
    """What another reader, or this one, would take as its own stays in the object."""
    odd = {"ckptcore.objects": '{"lr": 1}', "ckptcore.x": "1", "format": "mlx", "DCP_SHARDING_INFO": "{}"}
    torch.save({"w": torch.ones(4), "__metadata__": odd | {"mine": "2", "n": 3}}, tmp_path / "model.pt")
    ckptcore.convert(str(tmp_path / "model.pt"), str(tmp_path / "out"), to="safetensors")
    stored = metadata(tmp_path / "out" / "model.safetensors")
    assert stored["format"] == "pt"
    assert stored["mine"] == "2"
    assert json.loads(stored["ckptcore.objects"]) == {"__metadata__": odd | {"n": 3}}
    assert stored.keys() == {"format", "mine", "ckptcore.objects", "ckptcore.objects.version"}
    assert objects(tmp_path / "out") == {"__metadata__": odd | {"mine": "2", "n": 3}}


def test_a_value_for_another_library_is_kept(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    assert objects(tmp_path) == {"__metadata__": {"format": "mlx"}}
    ckptcore.convert(str(tmp_path / "model.safetensors"), str(tmp_path / "out"), to="safetensors")
    assert metadata(tmp_path / "out" / "model.safetensors")["format"] == "pt", "torch's loaders ask for it"
    assert objects(tmp_path / "out") == {"__metadata__": {"format": "mlx"}}


def test_other_fields_of_a_tensors_entry(tmp_path: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "scale": 0.5}}
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    assert objects(tmp_path) == {"__fields__": {"w": {"scale": 0.5}}}


def test_an_export_leaves_them_out_and_says_so(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "lora.safetensors", metadata=LORA)
    done = ckptcore.convert(str(tmp_path / "lora.safetensors"), str(tmp_path / "out"), verb="export")
    assert ("__metadata__", "an export holds the model only") in done.dropped
    assert metadata(tmp_path / "out" / "model.safetensors") == {"format": "pt"}


def test_excluding_the_object_leaves_it_out(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "lora.safetensors", metadata=LORA)
    out = tmp_path / "out.pt"
    ckptcore.convert(str(tmp_path / "lora.safetensors"), str(out), to="torch_save", exclude=["__metadata__"])
    assert torch.load(out).keys() == {"w"}


# ------------------------------------------------------------------------------- keys of an index


def test_other_keys_of_an_index(tmp_path: Path) -> None:
    parts: list[Any] = [({"a": torch.ones(2)}, {"format": "pt"}), ({"b": torch.ones(3)}, {"format": "pt"})]
    about = {"total_size": 20, "total_parameters": 5, "quantised_by": "x"}
    folder = numbered(tmp_path / "a", parts, metadata=about, revision=[1, None])
    stated = {"model.safetensors.index.json": {"metadata": {"quantised_by": "x"}, "revision": [1, None]}}
    assert objects(folder) == stated
    ckptcore.convert(str(folder), str(tmp_path / "one"), to="safetensors")
    assert objects(tmp_path / "one") == stated
    ckptcore.convert(str(tmp_path / "one"), str(tmp_path / "two"), to="safetensors", max_file_size=12)
    assert objects(tmp_path / "two") == stated
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"quantised_by": "x", "total_size": 20}
    assert index["revision"] == [1, None]
    first = metadata(tmp_path / "two" / "model-00001-of-00002.safetensors")
    assert first == {"format": "pt"}, "all of it is in the index"


def test_a_count_that_is_not_the_tensors(tmp_path: Path) -> None:
    """What is computed from the tensors is no value of its own, unless it is another number."""
    folder = numbered(tmp_path / "a", [({"a": torch.ones(2)}, {})], metadata={"total_parameters": 7})
    stated = {"model.safetensors.index.json": {"metadata": {"total_parameters": 7}}}
    assert objects(folder) == stated
    ckptcore.convert(str(folder), str(tmp_path / "b"), to="safetensors", max_file_size=4)
    assert objects(tmp_path / "b") == stated


def test_other_attributes_of_dcp_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    dcp.save({"w": torch.ones(4)}, checkpoint_id=folder, no_dist=True)
    opened = Folder(folder, tmp_path / "never")
    meta = opened.load()
    meta.notes = {"run": "x", "seeds": (1, 2)}
    meta.storage_meta.cluster = "west"
    opened.dump(meta)
    assert objects(folder) == {".metadata": {"notes": {"run": "x", "seeds": (1, 2)}, "cluster": "west"}}


# ------------------------------------------------------------------------ attributes of a tensor


class Unknown:
    pass


def parameter(**attributes: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(3))
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def with_attributes(**attributes: Any) -> torch.Tensor:
    made = torch.ones(2)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def test_attributes_of_parameters_and_tensors(tmp_path: Path) -> None:
    state = {
        "net": OrderedDict(w=parameter(lora_rank=8, note="mine"), b=with_attributes(scale=0.5)),
        "plain": parameter(),
        "marked": parameter(tensor_model_parallel=True, partition_dim=0),
    }
    torch.save(state, tmp_path / "model.pt")
    stated = {"__attributes__": {"net.w": {"lora_rank": 8, "note": "mine"}, "net.b": {"scale": 0.5}}}
    assert objects(tmp_path / "model.pt") == stated
    ckptcore.convert(str(tmp_path / "model.pt"), str(tmp_path / "out"), to="safetensors")
    assert objects(tmp_path / "out") == stated


def test_attributes_that_are_not_plain(tmp_path: Path) -> None:
    """A finding for each: of a class that is refused, and of a tensor, whose bytes then belong to nothing."""
    torch.save(
        {"w": parameter(kind=Unknown(), lr=0.1), "v": parameter(init=torch.zeros(7))}, tmp_path / "model.pt"
    )
    manifest = ckptcore.open(str(tmp_path / "model.pt"))
    (blob,) = [b for b in manifest.blobs if b.key == "__attributes__"]
    assert not blob.known
    assert "torch.Tensor" in blob.refused
    assert any(name.endswith("Unknown") for name in blob.refused)
    report = ckptcore.check(manifest)
    assert {f.code for f in report.findings} == {"refused-global", "unused-bytes"}
    assert sum("28 bytes" in f.message for f in report.findings) == 1
    assert [t.fqn for t in manifest.tensors] == ["w", "v"], "the rest is read"


def test_attributes_of_ranks_files(tmp_path: Path) -> None:
    """Ranks that differ about the attributes of a tensor keep them apart."""
    for rank in range(2):
        torch.save({"w": parameter(group="a", rank=rank)}, tmp_path / f"model_rank{rank}.pt")
    assert {k: v for k, v in objects(tmp_path).items() if k.startswith("__attributes__")} == {
        f"__attributes__/model_rank{rank}.pt": {"w": {"group": "a", "rank": rank}} for rank in range(2)
    }


def test_attributes_of_an_item_of_dcp_are_reported_when_it_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    opened = Folder(folder, tmp_path / "never")
    meta, (place,) = opened.load(), opened.places()
    torch.save(with_attributes(note="mine"), place.file)
    meta.storage_data[place.key].length = place.file.stat().st_size
    meta.storage_data[place.key].offset = 0
    opened.dump(meta)
    report = ckptcore.check(ckptcore.open(str(folder)), "bytes")
    assert report.ok
    (found,) = [f for f in report.findings if f.code == "unused-bytes"]
    assert found.message.endswith("attributes of the tensor: note")


# -------------------------------------------------------------------------------- other keys of JSON


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("api_torch_dist_0.12.3", "metadata.json"),
        ("api_zarr_0.12.3", "metadata.json"),
        ("v01_dtensor_ws4", "metadata.json"),
        ("v3_bf16params_ws2", ".metadata.json"),
    ],
)
def test_other_keys_of_a_writers_own_file(
    request: pytest.FixtureRequest, name: str, path: str, tmp_path: Path
) -> None:
    source = next(iter(_sample(request, name).checkpoints))
    folder = Path(shutil.copytree(source, tmp_path / "ckpt"))
    before = objects(folder)
    form = json.loads((folder / path).read_text())
    (folder / path).write_text(json.dumps({"mine": {"a": 1}} | form))
    assert objects(folder) == before | {path: {"mine": {"a": 1}}}


def _sample(request: pytest.FixtureRequest, name: str) -> Sample:
    return next(s for s in request.config.stash[SAMPLES] if s.name == name)


@pytest.mark.parametrize("value", [None, [], {"total_size": "9"}])
def test_a_known_key_with_a_value_of_another_type(value: Any, tmp_path: Path) -> None:
    """It is kept, and said: no writer gives it."""
    folder = numbered(
        tmp_path / "a", [({"a": torch.ones(2)}, {}), ({"b": torch.ones(3)}, {})], metadata=value
    )
    manifest = ckptcore.open(str(folder))
    assert objects(folder) == {"model.safetensors.index.json": {"metadata": value}}
    (found,) = [f for f in manifest.findings if f.code == "odd-value"]
    assert (found.file, found.severity) == ("model.safetensors.index.json", "warning")
    assert ckptcore.check(manifest).ok
