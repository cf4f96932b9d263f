"""Right exports with one thing changed: tensors swapped, rounded, negated; every field of config.json.

transformers is the judge of which fields change what a model computes: the changed folder is opened, and its
logits are others. `verify-export` finds each, by default, with the source at hand; `config_mutations.MISSES`
says which way of verifying finds which kind, and right exports pass.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import config_mutations as mutations  # noqa: E402
from config_mutations import ARGUMENTS, BESIDE, FOUND, KINDS, MISSES, NAMED, REFERENCE, TENSORS  # noqa: E402
from export_sources import WRITERS, Tiny, weights  # noqa: E402
from families import FAMILIES  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import ckptcore  # noqa: E402
from ckptcore.checking.export_proof import CONFIG, ExportProof  # noqa: E402

pytestmark = pytest.mark.usefixtures("asked_here")
Tinies = Callable[[str], Tiny]
# Families whose arguments `megatron_args` writes.
OF_MEGATRON = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3")


def logits(folder: Path, form: dict[str, Any] | None = None) -> torch.Tensor | None:
    """The logits of a folder, with another config; None where transformers does not open all of it."""
    if form is not None:
        (folder / "config.json").write_text(json.dumps(form))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
        except Exception:  # of any config class
            return None
        if any(info.get(f"{k}_keys") for k in ("missing", "unexpected", "mismatched")):
            return None
        ids = torch.randint(3, 40, (2, 14), generator=torch.Generator().manual_seed(0))
        try:
            with torch.inference_mode():
                found: torch.Tensor = model.eval()(input_ids=ids).logits
        except Exception:  # of any model class: half a head, more experts of a token than there are
            return None
    return found


def changing(tiny: Tiny, folder: Path, most: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, config.json) of every changed config with which transformers computes other logits.

    most: changed configs of a kind that it is asked for; None for all.
    """
    shutil.copytree(tiny.hub, folder)
    right = logits(folder)
    assert right is not None
    full = json.loads(transformers.AutoConfig.from_pretrained(tiny.hub).to_json_string(use_diff=False))
    asked: dict[str, int] = defaultdict(int)
    for field, form in mutations.mutants(tiny.config, full):
        asked[mutations.kind_of(field)] += 1
        if most is not None and asked[mutations.kind_of(field)] > most:
            continue
        made = logits(folder, form)
        if made is not None and not (made.shape == right.shape and torch.equal(made, right)):
            yield field, form


def exported(tiny: Tiny, source: Path, target: Path) -> Path:
    options: dict[str, Any] = {"verb": "export", "catalog": False, "config": str(tiny.hub)}
    ckptcore.convert(str(source), str(target), **options)
    return target


def outcome(proof: ExportProof, field: str) -> str:
    """What a proof says to a changed field."""
    if proof.verdict == "failed":
        return FOUND
    found = next(c for c in proof.checks if c.name == CONFIG)
    unsaid = dict(found.values)["unconfirmed"]
    return (
        NAMED if any(field in (f, f.rpartition(".")[2]) or f.startswith(f"{field}.") for f in unsaid) else ""
    )


def try_fields(
    tinies: Tinies, folder: Path, family: str, ways: dict[str, Path], most: int | None = None
) -> dict[str, int]:
    """Every changed field of a family's config, verified in each way; returns the number of each kind.

    most: of a kind that are tried; None for all.
    """
    tiny = tinies(family)
    tried: dict[str, int] = defaultdict(int)
    out = exported(tiny, ways[TENSORS], folder / "out")
    for way, source in ways.items():
        options: dict[str, Any] = {"reference": str(tiny.hub)} if way == REFERENCE else {}
        right = ckptcore.verify_export(str(out), against=str(source), **options)
        assert right.verdict == "ok", (family, way, right.checks)
    for field, form in changing(tiny, folder / "changed", most):
        (out / "config.json").write_text(json.dumps(form))
        kind = mutations.kind_of(field)
        tried[kind] += 1
        for way, source in ways.items():
            options = {"reference": str(tiny.hub)} if way == REFERENCE else {}
            verdict = outcome(ckptcore.verify_export(str(out), against=str(source), **options), field)
            wanted = {FOUND} if kind not in MISSES[way] else {FOUND, NAMED}
            assert verdict in wanted, (family, way, field, form.get(field.partition(".")[0]), verdict)
    return tried


