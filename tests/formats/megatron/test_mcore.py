"""Read every variant of Megatron-Core folders, and report every missing piece."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples import SAMPLES, differences, expected_tensors, value

import ckptcore
from ckptcore import mcore
from ckptcore.conversion.pipeline import validate
from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import Named, decode
from ckptcore.errors import CkptError, Finding, NotComplete, UnreadablePart, UnsupportedFormat

DIST, OLD, ZARR = "api_torch_dist_0.19.2", "api_torch_dist_0.12.3", "api_zarr_0.12.3"
MODEL_SPACE = "optim_llama_tp2dp2_fully_sharded_model_space_0.12.3"
Copy = Callable[[str], Path]


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Copy:
    """A sample's checkpoint folder, to be changed."""
    found = {s.name: s for s in request.config.stash[SAMPLES]}

    def make(name: str) -> Path:
        inside = "ckpt" if (found[name].root / "ckpt").is_dir() else "."
        return Path(shutil.copytree(found[name].root / inside, tmp_path / name))

    return make


@pytest.fixture
def truth(request: pytest.FixtureRequest) -> Callable[[str, str], Any]:
    """A truth file of a sample."""
    found = {s.name: s for s in request.config.stash[SAMPLES]}
    return lambda name, file: expected_tensors(found[name].root / file)


def codes(folder: Path, level: str = "coverage") -> dict[str, Finding]:
    """The findings of a folder by code, without those that only inform."""
    found = validate(ckptcore.open(str(folder)), level).findings
    return {f.code: f for f in found if f.severity != "info"}


def read_all(manifest: Manifest) -> dict[str, Any]:
    return {t.fqn: value(ckptcore.read(manifest, t.fqn)) for t in manifest.tensors}


def objects(manifest: Manifest) -> dict[str, Any]:
    return {b.key: b.tree for b in manifest.blobs}


# --- reading --------------------------------------------------------------------------------------


def test_arguments_and_extra_state(copy: Copy) -> None:
    manifest = ckptcore.open(str(copy(DIST)))
    trees = {b.key: decode(b.tree) for b in manifest.blobs}
    assert trees["args"].kind == "namespace"
    assert trees["args"].value["hidden_size"] == 8
    assert trees["args"].value["params_dtype"] == Named("dtype", "bfloat16")
    kinds = {trees[f"decoder.layers.mlp.linear_fc1._extra_state/shard_{n}_4"].kind for n in range(4)}
    assert kinds == {"bytesio", "bytetensor"}  # never opened, and not tensors of the model
    assert not any("_extra_state" in t.fqn for t in manifest.tensors)
    assert trees["common_tensor"].fqn == "common_tensor"


@pytest.mark.parametrize("name", [DIST, OLD, ZARR])
def test_python_api(name: str, copy: Copy) -> None:
    checkpoint = mcore.open(str(copy(name)))
    assert checkpoint.backend == ("zarr" if name == ZARR else "torch_dist", 1)
    assert checkpoint.tensors_metadata["embedding.word_embeddings.weight"].shape == (12, 8)
    assert "common_tensor" not in checkpoint.tensors_metadata
    assert checkpoint.sharded_metadata["rng_state"] == (2, 2)
    assert checkpoint.sharded_objects["rng_state"].values[1, 0][0]["seed"] == 1236
    assert checkpoint.common_state["args"]["num_layers"] == 4
    assert checkpoint.common_state["common_tensor"].shape == (5,)
    assert (checkpoint.content_metadata is None) == (name != DIST)


def test_remove(copy: Copy, tmp_path: Path) -> None:
    source = copy(MODEL_SPACE)
    mcore.remove(str(source), str(tmp_path / "out"), ["optimizer.", "rng_state"])
    left = mcore.open(str(tmp_path / "out"))
    assert "optimizer" in left.common_state
    assert len(left.tensors_metadata) == 9
    assert "rng_state" not in left.sharded_objects


@pytest.mark.parametrize("kept", [True, False])
def test_flattened_shapes(kept: bool, copy: Copy, truth: Callable[[str, str], Any]) -> None:
    """torch 2.9 lost mcore_data; the weights then give the shapes."""
    folder = copy(MODEL_SPACE)
    metadata = folder / ".metadata"
    if not kept:
        metadata.write_bytes(metadata.read_bytes().replace(b"mcore_data", b"other_data"))
    manifest = ckptcore.open(str(folder))
    wanted = truth(MODEL_SPACE, "expected_optimizer.safetensors")
    assert not differences(wanted, read_all(manifest))
    assert validate(manifest, "bytes").ok


