"""Maps of names: a rule makes what numpy makes of the stored tensors, however these are cut.

Every stored tensor is cut into random boxes, each written raw, as a torch zip (with strides of its own) or
into a safetensors blob, some of them twice.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_bytes

import ckptcore
from ckptcore.core.box import Box
from ckptcore.core.manifest import Chunks, Envelope, Manifest, StoredFile, TensorSpec, items_table
from ckptcore.naming.maps.conversion import convert
from ckptcore.naming.maps.declaration import ArchMap, RuleForm, compiled

Arrays = Mapping[str, np.ndarray]
L, E, G, Q, D, H, F = 3, 2, 2, 2, 4, 5, 3
NUMBERS = {"heads": G * Q, "kv_heads": G, "head_dim": D}


def _map(**rule: object) -> ArchMap:
    return ArchMap("test", (), (), "megatron", "hf-hub", tuple(compiled(RuleForm(name="rule", **rule))))


def _qkv(x: np.ndarray) -> dict[str, np.ndarray]:
    out = {}
    for layer in range(L):
        w = x[layer].reshape(G, Q + 2, D, H)
        out[f"l.{layer}.q"] = w[:, :Q].reshape(-1, H)
        out[f"l.{layer}.k"] = w[:, Q].reshape(-1, H)
        out[f"l.{layer}.v"] = w[:, Q + 1].reshape(-1, H)
    return out


# rule, shapes of the stored tensors, what numpy makes of them.
CASES: dict[str, tuple[ArchMap, dict[str, tuple[int, ...]], Callable[[Arrays], dict[str, np.ndarray]]]] = {
    "qkv by query groups, layers in one tensor": (
        _map(
            **{"from": "qkv : layer (kv_heads (q + k + v) head_dim) h"},
            to=[f"l.{{layer}}.{x} : (kv_heads {x} head_dim) h" for x in "qkv"],
            axes={"q": "heads / kv_heads", "k": 1, "v": 1},
        ),
        {"qkv": (L, G * (Q + 2) * D, H)},
        lambda a: _qkv(a["qkv"]),
    ),
    "gate and up joined, experts in one tensor": (
        _map(
            **{"from": ["e.{e}.gate : (gate f) h", "e.{e}.up : (up f) h"]},
            to="fused : e ((gate + up) f) h",
            axes={"gate": 1, "up": 1},
        ),
        {f"e.{e}.{n}": (F, H) for e in range(E) for n in ("gate", "up")},
        lambda a: {"fused": np.stack([np.concatenate([a[f"e.{e}.gate"], a[f"e.{e}.up"]]) for e in range(E)])},
    ),
    "rotary pairs": (
        _map(**{"from": "w : (heads pairs two) h"}, to="v : (heads two pairs) h", axes={"two": 2}),
        {"w": (G * Q * D, H)},
        lambda a: {"v": a["w"].reshape(G * Q, D // 2, 2, H).transpose(0, 2, 1, 3).reshape(-1, H)},
    ),
    "even and odd columns, transposed": (
        _map(**{"from": "w : e ((gate + up) f) h"}, to="v : e h (f (gate + up))", axes={"gate": 1, "up": 1}),
        {"w": (E, 2 * F, H)},
        lambda a: {"v": a["w"].reshape(E, 2, F, H).transpose(0, 3, 2, 1).reshape(E, H, 2 * F)},
    ),
    "experts below each other, transposed": (
        _map(**{"from": "w : (e h) f"}, to="x.{e} : f h", axes={"e": E}),
        {"w": (E * H, F)},
        lambda a: {f"x.{e}": a["w"].reshape(E, H, F)[e].T for e in range(E)},
    ),
    "padding left out": (
        _map(
            **{"from": "w : (vocab + padding) h"}, to="v : vocab h", axes={"vocab": 5}, drops={"padding": "x"}
        ),
        {"w": (8, H)},
        lambda a: {"v": a["w"][:5]},
    ),
    "layers put into one tensor": (
        _map(**{"from": "l.{layer}.w"}, to="w : layer ...", axes={"layer": L}),
        {f"l.{n}.w": (4, H) for n in range(L)},
        lambda a: {"w": np.stack([a[f"l.{n}.w"] for n in range(L)])},
    ),
    "parts of other sizes": (
        _map(
            **{"from": "w : (z + x + groups state) h"},
            to=["z : z h", "x : x h", "s : groups state h"],
            axes={"z": 3, "x": 2, "groups": 2},
        ),
        {"w": (11, H)},
        lambda a: {"z": a["w"][:3], "x": a["w"][3:5], "s": a["w"][5:].reshape(2, 3, H)},
    ),
    "flattened": (
        _map(**{"from": "w : a b c"}, to="v : (a b c)", axes={"a": 3, "b": 4}),
        {"w": (3, 4, 5)},
        lambda a: {"v": a["w"].reshape(-1)},
    ),
    "a dim of one put in and taken away": (
        _map(**{"from": "w : a 1 b"}, to="v : 1 b a"),
        {"w": (3, 1, 4)},
        lambda a: {"v": a["w"][:, 0].T[None]},
    ),
    "rows repeated": (
        _map(**{"from": "w : h"}, to="v : heads h", repeats=("heads",), one_way="one row of many"),
        {"w": (H,)},
        lambda a: {"v": np.broadcast_to(a["w"], (G * Q, H))},
    ),
    "one added": (
        _map(**{"from": "l.{layer}.norm"}, to="n.{layer + 2}", add=1),
        {f"l.{n}.norm": (7,) for n in range(L)},
        lambda a: {f"n.{n + 2}": a[f"l.{n}.norm"] + np.float32(1) for n in range(L)},
    ),
}


@st.composite
def _cut(draw: st.DrawFn, box: Box, depth: int = 3) -> list[Box]:
    """A box in pieces: cut in two at random places."""
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    if not depth or not dims or not draw(st.booleans()):
        return [box]
    d = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.shape[d] - 1))
    halves = []
    for begin, size in ((0, at), (at, box.shape[d] - at)):
        offset = tuple(o + begin if n == d else o for n, o in enumerate(box.offset))
        halves.append(Box(offset, tuple(size if n == d else s for n, s in enumerate(box.shape))))
    return [b for half in halves for b in draw(_cut(half, depth - 1))]


def _stored(draw: st.DrawFn, folder: Path, arrays: Arrays) -> Manifest:
    """The arrays as a checkpoint, cut and written at random."""
    tensors, first, rows, items, members, views = [], [0], [], [], {}, []
    data = io.BytesIO()
    for name, array in arrays.items():
        tensors.append(TensorSpec(name, "float32", array.shape))
        for box in draw(_cut(Box.full(array.shape))):
            index = tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))
            for _ in range(draw(st.integers(1, 2)) if draw(st.booleans()) else 1):
                kind = draw(st.sampled_from(["raw", "zip", "strided", "safetensors"]))
                piece = torch.from_numpy(array[index].copy())
                if kind == "strided":  # as a shard of a transposed weight is saved
                    piece = piece.permute(*reversed(range(piece.dim()))).contiguous()
                    piece = piece.permute(*reversed(range(piece.dim())))
                begin = data.tell()
                if kind == "raw":
                    data.write(b"pad" + piece.numpy().tobytes())
                    views.append([3, 0, *piece.stride()])
                elif kind == "safetensors":
                    data.write(safetensors_bytes({"t": piece}))
                    members[len(items)] = "t"
                    views.append([-1] * (2 + piece.dim()))
                else:
                    torch.save(piece, data)
                    views.append([-1] * (2 + piece.dim()))
                envelope = {"raw": Envelope.RAW, "safetensors": Envelope.SAFETENSORS}.get(
                    kind, Envelope.TORCHZIP
                )
                rows.append((box, len(items)))
                items.append((0, begin, data.tell() - begin, envelope, 0, -1))
        first.append(len(rows))
    (folder / "data").write_bytes(data.getvalue())
    rank = max(len(t.shape) for t in tensors)
    lo, shape = np.zeros((len(rows), rank), np.int64), np.ones((len(rows), rank), np.int64)
    view = np.ones((len(rows), 2 + rank), np.int64)
    for n, (box, _) in enumerate(rows):
        lo[n, : len(box.offset)], shape[n, : len(box.shape)] = box.offset, box.shape
        view[n, : len(views[n])] = views[n]
    chunks = Chunks(np.array(first, np.int64), lo, shape, np.array([i for _, i in rows], np.int64), view)
    files = (StoredFile("data", len(data.getvalue())),)
    return Manifest(
        "dcp", str(folder), tuple(tensors), chunks, replace(items_table(items), member=members), files
    )


@pytest.mark.alike(4)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_rule_makes_what_numpy_makes(case: str, data: st.DataObject) -> None:
    rules, shapes, expected = CASES[case]
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        manifest = _stored(data.draw, Path(folder), arrays)
        found = convert(manifest, rules, NUMBERS)
        wanted = expected(arrays)
        assert {t.fqn: t.shape for t in found.manifest.tensors} == {n: w.shape for n, w in wanted.items()}
        for name, array in wanted.items():
            got = ckptcore.read(found.manifest, name)
            assert got.numpy().tobytes() == np.ascontiguousarray(array).tobytes(), name
        assert Manifest.load(found.manifest.dump()).digest == found.manifest.digest
        if not any(rule.one_way for rule in rules.rules):
            source = found.manifest
            if source.derived:  # a sum is stored before the way back, and rounded there
                (Path(folder) / "sums").mkdir()
                source = _stored(data.draw, Path(folder) / "sums", wanted)
                arrays = {name: array + np.float32(1) - np.float32(1) for name, array in arrays.items()}
            back = convert(source, rules.inverted(), NUMBERS)
            for name, array in arrays.items():
                assert ckptcore.read(back.manifest, name).numpy().tobytes() == array.tobytes(), name
