"""Wrong maps and wrong folders: every proof fails, and names the tensor.

By default one family for each kind of mistake; in the soak every family and world that can have it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import map_mutations as wrong  # noqa: E402
from export_cells import differing  # noqa: E402
from export_sources import WRITERS, Tiny, weights  # noqa: E402
from families import FAMILIES, FORMS, forms  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import ckptcore  # noqa: E402
from ckptcore.checking.export_proof import ELEMENTS, LOGITS, NAMES, NEAR, REFERENCE, VALUES, ExportProof  # noqa: E402
from ckptcore.errors import NameMismatch  # noqa: E402

pytestmark = pytest.mark.usefixtures("asked_here")
Tinies = Callable[[str], Tiny]
PAIRS = [(f, w) for f, (_, _, worlds) in FAMILIES.items() for w in worlds]


def one_of_each(cases: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first of every kind, of families taken in turn."""
    found: dict[str, tuple[str, ...]] = {}
    for case in cases:
        if case[-1] not in found and case[0] not in {c[0] for c in found.values()}:
            found[case[-1]] = case
    for case in cases:
        found.setdefault(case[-1], case)
    return list(found.values())


@cache  # not when the module is imported, which all tests wait for
def maps() -> list[tuple[str, str, str]]:
    return list(wrong.map_mutants())


def written(tiny: Tiny, source: str, folder: Path, form: str = "") -> str:
    form = form or (forms(tiny.family, source)[0] if source in FORMS else "one")
    return str(WRITERS[source](tiny, form, folder))


def export(source: str, target: Path, tiny: Tiny) -> None:
    ckptcore.convert(source, str(target), verb="export", catalog=False, config=str(tiny.hub))


def named(proof: ExportProof, *checks: str) -> set[str]:
    """The tensors that checks found something wrong with."""
    assert proof.verdict == "failed"
    return {p.name for c in proof.checks if c.name in checks and c.verdict == "failed" for p in c.problems}


def refusal(done: Callable[[], object]) -> set[str]:
    """The tensors that a refusal names; none where nothing is refused."""
    try:
        done()
    except NameMismatch as error:
        names = {str(n) for kind in ("missing", "unexpected", "shapes") for n in error.values.get(kind, ())}
        found = {n for n in names if n in error.message} or set(
            re.findall(r"\w+(?:\.\w+){2,}", error.message)
        )
        if not found:
            raise
        return found
    return set()


def is_found(tiny: Tiny, source: str, folder: Path, mutated: Callable[[], Any]) -> bool:
    """Exports by a wrong map: it is refused by a tensor's name, or every tensor that is wrong is found.

    False where the map is not wrong for this source. Raises AssertionError where the proof misses a tensor.
    """
    out = folder / "out"
    with mutated():
        if refusal(lambda: export(source, out, tiny)):
            assert not out.exists()
            return True
    lost = differing(weights(tiny.hub), weights(out))
    if not lost:
        return False
    assert named(ckptcore.verify_export(str(out), against=source), ELEMENTS, NAMES, VALUES) >= set(lost)
    hub = str(tiny.hub)
    hub = str(tiny.hub)
    with mutated():  # nothing is right but the reference
        proof = ckptcore.verify_export(str(out), against=source, reference=hub, near=hub)
    failed = {c.name for c in proof.checks if c.verdict == "failed"}
    assert named(proof, REFERENCE) == set(lost)
    turned = {n for n in lost if weights(out)[n].dim() > 1}  # norms and biases are all near each other
    assert named(proof, NEAR) >= turned
    assert failed == {REFERENCE, LOGITS, *([NEAR] if turned else [])}
    return True


def try_map(tinies: Tinies, folder: Path, family: str, world: str, kind: str) -> None:
    map_ = wrong.mutant(family, world, kind)
    assert map_ is not None
    tiny = tinies(family)
    for form in forms(family, world):  # a rule may be for one form alone
        (folder / form).mkdir()
        source = written(tiny, world, folder / form / "source", form)
        if is_found(tiny, source, folder / form, lambda: wrong.mapped_by(map_)):
            return
    raise AssertionError("the map is right in every form")


@pytest.mark.alike(4)
@pytest.mark.parametrize("kind", [*wrong.LAYOUTS, *wrong.NAMES])
def test_a_wrong_map_is_found(tinies: Tinies, tmp_path: Path, kind: str) -> None:
    ((family, world, _),) = (case for case in one_of_each(maps()) if case[-1] == kind)
    try_map(tinies, tmp_path, family, world, kind)