def test_flattened_shapes_lost(copy: Copy, tmp_path: Path) -> None:
    folder = copy(OLD)  # optimizer state without its weights
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"mcore_data", b"other_data"))
    warning = codes(folder)["shape-lost"]
    assert warning.severity == "warning"
    assert "flat2d_row" in warning.message
    assert ckptcore.open(str(folder)).tensors


def test_classes_of_0_15(copy: Copy, truth: Callable[[str, str], Any], monkeypatch: Any) -> None:
    """0.15 pickles its metadata as its own class; it is read without that class."""
    import pickle

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan

    name = "megatron.core.dist_checkpointing.strategies.torch"
    module: Any = types.ModuleType(name)
    for part in (
        "megatron",
        "megatron.core",
        "megatron.core.dist_checkpointing",
        "megatron.core.dist_checkpointing.strategies",
    ):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, name, module)
    module.MCoreMetadata = type("MCoreMetadata", (Metadata,), {"__module__": name})
    module.MCoreSavePlan = type("MCoreSavePlan", (SavePlan,), {"__module__": name})
    folder = copy(OLD)
    plain = pickle.loads((folder / ".metadata").read_bytes())  # written by this project's fixtures
    made = module.MCoreMetadata(plain.state_dict_metadata)
    made.__dict__.update(plain.__dict__)
    (folder / ".metadata").write_bytes(pickle.dumps(made))
    assert not differences(truth(OLD, "expected.safetensors"), read_all(ckptcore.open(str(folder))))


# --- missing and wrong parts ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [DIST, OLD, ZARR])
def test_last_file_missing(name: str, copy: Copy) -> None:
    folder = copy(name)
    (folder / "metadata.json").unlink()
    with pytest.raises(NotComplete) as caught:
        ckptcore.open(str(folder))
    assert "metadata.json" in caught.value.message
    incomplete = ckptcore.open(str(folder), allow_incomplete=True)
    assert incomplete.format == ("zarr" if name == ZARR else "torch_dist")


@pytest.mark.parametrize("backend", [("torch_dist", 2), ("tensorstore", 1)])
def test_backend_is_checked(backend: tuple[str, int], copy: Copy) -> None:
    folder = copy(DIST)
    form = {"sharded_backend": backend[0], "sharded_backend_version": backend[1]}
    (folder / "metadata.json").write_text(json.dumps(form))
    with pytest.raises(UnsupportedFormat) as caught:
        ckptcore.open(str(folder))
    assert backend[0] in caught.value.message


def test_common_state_missing(copy: Copy) -> None:
    for name in (OLD, ZARR):
        folder = copy(name)
        (folder / "common.pt").unlink()
        assert codes(folder)["missing-file"].file == "common.pt"


def test_objects_missing(copy: Copy) -> None:
    folder = copy(ZARR)
    (folder / "rng_state" / "shard_1.0_2.2.pt").unlink()
    assert "1.0" in codes(folder)["hole"].message
    shutil.copy(folder / "rng_state" / "shard_0.0_2.2.pt", folder / "rng_state" / "shard_1.0_3.2.pt")
    assert codes(folder)["overlap"].fqn == "rng_state"


def test_integrity(copy: Copy) -> None:
    folder = copy(DIST)
    assert "digest-mismatch" not in codes(folder, "bytes")
    data = bytearray((folder / "__1_0.distcp").read_bytes())
    data[4096] ^= 1
    (folder / "__1_0.distcp").write_bytes(data)
    assert codes(folder, "bytes")["digest-mismatch"].file == "__1_0.distcp"
    (folder / "__2_0.distcp").unlink()
    assert "missing-file" in codes(folder, "files")


def test_refused_global_leaves_the_rest(copy: Copy, tmp_path: Path) -> None:
    """A class off the allow-list is left out of the common state, by its path; the rest is kept."""
    import argparse
    import ast

    import torch

    folder = copy(OLD)
    args = argparse.Namespace(hidden_size=8, odd=ast.Constant(1), deep={"x": [1, ast.Constant]})
    torch.save({"args": args, "iteration": 7}, folder / "common.pt")
    manifest = ckptcore.open(str(folder))
    blob = next(b for b in manifest.blobs if b.key == "args")
    assert decode(blob.tree).value == {"hidden_size": 8, "deep": {}}
    refused = codes(folder)["refused-global"]
    assert "ast.Constant" in refused.message
    assert "odd" in refused.message
    assert mcore.open(str(folder)).common_state["iteration"] == 7


