"""A weighted average of checkpoints: bit-equal to torch in the stated order, or refused by name."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from fault_s3 import Stored, serving
from paths import FIXTURES
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.checking.export_proof import VALUES
from ckptcore.errors import (
    CkptError,
    DamagedCheckpoint,
    NameMismatch,
    SourceChanged,
    SourceUnreadable,
    UnsupportedDtype,
    UsageError,
)
from ckptcore.planning.request import Settings
from ckptcore.utils.average_url import average_url, decaying

State = dict[str, torch.Tensor]
NAMES = {"up.weight": (37, 15), "up.bias": (37,), "norm.weight": (15,), "gain": ()}

RULES = '[[rule]]\nfqn = "*"\n'


def state(seed: int, dtype: torch.dtype = torch.float32, **more: torch.Tensor) -> State:
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in NAMES.items()}
    return {**tensors, "steps": torch.tensor([seed, 7]), "mask": torch.tensor([True, bool(seed % 2)]), **more}


def saved(folder: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """A hub folder of these tensors."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def reference(states: Sequence[State], weights: Sequence[float]) -> State:
    """The average in the stated order: products and sums are rounded to float32; the rest is the last's."""
    shares = [torch.tensor(weight / sum(weights), dtype=torch.float32) for weight in weights]
    total = dict(states[-1])
    for name in (n for n, tensor in total.items() if tensor.is_floating_point()):
        parts = [each[name].float() * share for each, share in zip(states, shares, strict=True)]
        total[name] = parts[0]
        for part in parts[1:]:
            total[name] = total[name] + part
    return total


def merged(sources: Sequence[str], target: Path, **options: Any) -> ckptcore.Result:
    return ckptcore.merge(sources, target, catalog=False, **options)


def require_bits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            name
        )


@pytest.fixture(scope="module")
def deepspeed(request: pytest.FixtureRequest) -> Path:
    corpus = samples.unpack(
        request.config.rootpath / ".pytest_cache" / "samples", FIXTURES / "deepspeed.tar.zst"
    )
    return corpus / "z2_bf16_ws4"


@pytest.fixture(scope="module")
def series(deepspeed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[State]]:
    """Three steps: DeepSpeed's own save, and two DCP folders of other meshes, one in bfloat16."""
    root = tmp_path_factory.mktemp("series")
    full = load_file(deepspeed / "expected.safetensors")
    stored = {t.fqn for t in ckptcore.open(str(deepspeed / "ckpt")).tensors}
    first = {n.removeprefix("module."): t for n, t in full.items() if n in stored and n.startswith("module.")}
    assert "step_count" in first  # an integer
    assert any(t.is_floating_point() for t in first.values())
    states, places = [first], [str(deepspeed / "ckpt")]
    for number, (mesh, dtype) in enumerate((("fsdp=3", torch.bfloat16), ("fsdp=2", torch.float32)), 1):
        torch.manual_seed(number)
        later = {
            n: (t + torch.randn_like(t) / 8).to(dtype) if t.is_floating_point() else t + number
            for n, t in first.items()
        }
        flat = root / f"flat-{number}"
        saved(flat, {f"model.{name}": tensor for name, tensor in later.items()})
        ckptcore.convert(
            flat, root / f"step-{number}", verb="reshard", mesh=mesh, sharding=RULES, catalog=False
        )
        states.append(later)
        places.append(str(root / f"step-{number}"))
    return places, states


@pytest.mark.parametrize(
    ("workers", "memory"), [(1, 1 << 30), (1, 1 << 20), (4, 4 << 20)], ids=["one", "small", "four"]
)
def test_bits_are_those_of_torch(
    series: tuple[list[str], list[State]], workers: int, memory: int, tmp_path: Path
) -> None:
    """Formats, meshes and dtypes differ, and tiles and workers change nothing."""
    places, states = series
    settings = Settings(memory=memory, workers=workers)
    merged(places, tmp_path / "out.safetensors", weights=(1, 2, 5), settings=settings)
    wanted = {f"model.{name}": tensor for name, tensor in reference(states, (1, 2, 5)).items()}
    require_bits(load_file(tmp_path / "out.safetensors"), wanted)


