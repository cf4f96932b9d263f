"""Test that two layouts of the same data are equal, and that differences are found at their index."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import driver
import numpy as np
import pytest
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import ckptcore
from ckptcore import Box, Difference, Manifest, Settings
from ckptcore.core.manifest import Blob, Envelope, Item, TensorSpec, View
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import encode
from ckptcore.errors import AmbiguousModel, CkptError, DamagedCheckpoint, UsageError
from ckptcore.planning.tiles import Budget

DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "int16": np.int16,
    "uint8": np.uint8,
    "bool": np.bool_,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
Boxes = Sequence[Box]


def lay(
    folder: Path,
    tensors: dict[str, tuple[Any, Boxes]],
    *,
    objects: dict[str, Any] | None = None,
    turn: bool = False,
    copies: bool = False,
    crc: bool = True,
) -> Manifest:
    """Write a checkpoint of these arrays in these boxes, each an item with a checksum.

    turn: boxes are stored transposed. copies: each box is stored twice.
    """
    folder.mkdir(exist_ok=True)
    builder, data = Builder(), bytearray()
    file = builder.file("data", None)
    for name, (array, boxes) in tensors.items():
        tensor = builder.tensor(TensorSpec(name, array.dtype.name, array.shape))
        for box in [*boxes, *(boxes if copies else ())]:
            part = array[tuple(slice(o, e) for o, e in zip(box.offset, box.end, strict=True))]
            stored = part.T if turn else part
            raw = stored.tobytes()
            check = zlib.crc32(raw) if crc else None
            item = builder.item(Item(file, len(data), len(raw), Envelope.RAW, "", check))
            strides = np.empty(part.shape[::-1]).T.strides if turn else None
            view = View(0, tuple(s // 8 for s in strides)) if strides else None
            builder.chunk(tensor, box.offset, box.shape, item, view)
            data += raw
    for key, value in (objects or {}).items():
        builder.blobs.append(Blob(key, -1, encode(value)))
    (folder / "data").write_bytes(data)
    builder._sizes[0] = len(data)
    return builder.build("dcp", str(folder), {})


def uncut(*arrays: Any) -> list[tuple[Any, Boxes]]:
    return [(a, [Box.full(a.shape)]) for a in arrays]


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw a partition into boxes: repeatedly cut one of them in two."""
    boxes = [Box.full(shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        wide = [d for d, n in enumerate(boxes[at].shape) if n > 1]
        if wide:
            dim = draw(st.sampled_from(wide))
            box, n = boxes[at], draw(st.integers(1, boxes[at].shape[dim] - 1))
            low = tuple(n if d == dim else k for d, k in enumerate(box.shape))
            high = tuple(k - n if d == dim else k for d, k in enumerate(box.shape))
            start = tuple(o + n if d == dim else o for d, o in enumerate(box.offset))
            boxes[at : at + 1] = [Box(box.offset, low), Box(start, high)]
    return list(draw(st.permutations(boxes)))


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    seed = np.random.default_rng(draw(st.integers(0, 9)))
    if dtype is np.bool_:
        return seed.integers(0, 2, shape).astype(np.bool_)
    raw = seed.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)  # NaNs of every kind among them


@pytest.fixture(autouse=True)
def _torch() -> None:
    """Imported outside the timed examples."""
    import torch  # noqa: F401


def bits(array: Any) -> Any:
    """uint8 [elements, bytes of one]."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.dtype.itemsize)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_two_partitions_of_the_same_are_equal(data: st.DataObject) -> None:
    """Also transposed, in copies, and with buffers far smaller than the tensors."""
    found = {f"t{n}": data.draw(arrays()) for n in range(data.draw(st.integers(1, 4)))}
    tile = data.draw(st.sampled_from([32, 64, 256, 1 << 16]))
    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(Budget, "of", lambda means: Budget(tile, means.threads)),
    ):
        a, b = (
            lay(
                Path(name, side),
                {k: (v, data.draw(cuts(v.shape))) for k, v in found.items()},
                turn=data.draw(st.booleans()),
                copies=data.draw(st.booleans()),
            )
            for side in "ab"
        )
        result = ckptcore.diff(a, b, settings=Settings(workers=data.draw(st.integers(1, 3))))
    assert result.equal
    assert (result.equal_tensors, result.a.unverified, result.b.unverified) == (len(found), 0, 0)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changed_bits_are_found_at_their_element(data: st.DataObject) -> None:
    one = data.draw(arrays().filter(lambda a: a.size))
    raw = bits(one).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        at, byte = data.draw(st.integers(0, one.size - 1)), data.draw(st.integers(0, raw.shape[1] - 1))
        raw[at, byte] ^= 1 << (data.draw(st.integers(0, 7)) if one.dtype != np.bool_ else 0)
    two = np.frombuffer(raw.tobytes(), one.dtype).reshape(one.shape)
    changed = np.flatnonzero((bits(one) != bits(two)).any(axis=1))
    tile = data.draw(st.sampled_from([32, 64, 1 << 16]))
    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(Budget, "of", lambda means: Budget(tile, means.threads)),
    ):
        a = lay(Path(name, "a"), {"w": (one, data.draw(cuts(one.shape)))})
        b = lay(Path(name, "b"), {"w": (two, data.draw(cuts(one.shape)))}, turn=data.draw(st.booleans()))
        result = ckptcore.diff(a, b, settings=Settings(workers=2))
    if not len(changed):  # flipped back
        assert result.equal
        return
    (found,) = result.tensors
    assert (found.name, found.what, found.differing) == ("w", ("values",), len(changed))
    assert found.first is not None
    index = tuple(int(i) for i in np.unravel_index(changed[0], one.shape))
    assert found.first.index == index
    assert found.first.a_bits == bits(one)[changed[0]].tobytes()[::-1].hex()
    assert found.first.b_bits == bits(two)[changed[0]].tobytes()[::-1].hex()
    assert np.array_equal(found.first.a, one[index].item(), equal_nan=True)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Any]:
    """Write two checkpoints and compare them."""

    def compare(
        a: dict[str, Any], b: dict[str, Any], /, objects: Any = (None, None), **options: Any
    ) -> Difference:
        one, two = (
            lay(
                tmp_path / side,
                {k: (np.asarray(v), [Box.full(np.shape(v))]) for k, v in tensors.items()},
                objects=o,
            )
            for side, tensors, o in zip("ab", (a, b), objects, strict=True)
        )
        return ckptcore.diff(one, two, **options)

    return compare


def names(result: Difference) -> dict[str, tuple[str, ...]]:
    return {t.name: t.what for t in result.tensors}


def test_nan_equals_itself_and_zero_has_a_sign(pair: Any) -> None:
    nan = np.array([np.nan, 0.0])
    assert pair({"w": nan}, {"w": nan}).equal
    (found,) = pair({"w": nan}, {"w": np.array([np.nan, -0.0])}).tensors
    assert found.first.index == (1,)
    assert (found.first.a, found.first.b_bits) == (0.0, "8000000000000000")


def test_names_dtypes_and_shapes(pair: Any) -> None:
    x = np.zeros((2, 3), np.float32)
    a = {"gone": x, "cast": x, "turned": x, "both": x, "same": x}
    b = {"cast": x.astype(np.float64), "turned": x.T, "both": np.zeros(7, np.int64), "same": x, "new": x}
    result = pair(a, b)
    assert names(result) == {
        "gone": ("only-in-a",),
        "cast": ("dtype",),
        "turned": ("shape",),
        "both": ("dtype", "shape"),
        "new": ("only-in-b",),
    }
    assert not result.equal
    assert result.equal_tensors == 1
    assert result.tensors[0].a.shape == (2, 3)
    assert result.tensors[0].b is None
    left = pair(a, b, exclude=["gone", "new", "cast", "[bt]*"])
    assert left.equal
    assert left.equal_tensors == 1
    assert ("gone", "matches --exclude gone") in left.a.left_out
    assert pair(a, b, include=["same"]).equal


def test_renames_are_for_a(pair: Any) -> None:
    x = np.arange(3.0)
    result = pair(
        {"h.0.w": x, "h.1.w": x + 1}, {"layers.0.w": x, "layers.1.w": x}, rename=[("h.", "layers.")]
    )
    assert names(result) == {"layers.1.w": ("values",)}
    assert result.tensors[0].a.fqn == "h.1.w"
    with pytest.raises(CkptError, match=r"A .*both be called"):
        pair({"a.w": x, "b.w": x}, {"w": x}, rename=[("a.", ""), ("b.", "")])


def test_ties_name_tensors_that_are_stored_once(pair: Any) -> None:
    x = np.arange(6.0)
    tie = [("head", "embed")]
    assert pair({"embed": x, "head": x}, {"embed": x}, tie=tie).equal
    assert names(pair({"embed": x, "head": x + 1}, {"embed": x}, tie=tie)) == {"head": ("values",)}
    assert names(pair({"embed": x, "head": x}, {"embed": x})) == {"head": ("only-in-a",)}
    with pytest.raises(UsageError, match="--tie names head"):
        pair({"embed": x}, {"embed": x}, tie=tie)


def test_wrong_use(pair: Any) -> None:
    x = np.arange(2.0)
    for options in ({"include": ["no*"]}, {"exclude": ["no*"]}):
        with pytest.raises(UsageError, match=r"no\* matches nothing"):
            pair({"w": x}, {"v": x}, **options)
    with pytest.raises(UsageError, match="nothing is left"):
        pair({"w": x}, {"w": x}, exclude=["w"])
    with pytest.raises(AmbiguousModel, match=r"^B .*no tensor's name starts with m"):
        pair({"m.w": x}, {"w": x}, model_prefix=["m", "m"])


def test_plain_values(pair: Any) -> None:
    """One format stores nested values as one object, another its leaves; types of numbers count."""
    x = {"w": np.arange(2.0)}
    nest = {"o": {"lr": 0.1, "steps": [1, 2], "betas": (0.9, 0.95), "nan": float("nan")}}
    flat = {"o.lr": 0.1, "o.steps.0": 1, "o.steps.1": 2, "o.betas": (0.9, 0.95), "o.nan": float("nan")}
    assert pair(x, x, objects=(nest, flat)).equal
    result = pair(
        x, x, objects=(nest, flat | {"o.lr": 0.2, "o.steps.1": 2.0, "o.betas": [0.9, 0.95], "k": 1})
    )
    assert {o.name: o.what for o in result.objects} == {
        "o.lr": "values",
        "o.steps.1": "values",
        "o.betas": "only-in-a",
        "o.betas.0": "only-in-b",
        "o.betas.1": "only-in-b",
        "k": "only-in-b",
    }
    assert result.objects[0].a == "0.1"
    assert result.equal_objects == 2
    assert pair(x, x, objects=(nest, None), exclude=["o"]).equal
    assert pair(x, x, objects=({"p.k": 1}, {"q.k": 1}), rename=[("p.", "q.")]).equal


def test_values_that_cannot_be_built_are_not_equal(pair: Any) -> None:
    from ckptcore.core.object_tree import Refused

    x, odd = {"w": np.arange(2.0)}, {"o": {"a": Refused("evil.thing"), "b": 1}}
    result = pair(x, x, objects=(odd, odd))
    assert result.equal
    assert result.equal_objects == 1
    assert result.skipped == (("o.a", "the value is not built on either side: evil.thing"),)
    assert not pair(x, x, objects=(odd, {"o": {"a": 1, "b": 1}})).equal


def test_an_array_among_the_values_may_be_a_tensor_elsewhere(pair: Any) -> None:
    from ckptcore.core.object_tree import Named
    from ckptcore.encodings.pickle.library_globals import array_value

    seed = np.arange(5, dtype=np.uint32)
    state = {"rng": ("MT", Named("ndarray", array_value("<u4", (5,), seed.tobytes())), 3)}
    torn = {"rng.0": "MT", "rng.2": 3}
    x = np.arange(2.0)
    result = pair({"w": x}, {"w": x, "rng.1": seed}, objects=(state, torn))
    assert result.equal
    assert result.equal_objects == 3
    assert not pair({"w": x}, {"w": x, "rng.1": seed + 1}, objects=(state, torn)).equal


def test_holes_are_errors(tmp_path: Path) -> None:
    x = np.arange(8.0)
    a = lay(tmp_path / "a", {"w": (x, [Box((0,), (8,))])})
    b = lay(tmp_path / "b", {"w": (x, [Box((0,), (4,)), Box((5,), (3,))])})
    with pytest.raises(DamagedCheckpoint, match=r"^B .*1 of 8 elements are in no file"):
        ckptcore.diff(a, b)


@pytest.mark.parametrize("exclude", [(), ("other",)])
@pytest.mark.parametrize("turn", [False, True])
def test_checksums_are_verified(tmp_path: Path, exclude: tuple[str, ...], turn: bool) -> None:
    """Also of records that are read in pieces, and with gaps."""
    x = np.arange(64.0).reshape(8, 8)
    tensors = {name: (x, [Box((0, 0), (8, 8))]) for name in ("w", "other")}
    a, b = (lay(tmp_path / side, tensors, turn=turn) for side in "ab")
    for side in "ab":  # the same damage on both sides: no difference shows it
        data = bytearray((tmp_path / side / "data").read_bytes())
        data[100] ^= 1
        (tmp_path / side / "data").write_bytes(data)
    with (
        patch.object(Budget, "of", lambda means: Budget(128, means.threads)),
        pytest.raises(DamagedCheckpoint) as error,
    ):
        ckptcore.diff(a, b, exclude=exclude)
    assert [f.code for f in error.value.values["findings"]] == ["crc-mismatch"]


def test_a_record_is_verified_completely_when_a_part_is_read(tmp_path: Path) -> None:
    """Flat parameters, say: one record contains many tensors."""
    sides = []
    for side in "ab":
        (tmp_path / side).mkdir()
        builder, raw = Builder(), np.arange(8.0).tobytes()
        file = builder.file("data", 64)
        item = builder.item(Item(file, 0, 64, Envelope.RAW, "", zlib.crc32(raw)))
        for n, name in enumerate(("w", "other")):
            tensor = builder.tensor(TensorSpec(name, "float64", (4,)))
            builder.chunk(tensor, (0,), (4,), item, View(32 * n, (1,)))
        (tmp_path / side / "data").write_bytes(raw)
        sides.append(builder.build("dcp", str(tmp_path / side), {}))
    assert ckptcore.diff(*sides, include=["w"]).equal
    (tmp_path / "b" / "data").write_bytes(np.arange(8.0).tobytes()[:63] + b"!")
    with pytest.raises(DamagedCheckpoint, match=r"^B .*CRC-32"):
        ckptcore.diff(*sides, include=["w"])


def test_copies_are_compared(tmp_path: Path) -> None:
    x = np.arange(8.0)
    boxes = {"w": (x, [Box((0,), (8,))])}
    a = lay(tmp_path / "a", boxes)
    b = lay(tmp_path / "b", boxes, copies=True, crc=False)
    assert ckptcore.diff(a, b).b.unverified == 2
    data = bytearray((tmp_path / "b" / "data").read_bytes())
    data[-1] ^= 1
    (tmp_path / "b" / "data").write_bytes(data)
    with pytest.raises(
        DamagedCheckpoint, match=r"^B .*w: its copies in data and data differ in 1 of 8 elements"
    ):
        ckptcore.diff(a, b)


def test_memory_is_the_budget(tmp_path: Path, cli: driver.Cli) -> None:
    """Tensors of 96 MiB in 8 MiB, laid out by rows and by columns."""
    import torch
    import torch.distributed.checkpoint as dcp

    w = torch.arange(24 << 20, dtype=torch.float32).reshape(4096, 6144)
    torch.save({"w": w}, tmp_path / "rows.pt")
    dcp.save({"w": w.T.contiguous().T}, checkpoint_id=tmp_path / "columns", no_dist=True)
    least = cli("inspect", tmp_path / "rows.pt").peak
    result = cli("diff", tmp_path / "rows.pt", tmp_path / "columns", "--memory", "8MiB", "--workers", "2")
    assert result.code == 0, result
    assert result.peak - least < 32 << 20


KINDS = [
    "dcp_nested_2r",
    "dcp_zstd_2r",
    "dcp_odd_dtypes_2r",
    "dcp_noflatten_1r",
    "dcp_torchtitan_like_4r",
    "dcp_hsdp_4r",
    "hf_sharded_4r",
    "hf_bugs_0d_4r",
    "hf_fp8_block",
    "verl_fsdp2_4r",
    "lightning_trainer_mp_sharded_2r",
    "v01_dtensor_ws4",
    "v3_bf16params_ws2",
    "gpt_mixtral_ep2pp2_0.19.2",
    "api_zarr_0.12.3",
    "accelerate_fsdp2_2r",
    "legacy_llama_tp2pp2_0.15.3",
]


@pytest.mark.alike(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_equals_its_outputs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Sharded and consolidated, in other formats: the same tensors and the same plain values."""
    sample = next(s for s in request.config.stash[samples.SAMPLES] if s.name == name)
    source = next(p for p in sorted(sample.root.iterdir()) if not p.name.startswith("expected"))
    made = {"out.pt": "torch_save", "dcp": "dcp"}
    if "odd_dtypes" not in name:  # some of which safetensors cannot hold
        made["st"] = "safetensors"
    for path, to in made.items():
        ckptcore.convert(str(source), str(tmp_path / path), to=to)
    for path in made:
        result = ckptcore.diff(
            str(source), str(tmp_path / path), settings=Settings(memory=2 << 20, workers=1)
        )
        assert result.equal, (path, result.tensors[:3], result.objects[:3])
        assert result.equal_tensors == ckptcore.open(str(source)).num_tensors


def test_an_export_is_the_model_part(tmp_path: Path, cli: driver.Cli) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    weights = {f"_orig_mod.layers.{n}.w": torch.randn(4, 4) for n in range(3)}
    moments = {"state": {k: {"exp_avg": torch.zeros(4, 4)} for k in weights}}
    tied = {"_orig_mod.head.w": weights["_orig_mod.layers.0.w"].clone()}
    state = {"model": weights | tied, "optim": moments, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    source, out = tmp_path / "ckpt", tmp_path / "hf"
    assert cli("export", source, out, "--no-catalog", "--tie", "head.w=layers.0.w").code == 0
    by_itself = cli("diff", source, out)
    assert by_itself.code == 0, by_itself
    assert (
        "B is a model alone, so only the model parts are compared, as with --model, --tie" in by_itself.stdout
    )
    tie = ("--tie", "head.w=layers.0.w")
    result = cli("diff", source, out, "--model", *tie, "--output", "json")
    assert result.code == 0, result
    assert result.json["equal_tensors"] == 4
    assert "optimizer" in result.json["a"]["model"] or "optim" in result.json["a"]["model"]
    assert {row["rule"] for row in result.json["a"]["left_out"]} == {
        "not part of the model (model prefix 'model.')"
    }
    assert cli("diff", out, source, "--model-prefix", "", "--model-prefix", "model", *tie).code == 0


def test_the_command_line_reports_the_element(tmp_path: Path, cli: driver.Cli) -> None:
    from safetensors.torch import save_file
    from torch import arange, bfloat16

    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    w = arange(6).to(bfloat16).reshape(2, 3)
    v = w.clone()
    v[1, 1] = 9
    save_file({"w": w, "[bold]x": w.clone()}, a)
    save_file({"w": v, "y": w}, b)
    result = cli("diff", a, b)
    assert result.code == 1
    assert "[1, 1]" in result.stdout
    assert "4.0 (0x4080)" in result.stdout
    assert "[bold]x" in result.stdout
    assert str(b) in result.stdout
    form = cli("diff", a, b, "--output", "json").json
    assert form["equal"] is False
    (row,) = [t for t in form["tensors"] if t["name"] == "w"]
    assert row["first"] == {"index": [1, 1], "a": 4.0, "b": 9.0, "a_bits": "4080", "b_bits": "4110"}
    assert (row["what"], row["differing"], row["a"]["shape"]) == (["values"], 1, [2, 3])
    assert cli("diff", a, a, "--output", "json").json["equal"] is True
    assert cli("diff", a, tmp_path / "none").code == 8
    assert cli("diff", a, b, "--include", "no*").code == 2
    assert cli("diff", a, b, "--memory", "1MiB", "--workers", "9").code == 15


def test_two_steps_are_measured_and_what_changed_most_comes_first(tmp_path: Path, cli: driver.Cli) -> None:
    """Against numpy, in several boxes for each tensor; a frozen tensor is named."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    torch.manual_seed(0)
    names = ("embed_tokens.weight", "layers.0.mlp.up_proj.weight", "layers.1.self_attn.q_proj.weight")
    one = {f"model.{name}": torch.randn(300, 1000) for name in names}
    two = {
        name: tensor + torch.randn(300, 1000) * scale
        for (name, tensor), scale in zip(one.items(), (0, 1, 2), strict=True)
    }
    two["model.layers.1.self_attn.q_proj.weight"][1, 2] = float("nan")
    one |= {"model.half": torch.randn(5000).to(torch.bfloat16), "model.count": torch.arange(4)}
    two |= {"model.half": -one["model.half"], "model.count": torch.arange(1, 5)}
    for step, state in (("a", one), ("b", two)):
        dcp.save(state, checkpoint_id=tmp_path / step, no_dist=True)
    result = ckptcore.diff(tmp_path / "a", tmp_path / "b", settings=Settings(memory=2 << 20, workers=2))
    assert (result.verdict, result.frozen) == ("different", ("model.embed_tokens.weight",))
    for tensor in result.tensors:
        a, b = one[tensor.name].double().flatten(), two[tensor.name].double().flatten()
        kept = torch.isfinite(b)
        a, b = a[kept], b[kept]
        expected = {
            "max_abs": (b - a).abs().max(),
            "mean_abs": (b - a).abs().mean(),
            "max_rel": ((b - a).abs() / torch.maximum(a.abs(), b.abs())).nan_to_num(0).max(),
            "mean_rel": ((b - a).abs() / torch.maximum(a.abs(), b.abs())).nan_to_num(0).mean(),
            "norm_a": a.norm(),
            "norm_b": b.norm(),
            "norm": (b - a).norm(),
            "cosine": a @ b / a.norm() / b.norm(),
            "change": (b - a).norm() / a.norm(),
        }
        assert tensor.measures is not None
        measured = tensor.measures.as_dict()
        assert measured.pop("not_finite") == int((~kept).sum())
        assert measured == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)
    assert [(part.name, part.changed, part.equal) for part in result.parts] == [
        ("attention", 1, 0), ("other", 2, 0), ("mlp", 1, 0), ("embedding", 0, 1),
    ]  # fmt: skip
    assert [layer.name for layer in result.layers] == ["layer 1", "layer 0"]
    text = cli("diff", tmp_path / "a", tmp_path / "b").stdout
    assert "layers, most changed first: 1 (" in text
    assert "equal beside them: model.embed_tokens.weight" in text
    assert text.index("self_attn.q_proj") < text.index("mlp.up_proj")
    save_file({"w": torch.ones(3)}, tmp_path / "c.safetensors")
    same = ckptcore.diff(tmp_path / "c.safetensors", tmp_path / "c.safetensors")
    assert (same.verdict, same.frozen, same.parts) == ("equal", (), ())


def test_a_cast_is_no_other_difference(tmp_path: Path, cli: driver.Cli) -> None:
    import torch
    from safetensors.torch import save_file

    w = {f"layers.{n}.mlp.weight": torch.randn(64, 64) for n in range(3)}
    save_file(w, tmp_path / "a.safetensors")
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        save_file({name: tensor.to(dtype) for name, tensor in w.items()}, tmp_path / "b.safetensors")
        name = str(dtype).removeprefix("torch.")
        for sides in (("a.safetensors", "b.safetensors"), ("b.safetensors", "a.safetensors")):
            found = ckptcore.diff(*(tmp_path / side for side in sides))
            assert (found.verdict, found.equal) == (f"equal after the cast to {name}", False)
            assert [tensor.what for tensor in found.tensors] == [("dtype",)] * 3
    done = cli("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert done.code == 1
    assert "3 tensors: float32 in A, float8_e4m3fn in B, equal after the cast to float8_e4m3fn" in done.stdout
    wrong = {name: tensor.to(torch.bfloat16) for name, tensor in w.items()}
    wrong["layers.1.mlp.weight"][3, 4] += 1
    save_file(wrong, tmp_path / "b.safetensors")
    found = ckptcore.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (moved,) = [tensor for tensor in found.tensors if tensor.has_moved]
    assert (found.verdict, moved.name, moved.what, moved.differing) == (
        "different", "layers.1.mlp.weight", ("dtype", "values"), 1,
    )  # fmt: skip
    assert moved.first is not None
    assert moved.first.index == (3, 4)


def test_products_that_are_infinite_with_both_signs_have_no_cosine(tmp_path: Path) -> None:
    """Each box has one, and their sum is no number: that is in the answer, and no warning of numpy's."""
    huge = np.full((2, 1 << 20), 1e300)
    for name, values in (("a", huge), ("b", huge * [[-1.0], [0.5]])):
        save_file({"w": values}, tmp_path / f"{name}.safetensors")
    result = ckptcore.diff(
        ckptcore.open(str(tmp_path / "a.safetensors")),
        ckptcore.open(str(tmp_path / "b.safetensors")),
        settings=Settings(memory=64 << 20, workers=1),
    )
    (difference,) = result.tensors
    assert difference.measures is not None
    assert difference.measures.cosine is None