def test_values_of_libraries_come_back_in_the_common_state(copy: Copy, tmp_path: Path) -> None:
    """They are in the arguments and beside them; `torch.load` of the output's common.pt builds them again."""
    import argparse

    import torch
    from library_values import same, values

    kept = {key: value for key, value in values().items() if key != "simple"}  # read as a Namespace
    folder = copy(OLD)
    state = {
        "args": argparse.Namespace(hidden_size=8, kept=kept),
        "iteration": 7,
        "mine": tuple(kept.values()),
    }
    torch.save(state, folder / "common.pt")
    assert "refused-global" not in codes(folder)
    ckptcore.convert(str(folder), str(tmp_path / "out"), to="torch_dist")
    back = torch.load(tmp_path / "out/common.pt", weights_only=False)
    assert [key for key, value in kept.items() if not same(back["args"].kept[key], value)] == []
    assert [key for key, value in zip(kept, back["mine"], strict=True) if not same(kept[key], value)] == []


# --- zarr -----------------------------------------------------------------------------------------


def array(folder: Path, **changes: Any) -> Path:
    """Changes a .zarray in place."""
    path = folder / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_zarr_chunks_missing_short_long(copy: Copy) -> None:
    folder = copy(ZARR)
    key = folder / "embedding.word_embeddings.weight"
    chunk = (key / "1.0").read_bytes()
    (key / "1.0").unlink()
    assert codes(folder)["missing-file"].file == f"{key.name}/1.0"
    (key / "1.0").write_bytes(chunk[:-2])
    assert "truncated-file" in codes(folder)
    (key / "1.0").write_bytes(chunk + b"xx")
    assert "oversized-file" in codes(folder)
    (key / "1.0").write_bytes(chunk)
    (key / "2.0").write_bytes(chunk)  # of a larger save, or the shape was reduced: nothing says which
    assert codes(folder)["out-of-bounds"].severity == "error"
    (key / "2.0").rename(key / "note.txt")
    assert codes(folder)["stray-file"].severity == "warning"


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "change",
    [
        {"compressor": {"id": "blosc", "cname": "lz4"}},
        {"filters": [{"id": "delta"}]},
        {"dtype": [["a", "<f4"]]},
        {"dtype": "<U8"},
        {"dtype": "<M8[ns]"},
        {"dtype": "|O"},
    ],
)
def test_a_zarr_array_that_cannot_be_read_is_left_out_by_name(
    change: dict[str, Any], copy: Copy, tmp_path: Path
) -> None:
    folder = copy(ZARR)
    others = {t.fqn for t in ckptcore.open(str(folder)).tensors} - {"misc.grid_int64"}
    array(folder / "misc.grid_int64", **change)
    manifest = ckptcore.open(str(folder))
    assert {t.fqn for t in manifest.tensors} == others
    assert manifest.unread["misc.grid_int64"].file == "misc.grid_int64/.zarray"
    with pytest.raises(UnreadablePart, match=r"misc\.grid_int64") as caught:
        ckptcore.convert(str(folder), str(tmp_path / "out"))
    assert "exclude='misc.grid_int64'" in caught.value.hint
    ckptcore.convert(str(folder), str(tmp_path / "out"), exclude=["misc.grid_int64"])
    found = {t.fqn for t in ckptcore.open(str(tmp_path / "out")).tensors}
    assert found == others


@pytest.mark.parametrize("change", [{"zarr_format": 3}])
def test_zarr_refused_by_name(change: dict[str, Any], copy: Copy) -> None:
    folder = copy(ZARR)
    array(folder / "misc.grid_int64", **change)
    with pytest.raises(UnsupportedFormat) as caught:
        ckptcore.open(str(folder))
    assert "misc.grid_int64" in caught.value.message


@pytest.mark.parametrize(
    "change",
    [{"chunks": [0, 3]}, {"shape": [4]}, {"shape": [-1, 6]}, {"chunks": [2, 1 << 60]}, {"order": "X"}],
)
def test_zarr_malformed(change: dict[str, Any], copy: Copy) -> None:
    folder = copy(ZARR)
    array(folder / "misc.grid_int64", **change)
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(folder))
    assert caught.value.code == "malformed"


def test_zarr_sizes_are_bounded(copy: Copy) -> None:
    folder = copy(ZARR)
    array(folder / "misc.grid_int64", shape=[1 << 30, 1 << 30], chunks=[1, 1])
    reported = codes(folder)
    assert {"hole", "missing-file"} <= reported.keys()