def test_other_outputs(series: tuple[list[str], list[State]], tmp_path: Path) -> None:
    """A hub folder in bfloat16 is rounded once, from float32; a mesh has the values of one file."""
    places, states = series
    decay = 0.75
    merged(places, tmp_path / "hub", decay=decay, verb="export", dtype="bf16")
    wanted = {
        f"model.{name}": tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in reference(states, decaying(decay, 3)).items()
    }
    require_bits(load_file(tmp_path / "hub" / "model.safetensors"), wanted)
    merged(places, tmp_path / "ranks", decay=decay, verb="reshard", mesh="fsdp=2", sharding=RULES)
    url = average_url(places, decaying(decay, 3))
    assert ckptcore.diff(url, tmp_path / "ranks").equal
    proof = ckptcore.verify_export(tmp_path / "hub", against=url, catalog=False, dtype="bf16")
    assert {check.name: check.verdict for check in proof.checks}[VALUES] == "ok"
    changed = load_file(tmp_path / "hub" / "model.safetensors")
    next(t for t in changed.values() if t.is_floating_point()).view(-1)[0] += 1
    save_file(changed, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    proof = ckptcore.verify_export(tmp_path / "hub", against=url, catalog=False, dtype="bf16")
    assert {check.name: check.verdict for check in proof.checks}[VALUES] == "failed"


def test_dtype_of_the_output(tmp_path: Path) -> None:
    """Inputs of one dtype give that dtype, and two give the float32 of the sum; float64 is summed as such."""
    for dtype, other, wanted in (
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.bfloat16, torch.float64),
    ):
        folder = tmp_path / f"{dtype}-{other}"
        places = [saved(folder / "a", state(1, dtype)), saved(folder / "b", state(2, other))]
        merged(places, folder / "out.safetensors")
        found = load_file(folder / "out.safetensors")
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        exact = (
            state(1, dtype)["up.weight"].to(wide) * 0.5 + state(2, other)["up.weight"].to(wide) * 0.5
        ).to(wanted)
        assert torch.equal(found["up.weight"], exact)
        merged(places, folder / "wide.safetensors", dtype="fp32")
        assert load_file(folder / "wide.safetensors")["up.weight"].dtype == torch.float32


