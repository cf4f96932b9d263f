"""GPT-NeoX on tensor-parallel ranks: cuts, biases and norms as its own converter joins them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate

Tensors = dict[str, torch.Tensor]
WIDTH, INNER, VOCABULARY, BLOCKS = 8, 32, 32, 2
NAMES = {  # set of names -> of a block's linear layers: query, out, first and second of the MLP
    "dense": ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
    "linear": ("attention.query_key_value", "attention.dense", "mlp.linear1", "mlp.linear2"),
}


@pytest.fixture(autouse=True)
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def ranks(
    tp: int, names: str = "dense", *, residual: bool = False, drift: bool = False, gated: bool = False
) -> tuple[Tensors, list[Tensors]]:
    """Return a model as the converter joins it, and each rank's part."""
    torch.manual_seed(3)
    full: Tensors = {}
    parts: list[Tensors] = [{} for _ in range(tp)]

    def add(name: str, tensor: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        full[name] = tensor
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece.clone()

    def norm(name: str) -> None:
        copies = [drawn(WIDTH) for _ in range(tp)] if drift else [drawn(WIDTH)] * tp
        add(name, sum(copies[1:], copies[0]) / tp, copies)

    def bias(name: str) -> None:
        copies = [drawn(WIDTH) for _ in range(tp)] if residual else [drawn(WIDTH)] * tp
        add(name, sum(copies[1:], copies[0]) if residual else copies[0], copies)

    def rows(name: str, tensor: torch.Tensor, halves: int = 1) -> None:
        cut = [half.chunk(tp) for half in tensor.chunk(halves)]
        add(name, tensor, [torch.cat([half[r] for half in cut]) for r in range(tp)])

    rows("0.word_embeddings.weight", drawn(VOCABULARY, WIDTH))
    query, out, first, second = NAMES[names]
    for n in range(2, 2 + BLOCKS):
        norm(f"{n}.input_layernorm.weight")
        rows(f"{n}.{query}.weight", drawn(3 * WIDTH, WIDTH))
        rows(f"{n}.{query}.bias", drawn(3 * WIDTH))
        for name, width in ((out, WIDTH), (second, INNER)):
            weight = drawn(WIDTH, width)
            add(f"{n}.{name}.weight", weight, list(weight.chunk(tp, 1)))
            bias(f"{n}.{name}.bias")
        rows(f"{n}.{first}.weight", drawn((1 + gated) * INNER, WIDTH), 1 + gated)
        add(f"{n}.attention.rotary_emb.inv_freq", torch.ones(2), [torch.ones(2)] * tp)
    norm(f"{BLOCKS + 3}.norm.weight")
    rows(f"{BLOCKS + 4}.final_linear.weight", drawn(VOCABULARY, WIDTH))
    return full, parts


def save(
    folder: Path, parts: list[Tensors], residual: bool | None = False, *, sequential: bool = False
) -> None:
    """Write a step as GPT-NeoX does; ``residual`` is the flag of configs/, which None leaves out."""
    folder.mkdir(parents=True)
    tp = len(parts)
    for rank, part in enumerate(parts):
        module = {f"sequential.{n}": t for n, t in part.items()} if sequential else None
        state = {"module": module, "mp_world_size": tp, "dp_world_size": 1, "global_steps": 4}
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
        for layer in () if sequential else sorted({name.split(".")[0] for name in part}):
            own = {n.partition(".")[2]: t for n, t in part.items() if n.startswith(f"{layer}.")}
            torch.save(own, folder / f"layer_{int(layer):02d}-model_{rank:02d}-model_states.pt")
    if residual is not None:
        (folder / "configs").mkdir()
        flag = str(residual).lower()
        (folder / "configs/small.yml").write_text(f'"gpt-j-residual": {flag}\n"model-parallel-size": {tp}\n')


def codes(folder: Path) -> set[str]:
    found = validate(ckptcore.open(str(folder)), "bytes").findings
    return {f.code for f in found if f.severity == "error"}


def joined(folder: Path) -> Tensors | None:
    """Return what `consolidate` makes, None where it ends with another code than 0."""
    out = folder.parent / "out.safetensors"
    out.unlink(missing_ok=True)
    if run(["consolidate", str(folder), str(out)]) != 0:
        assert not out.exists()
        return None
    return {name.removeprefix("module."): value for name, value in load_file(out).items()}


def equal(one: Tensors | None, other: Tensors) -> bool:
    return one is not None and one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(("tp", "residual", "drift"), [(2, False, False), (2, True, False), (4, True, True)])
def test_biases_and_norms(tp: int, residual: bool, drift: bool, tmp_path: Path) -> None:
    """Sums and means are those of torch in the stored dtype, rank after rank."""
    full, parts = ranks(tp, residual=residual, drift=drift)
    save(tmp_path / "step", parts, residual)
    assert not codes(tmp_path / "step")
    assert equal(joined(tmp_path / "step"), full)
    found = {f.code for f in ckptcore.open(str(tmp_path / "step")).findings}
    assert ("averaged-copies" in found) == drift


@pytest.mark.parametrize("gated", [False, True])
def test_newer_names(gated: bool, tmp_path: Path) -> None:
    full, parts = ranks(2, "linear", gated=gated)
    save(tmp_path / "step", parts)
    assert equal(joined(tmp_path / "step"), full)


def test_without_a_pipeline(tmp_path: Path) -> None:
    full, parts = ranks(2)
    save(tmp_path / "step", parts, sequential=True)
    assert equal(joined(tmp_path / "step"), {f"sequential.{n}": t for n, t in full.items()})


def test_nothing_says_what_biases_are(tmp_path: Path) -> None:
    """Equal biases are copies or summands."""
    _, parts = ranks(2)
    save(tmp_path / "step", parts, None)
    assert codes(tmp_path / "step") == {"unmerged-tensor", "unreadable-part"}
    assert joined(tmp_path / "step") is None


def test_biases_that_differ_without_the_flag(tmp_path: Path) -> None:
    _, parts = ranks(2, residual=True)
    save(tmp_path / "step", parts, False)
    assert codes(tmp_path / "step") == {"replica-mismatch"}
    assert joined(tmp_path / "step") is None


def test_norms_of_one_block_differ(tmp_path: Path) -> None:
    """A layer's file is of another save: no mean hides it."""
    _, parts = ranks(2)
    parts[1]["2.input_layernorm.weight"] += 1
    save(tmp_path / "step", parts)
    assert codes(tmp_path / "step") == {"replica-mismatch"}


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def test_every_file_is_needed(tmp_path: Path) -> None:
    _, parts = ranks(2)
    save(tmp_path / "all", parts)
    for number, path in enumerate(sorted((tmp_path / "all").glob("*.pt"))):
        folder = tmp_path / path.stem
        shutil.copytree(tmp_path / "all", folder)
        (Path.unlink if number % 4 else _cut)(folder / path.name)
        assert joined(folder) is None, path.name


@pytest.mark.parametrize(("layer", "tp"), [("00", 1), ("02", 2), ("03", 1), ("05", 2)])
def test_a_layer_of_all_ranks(layer: str, tp: int, tmp_path: Path) -> None:
    _, parts = ranks(tp)
    save(tmp_path / "step", parts)
    for path in (tmp_path / "step").glob(f"layer_{layer}-*"):
        path.unlink()
    assert "hole" in codes(tmp_path / "step")
    assert joined(tmp_path / "step") is None


@pytest.mark.parametrize(("setting", "lost"), [("no-weight-tying: true", 6), ("num_layers: 3", None)])
def test_what_settings_say_is_needed(setting: str, lost: int | None, tmp_path: Path) -> None:
    """Embeddings may be tied, and a model may end where its last files do: settings decide."""
    _, parts = ranks(2)
    save(tmp_path / "step", parts)
    for path in (tmp_path / "step").glob(f"layer_{lost or 99:02d}-*"):
        path.unlink()
    assert not codes(tmp_path / "step")
    with (tmp_path / "step/configs/small.yml").open("a") as settings:
        settings.write(f"{setting}\n")
    assert codes(tmp_path / "step") == {"hole"}


def test_a_tensor_of_all_ranks(tmp_path: Path) -> None:
    _, parts = ranks(2)
    for part in parts:
        del part["3.attention.dense.weight"]
    save(tmp_path / "step", parts)
    assert codes(tmp_path / "step") == {"hole"}
    assert joined(tmp_path / "step") is None
