"""What an export drops: only what changes nothing, and exactly as much as a rule says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

from export_sources import WRITERS, Tiny  # noqa: E402
from trainer_names import WORLDS, State  # noqa: E402

import ckptcore  # noqa: E402
from ckptcore.checking.export_proof import Check  # noqa: E402
from ckptcore.comparison import export_sides as module  # noqa: E402
from ckptcore.errors import NameMismatch  # noqa: E402

pytestmark = pytest.mark.usefixtures("asked_here")
Tinies = Callable[[str], Tiny]
# (family, world, form, name of what is added to the scores that choose experts).
BIASES = [
    ("qwen3_moe", "torchtitan", "old", "layers.{}.moe.expert_bias"),
    ("qwen3_moe", "torchtitan", "linear", "layers.{}.moe.expert_bias_E"),
    ("gpt_oss", "torchtitan", "old", "layers.{}.moe.expert_bias"),
    ("olmoe", "olmo_core", "dropless", "blocks.{}.feed_forward_moe.router.score_bias"),
]


def biased(tiny: Tiny, world: str, form: str, bias: State, folder: Path) -> str:
    state = {n: t.contiguous() for n, t in WORLDS[world][0](tiny.config, tiny.state, form).items()}
    dcp.save({"model": state | bias}, checkpoint_id=folder, no_dist=True)
    return str(folder)


def export(source: str, target: Path, tiny: Tiny, **options: Any) -> Any:
    options = {"config": str(tiny.hub), **options}
    return ckptcore.convert(source, str(target), verb="export", catalog=False, **options)


def elements(export: Path, source: str) -> Check:
    proof = ckptcore.verify_export(str(export), against=source)
    return next(c for c in proof.checks if c.name == "elements")


@pytest.mark.alike(4)
@pytest.mark.parametrize(("family", "world", "form", "name"), BIASES)
@pytest.mark.parametrize("value", [1e-45, float("nan"), -0.0])
def test_a_bias_that_chooses_experts_is_not_dropped_silently(
    tinies: Tinies, tmp_path: Path, family: str, world: str, form: str, name: str, value: float
) -> None:
    """The hub's model of the family has no place for it, and would route otherwise."""
    tiny = tinies(family)
    bias = {name.format(n): torch.zeros(4) for n in range(tiny.config["num_hidden_layers"])}
    bias[name.format(1)][2] = value
    source = biased(tiny, world, form, bias, tmp_path / "source")
    if value == 0:
        export(source, tmp_path / "out", tiny)
        assert elements(tmp_path / "out", source).verdict == "ok"
        return
    with pytest.raises(NameMismatch) as error:
        export(source, tmp_path / "out", tiny)
    stored = f"model.{name.format(1)}"
    assert f"{stored} (1 of 4 elements)" in error.value.message
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    glob = stored.replace("1", "*")
    assert glob in error.value.hint
    result = export(source, tmp_path / "out", tiny, exclude=[glob])
    assert result


def test_a_bias_goes_on_where_the_hub_has_a_place_for_it(tinies: Tinies, tmp_path: Path) -> None:
    tiny = tinies("deepseek_v3")
    assert any(t.any() for n, t in tiny.state.items() if n.endswith("e_score_correction_bias"))
    source = str(WRITERS["torchtitan"](tiny, "old", tmp_path / "source"))
    export(source, tmp_path / "out", tiny)
    assert elements(tmp_path / "out", source).verdict == "ok"


def test_a_bias_that_an_earlier_version_dropped_fails_the_proof(tinies: Tinies, tmp_path: Path) -> None:
    tiny, bias = tinies("qwen3_moe"), {"layers.0.moe.expert_bias": torch.zeros(4)}
    source = biased(tiny, "torchtitan", "old", bias, tmp_path / "zero")
    export(source, tmp_path / "out", tiny)
    bias["layers.0.moe.expert_bias"][:] = 1
    found = elements(tmp_path / "out", biased(tiny, "torchtitan", "old", bias, tmp_path / "source"))
    assert (found.verdict, [p.name for p in found.problems]) == ("failed", ["model.layers.0.moe.expert_bias"])
    assert "4 of its 4 elements" in found.summary


@pytest.mark.parametrize("more", [-1, 1])
def test_padding_that_is_dropped_is_counted(
    tinies: Tinies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """A rule for padding does not excuse any other element of the tensor."""
    tiny = tinies("llama")
    source = biased(tiny, "megatron", "layers", {}, tmp_path / "source")
    name = "embedding.word_embeddings.weight"
    state = {n: t.contiguous() for n, t in WORLDS["megatron"][0](tiny.config, tiny.state, "layers").items()}
    rows, hidden = state[name].shape
    state[name] = torch.cat([state[name], torch.ones(8, hidden)])
    dcp.save({"model": state}, checkpoint_id=tmp_path / "padded", no_dist=True)
    source = str(tmp_path / "padded")
    export(source, tmp_path / "out", tiny)
    assert elements(tmp_path / "out", source).verdict == "ok"
    right = module.map_export

    def other(*given: Any) -> Any:
        found = right(*given)
        parts = [d for d in found.mapped.dropped if d.part is not None]
        count = (rows + 8 - tiny.config["vocab_size"]) * hidden
        assert {d.part for d in parts if d.fqn == f"model.{name}"} == {count}
        dropped = tuple(d if d.part is None else replace(d, part=d.part + more) for d in found.mapped.dropped)
        return replace(found, mapped=replace(found.mapped, dropped=dropped))

    monkeypatch.setattr(module, "map_export", other)
    found = elements(tmp_path / "out", source)
    assert found.verdict == "failed"
    assert f"model.{name}" in {p.name for p in found.problems}


def test_padding_of_which_two_copies_are_stored_is_counted_once(tmp_path: Path, tinies: Tinies) -> None:
    from ckptcore.comparison.element_use import element_use
    from ckptcore.planning.compose import map_export
    from ckptcore.planning.request import Request

    tiny = tinies("llama")
    source = biased(tiny, "megatron", "layers", {}, tmp_path / "source")
    manifest = ckptcore.open(source)
    row, chunks = manifest.index["model.embedding.word_embeddings.weight"], manifest.chunks
    at = int(chunks.first[row])
    rows_twice = [*range(at + 1), *range(at, len(chunks))]
    first = chunks.first.copy()
    first[row + 1 :] += 1
    twice = replace(
        chunks, first=first, **{k: getattr(chunks, k)[rows_twice] for k in ("lo", "shape", "item")}
    )
    manifest = replace(manifest, chunks=twice)
    mapped = map_export(Request(source, "-", verb="export", config=str(tiny.hub)), manifest).mapped
    gone = {d.fqn for d in mapped.dropped if d.part is None}
    use = element_use(manifest, mapped.manifest, {t.fqn for t in manifest.tensors if t.fqn not in gone})
    parts = {d.fqn: d.part for d in mapped.dropped if d.part}
    assert parts
    assert {n: use.once[n] for n in parts} == parts