def test_what_is_not_averaged(tmp_path: Path) -> None:
    """Integers and objects are the last input's, and said; the optimizer is left out, and said."""
    places = []
    for number in (1, 2):
        tensors = state(number)
        adam = {
            "state": {0: {"exp_avg": tensors["up.weight"] + 1}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        }
        torch.save({"model": tensors, "optimizer": adam, "epoch": number}, tmp_path / f"{number}.pt")
        places.append(str(tmp_path / f"{number}.pt"))
    result = merged(places, tmp_path / "out.pt")
    notes = {found.code: found.message for found in result.warnings}
    assert "model.steps" in notes["of-last-input"]
    assert "differ in another input" in notes["of-last-input"]
    assert "1 tensor" in notes["left-out"] or "2 tensors" in notes["left-out"]
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.pop("epoch") == 2
    wanted = {f"model.{name}": t for name, t in reference([state(1), state(2)], (1, 1)).items()}
    require_bits(loaded, wanted)


def _ties(folder: Path, other: torch.Tensor | None = None) -> list[str]:
    embed = torch.randn(8, 4)
    tied = saved(folder / "tied", {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone()})
    two = {"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone() if other is None else other}
    return [saved(folder / "other", two), tied]


def test_ties_hold_in_every_input(tmp_path: Path) -> None:
    """A tie is stored once, and each input's own tie is checked: of tensors that differ it is refused."""
    tie = {"lm_head.weight": "model.embed_tokens.weight"}
    merged(_ties(tmp_path / "right"), tmp_path / "out.safetensors", tie=tie)
    assert sorted(load_file(tmp_path / "out.safetensors")) == ["model.embed_tokens.weight"]
    for number, settings in enumerate((Settings(), Settings(workers=1, memory=1 << 20))):
        places = _ties(tmp_path / f"wrong-{number}", torch.randn(8, 4))
        with pytest.raises(NameMismatch, match="tied"):
            merged(places, tmp_path / f"no-{number}.safetensors", tie=tie, settings=settings)
        assert not (tmp_path / f"no-{number}.safetensors").exists()


REFUSED: dict[str, tuple[Callable[[State], State], type[CkptError], str]] = {
    "a name": (lambda s: {k.replace("gain", "other"): t for k, t in s.items()}, NameMismatch, "gain"),
    "a tensor more": (lambda s: {**s, "head.weight": torch.ones(2)}, NameMismatch, "head.weight"),
    "a tie": (lambda s: {k: t for k, t in s.items() if k != "gain"}, NameMismatch, "gain"),
    "a shape": (lambda s: {**s, "up.bias": torch.ones(38)}, NameMismatch, "up.bias"),
    "integers": (lambda s: {**s, "up.bias": torch.ones(37, dtype=torch.int32)}, NameMismatch, "up.bias"),
    "float8": (lambda s: {**s, "up.bias": s["up.bias"].to(torch.float8_e4m3fn)}, UnsupportedDtype, "up.bias"),
    "complex": (lambda s: {**s, "up.bias": s["up.bias"].to(torch.complex64)}, UnsupportedDtype, "up.bias"),
    "quantised": (
        lambda s: {
            **s,
            "up.weight": s["up.weight"].to(torch.float8_e4m3fn),
            "up.weight_scale_inv": torch.ones(1, 1),
        },
        UsageError,
        "up.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("place", [0, 1], ids=["first", "last"])
def test_refused_by_name(case: str, place: int, tmp_path: Path) -> None:
    change, error, name = REFUSED[case]
    states = [state(1), state(2)]
    states[place] = change(states[place])
    places = [saved(tmp_path / str(n), each) for n, each in enumerate(states)]
    with pytest.raises(error, match=name.replace(".", r"\.")):
        merged(places, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (1, {}, "at least two"),
        (2, {"weights": (1,)}, "one number for each"),
        (2, {"weights": (1, 2, 3)}, "one number for each"),
        (2, {"weights": (1, float("inf"))}, "finite"),
        (2, {"weights": (1, float("nan"))}, "finite"),
        (2, {"weights": (1, -1)}, "sum to zero"),
        (2, {"weights": (1e308, 1e308)}, "sum to zero"),
        (2, {"decay": 1.0}, "between 0 and 1"),
        (2, {"weights": (1, 1), "decay": 0.5}, "both say"),
    ],
)
def test_weights_are_refused(inputs: int, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Before any work: the inputs do not even exist."""
    with pytest.raises(UsageError, match=message):
        merged([str(tmp_path / str(n)) for n in range(inputs)], tmp_path / "out", **options)


def test_damage_in_any_input_is_found(series: tuple[list[str], list[State]], tmp_path: Path) -> None:
    """A bit of a weight, and half a file, of every input."""
    places, _ = series
    for number, place in enumerate(places):
        copy = tmp_path / str(number) / Path(place).name
        shutil.copytree(place, copy)
        several = [*places[:number], str(copy), *places[number + 1 :]]
        manifest = ckptcore.open(copy)
        row = next(n for n, t in enumerate(manifest.tensors) if t.fqn.endswith("blocks.1.up.weight"))
        item = manifest.items[next(manifest.chunks_of(row)).item]
        data = copy / manifest.files[item.file].path
        complete = data.read_bytes()
        flipped = bytearray(complete)
        flipped[item.start + item.length // 2] ^= 4
        for damaged in (complete[: len(complete) // 2], bytes(flipped)):
            data.write_bytes(damaged)
            with pytest.raises((DamagedCheckpoint, SourceUnreadable)):
                merged(several, tmp_path / "out.safetensors")
            assert not (tmp_path / "out.safetensors").exists()


def test_an_input_that_changes_is_found(tmp_path: Path) -> None:
    places = [saved(tmp_path / str(n), state(n)) for n in range(2)]
    url = average_url(places, (1, 1))
    prepared = ckptcore.prepare(url, tmp_path / "out")
    save_file(state(9), Path(places[0]) / "model.safetensors")
    with pytest.raises(SourceChanged):
        ckptcore.execute(prepared)


def test_maps_of_names_apply_to_every_input(asked_here: None, tmp_path: Path) -> None:
    """Exporting the average of a trainer's checkpoints is averaging their exports."""
    from trainer_names import hub_model, torchtitan

    config, hub = hub_model("llama")
    states, places = [], []
    for number in range(2):
        torch.manual_seed(number)
        changed = {
            n: (t + torch.randn_like(t) / 4).to((torch.float32, torch.bfloat16)[number])
            for n, t in hub.items()
        }
        states.append(changed)
        places.append(saved(tmp_path / str(number), torchtitan(config, changed, "linear")))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config, default=str))
    merged(places, tmp_path / "out", weights=(3, 1), verb="export", config=str(tmp_path / "config"))
    require_bits(load_file(tmp_path / "out" / "model.safetensors"), reference(states, (3, 1)))


def test_inputs_on_an_object_store(series: tuple[list[str], list[State]], tmp_path: Path) -> None:
    """One input on S3 and one here give what both give here."""
    places, states = series
    with serving() as server:
        for file in (path for path in Path(places[1]).rglob("*") if path.is_file()):
            data = file.read_bytes()
            crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
            key = f"b/run/step-1/{file.relative_to(places[1])}"
            server.objects[key] = Stored(data, hashlib.md5(data).hexdigest(), crc32=crc)
        merged([places[0], "s3://b/run/step-1", places[2]], tmp_path / "out.safetensors")
    wanted = {f"model.{name}": tensor for name, tensor in reference(states, (1, 1, 1)).items()}
    require_bits(load_file(tmp_path / "out.safetensors"), wanted)
