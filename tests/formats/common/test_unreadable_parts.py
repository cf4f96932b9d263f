"""Read checkpoints with unreadable parts: each part is a finding, and all others can be converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from odd_tensors import KINDS, B, W, quantized
from safetensors.torch import save_file

import ckptcore
from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, UnprovenCheckpoint, UnreadablePart

pytestmark = pytest.mark.filterwarnings("ignore")


def state(kind: str) -> dict[str, Any]:
    return {"model": {"w": W, "b": B, "odd": KINDS[kind]()}, "step": 3}


def torch_file(folder: Path, kind: str) -> Path:
    torch.save(state(kind), folder / "a.pt")
    return folder / "a.pt"


def rank_files(folder: Path, kind: str) -> Path:
    for rank in range(2):
        torch.save(state(kind)["model"], folder / f"model_world_size_2_rank_{rank}.pt")
        torch.save({"step": 3}, folder / f"extra_state_world_size_2_rank_{rank}.pt")
    return folder


def lightning_file(folder: Path, kind: str) -> Path:
    checkpoint = {"pytorch-lightning_version": "2.6.6", "state_dict": state(kind)["model"], "epoch": 1}
    torch.save(
        checkpoint | {"global_step": 3, "optimizer_states": [], "lr_schedulers": []}, folder / "a.ckpt"
    )
    return folder / "a.ckpt"


def names(manifest: Manifest) -> set[str]:
    return {t.fqn for t in manifest.tensors}


def stops_nothing_else(source: Path, odd: str, out: Path | None = None) -> None:
    """A request for the part is refused by its name; the rest can be converted, to ``out``."""
    manifest = ckptcore.open(str(source))
    root = odd.removesuffix("odd")
    assert odd not in names(manifest)
    assert {root + "w", root + "b"} <= names(manifest)
    errors = [f for f in ckptcore.check(manifest).findings if f.severity == "error"]
    assert {f.fqn for f in errors} == {odd}
    assert Manifest.load(manifest.dump()).unread == manifest.unread
    for verb in ("consolidate", "export"):
        with pytest.raises(UnreadablePart) as caught:
            ckptcore.plan(manifest, str(source) + ".out", verb=verb)
        assert (caught.value.code, caught.value.exit_code) == ("unreadable-part", 27)
        assert odd in caught.value.message
        assert f"exclude='{odd}'" in caught.value.hint
        for chosen in ({"exclude": [odd]}, {"include": [root + "w", root + "b"]}):
            planned = ckptcore.plan(manifest, str(source) + ".out", verb=verb, **chosen)
            assert sum(f.tensors for f in planned.plan.files) >= 2
            assert odd in {name for name, _ in planned.plan.dropped}
        if out is not None:
            ckptcore.convert(str(source), str(out / verb), verb=verb, exclude=[odd])
            found = ckptcore.open(str(out / verb))
            (name,) = [n for n in names(found) if n.endswith("w")]
            assert torch.equal(ckptcore.read(found, name), W)


@pytest.mark.parametrize("kind", KINDS)
def test_a_torch_file(kind: str, tmp_path: Path) -> None:
    stops_nothing_else(torch_file(tmp_path, kind), "model.odd", tmp_path if kind == "coo" else None)


@pytest.mark.parametrize("kind", ["qint8", "bits8", "coo", "jagged", "subclass", "module"])
def test_files_of_ranks(kind: str, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    out = tmp_path if kind == "bits8" else None
    stops_nothing_else(rank_files(tmp_path / "ckpt", kind), "model.odd", out)


@pytest.mark.parametrize("kind", ["qint8", "bits8", "coo", "jagged", "subclass", "module"])
def test_a_lightning_file(kind: str, tmp_path: Path) -> None:
    stops_nothing_else(lightning_file(tmp_path, kind), "state_dict.odd", tmp_path if kind == "coo" else None)


@pytest.mark.parametrize("kind", ["qint8", "qint32", "per channel"])
def test_a_dcp_folder(kind: str, tmp_path: Path) -> None:
    dcp.save(state(kind), checkpoint_id=tmp_path / "ckpt", no_dist=True)
    stops_nothing_else(tmp_path / "ckpt", "model.odd", tmp_path if kind == "qint8" else None)
    why = ckptcore.open(str(tmp_path / "ckpt")).unread["model.odd"]
    assert (why.dtype, why.shape) == (str(KINDS[kind]().dtype).removeprefix("torch."), KINDS[kind]().shape)


def test_a_subclass_in_a_dcp_folder(tmp_path: Path) -> None:
    """`.metadata` has its dtype and shape, but not its class."""
    source = tmp_path / "ckpt"
    dcp.save(state("subclass"), checkpoint_id=source, no_dist=True)
    manifest = ckptcore.open(str(source))
    (error,) = [f for f in ckptcore.check(manifest, "bytes").findings if f.severity == "error"]
    assert (error.code, error.fqn) == ("unreadable-part", "model.odd")
    with pytest.raises(UnreadablePart, match="Scaled") as caught:
        ckptcore.convert(str(source), str(tmp_path / "out"))
    assert "exclude='model.odd'" in caught.value.hint
    with pytest.raises(UnreadablePart):
        ckptcore.read(manifest, "model.odd")
    ckptcore.convert(str(source), str(tmp_path / "out"), exclude=["model.odd"])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F6_E2M3", [12]), ("F6_E3M2", [12]), ("I4", [12]), ("float32", [12]), ("F4", [4, 3]), ("F4", [])],
)
def test_a_safetensors_file(dtype: str, shape: list[int], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": W, "b": B, "odd": torch.zeros(6, dtype=torch.uint8)}, path)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["odd"] |= {"dtype": dtype, "shape": shape}
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])
    stops_nothing_else(path, "odd", tmp_path / "x" if dtype == "I4" else None)


def test_a_request_for_it_is_refused(tmp_path: Path) -> None:
    source = str(torch_file(tmp_path, "coo"))
    manifest = ckptcore.open(source)
    with pytest.raises(UnreadablePart, match=r"cannot read model\.odd: a tensor of layout torch\.sparse_coo"):
        ckptcore.read(manifest, "model.odd")
    target = {"model": {"w": torch.zeros(3, 4), "odd": torch.zeros(4, 4)}}
    with pytest.raises(UnreadablePart, match="sparse_coo"):
        ckptcore.load_into(manifest, target)
    assert not target["model"]["w"].any()
    ckptcore.load_into(manifest, {"model": {"w": target["model"]["w"]}})
    assert torch.equal(target["model"]["w"], W)
    for model in (False, True):
        with pytest.raises(UnreadablePart):
            ckptcore.diff(source, source, model=model)
        assert ckptcore.diff(source, source, model=model, exclude=["*odd"]).equal
        with pytest.raises(UnreadablePart):
            ckptcore.fingerprint(source, model=model)
        assert ckptcore.fingerprint(source, model=model, exclude=["model.odd"]).fingerprint


def test_globs_that_exclude_many(tmp_path: Path) -> None:
    layers = {f"l.{n}.{k}": v for n in range(20) for k, v in {"q": quantized(), "s": B}.items()}
    torch.save(layers, tmp_path / "a.pt")
    with pytest.raises(UnreadablePart) as caught:
        ckptcore.convert(str(tmp_path / "a.pt"), str(tmp_path / "out"))
    assert "exclude='l.*.q'" in caught.value.hint
    ckptcore.convert(str(tmp_path / "a.pt"), str(tmp_path / "out"), exclude=["l.*.q"])
    assert len(ckptcore.open(str(tmp_path / "out")).tensors) == 20


def test_executable_content_is_still_unsafe(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.system, ("true",)

    dcp.save({"w": W}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    path = tmp_path / "ckpt" / ".metadata"
    path.write_bytes(b"\x80\x02cposix\nsystem\n(X\x04\x00\x00\x00truetR.")
    with pytest.raises(CkptError) as caught:
        ckptcore.open(str(tmp_path / "ckpt"))
    assert caught.value.code == "unsafe"
    torch.save({"w": W, "x": Evil()}, tmp_path / "a.pt")
    findings = ckptcore.check(ckptcore.open(str(tmp_path / "a.pt"))).findings
    assert [(f.code, f.fqn) for f in findings] == [("refused-global", "x")]


# --- shards of torch's Hugging Face writer, all evenly cut ------------------------------------


def shards(folder: Path, ranks: int, of: int, *, rows: int = 32, width: int = 8) -> Path:
    """The first ``ranks`` of ``of`` evenly cut shards."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        tensors, info = {}, {}
        for name, height in (("model.embed_tokens.weight", rows), ("model.layers.0.mlp.weight", 16)):
            each = height // of
            tensors[name] = torch.full((each, width), float(rank))
            info[name] = {"saved_offsets": [rank * each, 0]}
        save_file(
            tensors,
            folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"},
        )
    return folder