@pytest.mark.parametrize(("order", "kind"), [("C", ">i4"), ("F", "<i4"), ("F", ">i2")])
def test_zarr_layouts(order: str, kind: str, copy: Copy) -> None:
    """Edge chunks are padded, order may be by columns, and elements may be big-endian."""
    import numpy as np

    folder = copy(ZARR)
    full = np.arange(5 * 7).reshape(5, 7).astype(kind)
    key = folder / "odd"
    key.mkdir()
    form = {
        "zarr_format": 2,
        "shape": [5, 7],
        "chunks": [2, 3],
        "dtype": kind,
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "order": order,
    }
    (key / ".zarray").write_text(json.dumps(form))
    for i in range(3):
        for j in range(3):
            padded = np.full((2, 3), -1, kind)
            part = full[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]
            padded[: part.shape[0], : part.shape[1]] = part
            (key / f"{i}.{j}").write_bytes(padded.tobytes(order))  # type: ignore[arg-type]
    manifest = ckptcore.open(str(folder))
    assert (ckptcore.read(manifest, "odd").numpy() == full.astype(kind[1:])).all()
    assert validate(manifest, "bytes").ok


def test_zarr_names_of_0_5(copy: Copy) -> None:
    """0.5 dropped the last number of names of objects in two dims; they are read under these names."""
    folder = copy(ZARR)
    for path in list((folder / "rng_state").iterdir()):
        path.rename(path.with_name(path.name.replace("_2.2.pt", "_2.pt")))
    manifest = ckptcore.open(str(folder))
    assert {b.key for b in manifest.blobs} >= {"rng_state/shard_0.1_2", "rng_state/shard_1.1_2"}
    assert not codes(folder)
    (folder / "rng_state" / "shard_1.0_2.pt").unlink()
    assert "hole" in codes(folder)


# --- roots ----------------------------------------------------------------------------------------


def test_root(copy: Copy) -> None:
    root = copy("root_torch_dist_llama_0.19.2")
    manifest = ckptcore.open(str(root))
    assert manifest.root.endswith("iter_0000100")
    assert any("latest_checkpointed_iteration.txt" in line for line in manifest.origin["evidence"])
    shutil.copytree(root / "iter_0000100", root / "iter_0000200")
    (root / "iter_0000200" / "metadata.json").unlink()
    assert ckptcore.open(str(root)).root.endswith("iter_0000100")  # the tracker is written last
    (root / "latest_checkpointed_iteration.txt").write_text("200")
    with pytest.raises(NotComplete) as caught:
        ckptcore.open(str(root))
    assert "iter_0000100" in caught.value.message
    (root / "latest_checkpointed_iteration.txt").write_text("300")
    with pytest.raises(NotComplete) as caught:
        ckptcore.open(str(root))
    assert "iter_0000100" in caught.value.message
    (root / "iter_0000100").rename(root / "release")
    (root / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert ckptcore.open(str(root)).root.endswith("release")


@pytest.mark.parametrize(
    ("place", "beside", "ends"),
    [
        ("weights", ["context/model.yaml", "context/io.json"], "weights"),  # NeMo 2.0
        (
            "iter_0000100",
            ["latest_train_state.pt", "iter_0000100/run_config.yaml", "iter_0000100/train_state.pt"],
            "iter_0000100",
        ),  # Megatron-Bridge
        ("actor/dist_ckpt", ["actor/huggingface/config.json"], "actor/dist_ckpt"),  # verl
        ("dist_ckpt", ["huggingface/config.json"], "dist_ckpt"),
    ],
)
def test_neighbours(place: str, beside: list[str], ends: str, copy: Copy, tmp_path: Path) -> None:
    root = tmp_path / "wrapped"
    shutil.copytree(copy(DIST), root / place)
    for name in beside:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    manifest = ckptcore.open(str(root))
    assert manifest.root.endswith(ends)
    assert manifest.format == "torch_dist"
    assert validate(manifest, "bytes").ok


def test_fsdp_dtensor(copy: Copy) -> None:
    """Megatron-FSDP saves a plain DCP folder; its keys identify it, and its arguments are read."""
    folder = copy("fsdp_dtensor_llama_dp4_0.19.2")
    manifest = ckptcore.open(str(folder))
    assert manifest.format == "fsdp_dtensor"
    args = next(decode(b.tree) for b in manifest.blobs if b.key == "args")
    assert args.value["num_layers"] == 4
    config = {"sharded_backend": "fsdp_dtensor", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config))
    assert ckptcore.open(str(folder)).format == "fsdp_dtensor"


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1}', "x" * (2 << 20)])
def test_metadata_json_of_others(text: str, tmp_path: Path) -> None:
    """A file of that name alone decides nothing."""
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(tmp_path))
    assert caught.value.code == "unknown-format"