@pytest.mark.soak
@pytest.mark.parametrize(("family", "world"), sorted({*PAIRS} - wrong.RENAMES))
def test_every_wrong_map_of_a_family_is_found(
    tinies: Tinies, tmp_path: Path, family: str, world: str
) -> None:
    kinds = [k for f, w, k in maps() if (f, w) == (family, world)]
    assert kinds
    for n, kind in enumerate(kinds):
        (tmp_path / str(n)).mkdir()
        try_map(tinies, tmp_path / str(n), family, world, kind)


def test_every_kind_of_mistake_is_tried() -> None:
    assert {kind for _, _, kind in maps()} == {*wrong.LAYOUTS, *wrong.NAMES}
    assert {(f, w) for f, w, _ in maps()} == {*PAIRS} - wrong.RENAMES


def try_without_each_rule(tinies: Tinies, folder: Path, family: str, world: str) -> None:
    """Without a rule, what it would have taken is left over: refused by name, before anything is written."""
    tiny = tinies(family)
    source = written(tiny, world, folder / "source")
    target, config = str(folder / "out"), str(tiny.hub)
    rules = {made.rule for made in ckptcore.plan(source, target, verb="export", config=config).plan.made}
    assert len(rules) > 3  # gpt_neox: blocks, embedding, final-norm, head
    for rule in rules:
        with wrong.mapped_by(wrong.without(family, world, rule)):
            assert refusal(lambda: ckptcore.plan(source, target, verb="export", config=config)), rule


def test_a_map_without_a_rule_is_refused(tinies: Tinies, tmp_path: Path) -> None:
    try_without_each_rule(tinies, tmp_path, "qwen3", "torchtitan")


@pytest.mark.soak
@pytest.mark.parametrize(("family", "world"), PAIRS)
def test_every_map_without_a_rule_is_refused(tinies: Tinies, tmp_path: Path, family: str, world: str) -> None:
    try_without_each_rule(tinies, tmp_path, family, world)


def fused() -> list[str]:
    """Families whose live module has gate and up of all experts in one tensor."""
    return [f for f, (_, config, _) in FAMILIES.items() if any("experts" in k for k in config)]


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.soak] if n else []) for n, f in enumerate(fused())]
)
def test_experts_of_a_module_the_wrong_way_round_are_found(
    tinies: Tinies, tmp_path: Path, family: str
) -> None:
    tiny = tinies(family)
    source = written(tiny, "hf-live", tmp_path / "source")
    # Else files have the module's own tensors, or experts have no gate.
    apart = any(re.search(r"experts\.\d+\.(gate_proj|w3)\.", n) for n in tiny.state)
    assert is_found(tiny, source, tmp_path, lambda: wrong.live_mapped_by(wrong.turned)) is apart


def try_folder(tinies: Tinies, folder: Path, family: str, kinds: Iterable[str] | None = None) -> int:
    """An export, damaged in each way: its proof names what is damaged, and nothing else."""
    tiny = tinies(family)
    world = next((w for w in FAMILIES[family][2]), "hf-live")
    source = written(tiny, world, folder / "source")
    export(source, folder / "right", tiny)
    tried = 0
    for kind in kinds or wrong.DAMAGES:
        state, out = tiny.state, folder / f"damaged-{tried}"
        damaged = wrong.DAMAGES[kind](tiny.config, state)
        if not damaged:
            continue
        tried += 1
        shutil.copytree(folder / "right", out)
        for file in out.glob("*.safetensors*"):
            file.unlink()
        save_file(wrong.contiguous(state), out / "model.safetensors", {"format": "pt"})
        proof = ckptcore.verify_export(str(out), against=source)
        assert named(proof, ELEMENTS, NAMES, VALUES) == damaged, kind
    return tried


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gpt_oss", "gate and up swapped"),
        ("qwen2", "q and k swapped"),
        ("qwen3", "groups of heads in another order"),
        ("llama", "rotary pairs not permuted"),
        ("mixtral", "experts shifted by one"),
        ("gemma2", "a tensor lost"),
    ],
)
def test_a_damaged_folder_is_found(tinies: Tinies, tmp_path: Path, family: str, kind: str) -> None:
    assert try_folder(tinies, tmp_path, family, [kind]) == 1


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_damage_to_a_familys_folder_is_found(tinies: Tinies, tmp_path: Path, family: str) -> None:
    assert try_folder(tinies, tmp_path, family) > 0
