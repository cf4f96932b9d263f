"""The table of exports by family and source (docs/reference/families.md): every cell is true.

By default one export of every family, with every source in all its forms among them; all of them in the soak.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

transformers: Any = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("peft")

import export_results  # noqa: E402
import transformers_job  # noqa: E402
from export_cells import differing, observe, require_declared  # noqa: E402
from export_results import LACKING_4, LOGITS, SOURCES, TENSORS, Cell, Result, cells, declared, short  # noqa: E402
from export_sources import Tiny, weights  # noqa: E402
from families import FAMILIES, FORMS, forms  # noqa: E402
from older_transformers import Older  # noqa: E402
from trainer_names import WORLDS  # noqa: E402

import ckptcore  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("asked_here"),
    pytest.mark.filterwarnings(  # of peft, about transformers and adapters
        "ignore::UserWarning",
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning",
    ),
]
Tinies = Callable[[str], Tiny]


def run(cell: Cell, tinies: Tinies, folder: Path) -> Result:
    return observe(cell, tinies, folder, transformers_job.compare)


@pytest.mark.parametrize("cell", short(), ids=str)
def test_an_export_is_what_the_table_says(tinies: Tinies, tmp_path: Path, cell: Cell) -> None:
    require_declared(cell, run(cell, tinies, tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_4_opens_every_export_of_a_family(older: Older, tmp_path: Path, family: str) -> None:
    """Of what its own `save_pretrained` wrote; the live modules are those of version 5, and its own."""
    made: dict[str, Tiny] = {}

    def tiny(name: str) -> Tiny:
        if name not in made:
            hub, live = tmp_path / name / "hub", tmp_path / name / "live"
            assert older.ask(make=name, hub=str(hub), live=str(live)) == ""
            made[name] = Tiny(name, hub)
        return made[name]

    if family in LACKING_4:
        reply = older.ask(make=family, hub=str(tmp_path / "hub"), live=str(tmp_path / "live"))
        assert reply.startswith("no model type")
        return
    for cell in [c for c in cells() if c.family == family]:
        require_declared(cell, observe(cell, tiny, tmp_path / f"{cell.source}-{cell.form}", older.compare))
    hub, out = tiny(family).hub, tmp_path / "out"
    ckptcore.convert(str(hub.parent / "live"), str(out), verb="export", catalog=False, config=str(hub))
    assert differing(weights(hub), weights(out)) == []
    assert older.compare(hub, out, None) == ""


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_every_export_of_a_family(tinies: Tinies, tmp_path: Path, family: str) -> None:
    for cell in cells():
        if cell.family == family:
            require_declared(cell, run(cell, tinies, tmp_path / f"{cell.source}-{cell.form}"))


def test_the_short_form_has_every_family_source_and_form() -> None:
    able = [c for c in short() if declared(c.family, c.source).level != "refused"]
    assert {c.family for c in able} == FAMILIES.keys()
    assert {(c.source, c.form) for c in able if c.source in FORMS} == {
        (w, form) for f, (_, _, worlds) in FAMILIES.items() for w in worlds for form in forms(f, w)
    }
    assert {c.source for c in able} == SOURCES.keys()
    assert {(c.family, c.source) for c in cells()} == {(f, s) for f in FAMILIES for s in SOURCES}


@pytest.mark.parametrize(
    ("family", "source", "claimed"),
    [("qwen2", "torchtitan", LOGITS), ("llama", "hf-hub", TENSORS), ("llama", "hf-hub", "refused")],
)
def test_a_table_that_says_something_else_fails(
    monkeypatch: pytest.MonkeyPatch, tinies: Tinies, tmp_path: Path, family: str, source: str, claimed: str
) -> None:
    cell = next(c for c in cells() if (c.family, c.source) == (family, source))
    found = run(cell, tinies, tmp_path)
    require_declared(cell, found)
    monkeypatch.setitem(export_results._OTHERWISE, (family, source), Result(claimed))
    with pytest.raises(AssertionError, match="the table says"):
        require_declared(cell, found)


def test_an_export_that_differs_is_no_result(
    monkeypatch: pytest.MonkeyPatch, tinies: Tinies, tmp_path: Path
) -> None:
    """One tensor of the source is another one: names and shapes are right, and the cell fails by its name."""
    import export_sources

    def changed(tiny: Tiny, world: str, form: str) -> Any:
        state = WORLDS[world][0](tiny.config, tiny.state, form)
        state["layers.1.feed_forward.w2.weight"] = state["layers.1.feed_forward.w2.weight"] + 1
        return {n: t.contiguous() for n, t in state.items()}

    monkeypatch.setattr(export_sources, "_named", changed)
    with pytest.raises(AssertionError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        run(Cell("llama", "torchtitan", "old"), tinies, tmp_path)