def index(folder: Path, total: int) -> None:
    listed = dict.fromkeys(
        ("model.embed_tokens.weight", "model.layers.0.mlp.weight"), "model-00001.safetensors"
    )
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": listed})
    (folder / "model.safetensors.index.json").write_text(text)


def test_evenly_cut_shards_are_unproven_not_damaged(tmp_path: Path) -> None:
    source = shards(tmp_path / "a", 4, 4)
    with pytest.raises(UnprovenCheckpoint) as caught:
        ckptcore.convert(str(source), str(tmp_path / "out"))
    assert (caught.value.code, caught.value.exit_code) == ("unproven", 26)
    ckptcore.convert(
        str(ckptcore.open(str(source), allow_incomplete=True).root), str(tmp_path / "out"), recover=True
    )


@pytest.mark.parametrize("ranks", [4, 3])
@pytest.mark.parametrize("proof", ["index", "config", "text config"])
def test_proofs_of_evenly_cut_shards(proof: str, ranks: int, tmp_path: Path) -> None:
    """An index's total, or the shape of one tensor: with all four ranks, and not without the last."""
    source = shards(tmp_path / "a", ranks, 4)
    config = {"vocab_size": 32, "hidden_size": 8}
    if proof == "index":
        index(source, (32 + 16) * 8 * 4)
    else:
        (source / "config.json").write_text(
            json.dumps({"text_config": config} if proof == "text config" else config)
        )
    if ranks == 4:
        ckptcore.convert(str(source), str(tmp_path / "out"))
        found = ckptcore.open(str(tmp_path / "out"))
        assert {t.shape for t in found.tensors} == {(32, 8), (16, 8)}
    else:
        with pytest.raises(UnprovenCheckpoint):
            ckptcore.convert(str(source), str(tmp_path / "out"))


def test_a_shape_that_fits_two_numbers_of_ranks(tmp_path: Path) -> None:
    """Four rows in parts of one: five ranks write the same, with an empty fifth part."""
    source = shards(tmp_path / "a", 4, 4, rows=4)
    (source / "config.json").write_text(json.dumps({"vocab_size": 4, "hidden_size": 8}))
    with pytest.raises(UnprovenCheckpoint):
        ckptcore.convert(str(source), str(tmp_path / "out"))