def sources(tiny: Tiny, folder: Path) -> dict[str, Path]:
    """Way of verifying -> source of it."""
    plain = WRITERS["hf-live"](tiny, "one", folder / "plain/step")
    beside = Path(shutil.copytree(plain, folder / "beside/step"))
    shutil.copy(tiny.hub / "config.json", folder / "beside")
    return {BESIDE: beside, TENSORS: plain}


def with_arguments(tiny: Tiny, folder: Path) -> Path:
    source = WRITERS["megatron"](tiny, "layers", folder)
    common = torch.load(source / "common.pt", weights_only=False)
    mutations.megatron_args(tiny.config, common["args"])
    torch.save(common, source / "common.pt")
    return source


def test_fields_of_every_kind_of_llama_are_found(tinies: Tinies, tmp_path: Path) -> None:
    ways = sources(tinies("llama"), tmp_path) | {
        ARGUMENTS: with_arguments(tinies("llama"), tmp_path / "args")
    }
    tried = try_fields(tinies, tmp_path, "llama", ways, most=2)
    assert {"rotary base", "activation", "epsilon of norms"} <= tried.keys()


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_every_family_is_found(tinies: Tinies, tmp_path: Path, family: str) -> None:
    ways = sources(tinies(family), tmp_path)
    tried = try_fields(tinies, tmp_path, family, ways | {REFERENCE: ways[TENSORS]})
    print(f"{family}: {sum(tried.values())} changed configs, {dict(tried)}")
    assert tried


@pytest.mark.soak
@pytest.mark.parametrize("family", OF_MEGATRON[1:])
def test_what_megatron_s_arguments_find(tinies: Tinies, tmp_path: Path, family: str) -> None:
    plain = sources(tinies(family), tmp_path)[TENSORS]
    source = with_arguments(tinies(family), tmp_path / "source")
    assert try_fields(tinies, tmp_path, family, {TENSORS: plain, ARGUMENTS: source})


def swapped(state: dict[str, torch.Tensor]) -> set[str]:
    """Two tensors of one shape."""
    shapes: dict[Any, list[str]] = defaultdict(list)
    for name, tensor in state.items():
        shapes[tensor.shape].append(name)
    one, other, *_ = next(
        names
        for names in shapes.values()
        if len(names) > 1 and not torch.equal(state[names[0]], state[names[1]])
    )
    state[one], state[other] = state[other], state[one]
    return {one, other}


def rounded(state: dict[str, torch.Tensor]) -> set[str]:
    """A tensor, to bfloat16 and back."""
    name = next(n for n, t in state.items() if not torch.equal(t.bfloat16().float(), t))
    state[name] = state[name].bfloat16().float()
    return {name}


def negated(state: dict[str, torch.Tensor]) -> set[str]:
    """One element of a tensor."""
    name = next(n for n, t in reversed(state.items()) if t.flatten()[-1] != 0)
    state[name] = state[name].clone()
    state[name].view(-1)[-1:].neg_()
    return {name}


def shifted(state: dict[str, torch.Tensor]) -> set[str]:
    """The rows of a tensor, by one."""
    name = next(n for n, t in state.items() if t.dim() > 1)
    state[name] = state[name].roll(1, 0).contiguous()
    return {name}


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.soak] if n else []) for n, f in enumerate(FAMILIES)]
)
def test_every_change_of_a_tensor_is_found(tinies: Tinies, tmp_path: Path, family: str) -> None:
    tiny = tinies(family)
    ways = sources(tiny, tmp_path)
    out = exported(tiny, ways[TENSORS], tmp_path / "out")
    for change in (swapped, rounded, negated, shifted):
        state = weights(tiny.hub)
        wrong = change(state)
        for file in out.glob("*.safetensors*"):
            file.unlink()
        save_file(state, out / "model.safetensors", {"format": "pt"})
        proof = ckptcore.verify_export(str(out), against=str(ways[TENSORS]))
        assert {p.name for c in proof.failures for p in c.problems} == wrong, change.__name__


def test_every_kind_has_a_field() -> None:
    assert set().union(*MISSES.values()) <= KINDS.keys()
