"""Test that a lost catalog is restored as far as the data allows, and no further."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ckptcore import Settings, api
from ckptcore.catalog import open_catalog
from ckptcore.errors import SourceUnreadable
from ckptcore.operations.rebuild_catalog import rebuild
from ckptcore.planning.model_card import provenance


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of three steps, one of them damaged, two exports of it, and other files."""
    import torch
    from torch.distributed import checkpoint as dcp

    root = tmp_path_factory.mktemp("world").resolve()
    url = str(root / "catalog.sqlite")
    for step in (10, 20, 30):
        state = {"embed.weight": torch.randn(6, 4), "layers.0.weight": torch.randn(4, 4)}
        dcp.save(state, checkpoint_id=root / "llama" / f"step-{step}", no_dist=True)
    for step in (10, 20):
        source, target = root / f"llama/step-{step}", root / f"exports/{step}"
        api.convert(str(source), str(target), verb="export", catalog=url, settings=Settings(fingerprint=True))
    (data,) = (root / "llama" / "step-30").glob("*.distcp")
    with data.open("r+b") as file:
        file.truncate(100)
    (root / "llama" / "notes").mkdir()
    (root / "llama" / "notes" / "README.md").write_text("nothing")
    return root


def restorable(url: str) -> dict[str, Any]:
    """Return everything that can be restored of a catalog, by URI."""
    with open_catalog(url) as catalog:
        return {
            row.uri: (
                row.kind,
                row.format,
                row.state,
                row.run,
                row.step,
                row.manifest_digest,
                row.content_digest,
                [s.source.uri for s in catalog.lineage(row.id).ancestors],
                [(t.fqn, t.dtype, t.shape) for t in catalog.show(row.id).tensors],  # type: ignore[union-attr]
            )
            for row in catalog.list(limit=None)
        }


def test_a_conversion_records_the_files_of_its_source_that_describe_it(world: Path, tmp_path: Path) -> None:
    url, means = str(tmp_path / "new.sqlite"), Settings(fingerprint=True)
    with open_catalog(str(world / "catalog.sqlite")) as catalog:
        recorded = catalog.at(str(world / "llama" / "step-10"))
        assert recorded is not None
        assert recorded[0].num_files == 1  # with tensors
        assert {f.path: f.nbytes for f in recorded[1]} == {
            path.name: path.stat().st_size for path in (world / "llama" / "step-10").iterdir()
        }
        assert [f.role for f in recorded[1] if f.path == ".metadata"] == ["extra"]
    with open_catalog(url) as catalog:
        rebuild(catalog, [str(world / "llama" / "step-10")], digests=True)
        (export := tmp_path / "export").mkdir()
        api.convert(
            str(world / "llama/step-10"), str(export / "a"), verb="export", catalog=url, settings=means
        )
        api.convert(str(export / "a"), str(export / "b"), catalog=url, settings=means)
        for place in (world / "llama" / "step-10", export / "a"):
            known = catalog.at(str(place))
            assert known is not None
            assert {f.path for f in known[1]} == {path.name for path in place.iterdir()}
            assert all(f.digest for f in known[1]), place  # none is lost when it is read as a source


def test_the_catalog_is_restored(world: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "new.sqlite")
    lines: list[str] = []
    with open_catalog(url) as catalog:
        found = rebuild(catalog, [str(world)], digests=True, on_place=lines.append)
    assert found.left_out == ()
    made_from = {r.uri: r.made_from for r in found.recorded}
    assert made_from == {
        **{str(world / f"llama/step-{n}"): None for n in (10, 20, 30)},
        **{str(world / f"exports/{n}"): str(world / f"llama/step-{n}") for n in (10, 20)},
    }
    before, after = restorable(str(world / "catalog.sqlite")), restorable(url)
    for uri, row in before.items():
        restored = after[uri]
        assert restored[:6] == row[:6]
        assert restored[7:] == row[7:]
        # Sources have digests now, and outputs the same ones as before.
        assert restored[6] == row[6] if row[0] == "derived" else restored[6] is not None
    assert set(after) - set(before) == {str(world / "llama/step-30")}
    assert after[str(world / "llama/step-30")][2] == "damaged"
    assert len(lines) == 5


def test_a_second_run_changes_nothing(world: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "new.sqlite")
    with open_catalog(url) as catalog:
        first = rebuild(catalog, [str(world / "llama"), str(world / "exports")])
        before = restorable(url), len(catalog.conversions())
        restored = rebuild(catalog, [str(world)])
        assert {r.id for r in restored.recorded} == {r.id for r in first.recorded}
        assert all(r.made_from is None for r in restored.recorded)  # known already
        assert (restorable(url), len(catalog.conversions())) == before
        assert len(catalog.conversions()) == 2


def test_over_a_catalog_that_is_not_lost(world: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "kept.sqlite")
    shutil.copy(world / "catalog.sqlite", url)
    before = restorable(url)
    with open_catalog(url) as catalog:
        catalog.tag(str(world / "exports/10"), "eval", "1")
        rebuild(catalog, [str(world)])
        assert catalog.show(str(world / "exports/10")).tags == {"eval": "1"}  # type: ignore[union-attr]
        assert len(catalog.conversions()) == 2
    after = restorable(url)
    assert {uri: after[uri] for uri in before} == before


def test_a_source_that_is_not_known_is_not_invented(world: Path, tmp_path: Path) -> None:
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        found = rebuild(catalog, [str(world / "exports")])
        assert [(r.made_from, r.state) for r in found.recorded] == [(None, "present")] * 2
        assert catalog.conversions() == ()


def test_one_checkpoint_and_other_places(world: Path, tmp_path: Path) -> None:
    with open_catalog(str(tmp_path / "new.sqlite")) as catalog:
        found = rebuild(catalog, [str(world / "llama" / "step-20"), str(world / "llama" / "notes")])
        assert [r.uri for r in found.recorded] == [str(world / "llama" / "step-20")]
        assert [row[:2] for row in found.left_out] == [(str(world / "llama" / "notes"), "unknown-format")]
        with pytest.raises(SourceUnreadable, match="does not exist"):
            rebuild(catalog, [str(world / "nowhere")])


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Two steps, and outputs of them without a record of their source."""
    import torch
    from torch.distributed import checkpoint as dcp

    url = str(tmp_path / "catalog.sqlite")
    for step in (10, 20):
        state = {"embed.weight": torch.randn(6, 4)}
        dcp.save(state, checkpoint_id=tmp_path / "llama" / f"step-{step}", no_dist=True)
    for source, target, dtype in (
        ("step-10", "whole/ten", None),
        ("step-20", "whole/step-20.pt", None),
        ("step-20", "whole/cast", "bfloat16"),
    ):
        api.convert(
            str(tmp_path / "llama" / source),
            str(tmp_path / target),
            dtype=dtype,
            catalog=url,
            settings=Settings(fingerprint=True),
        )
    return tmp_path


def kinds_and_origins(url: str, root: Path) -> dict[str, tuple[Any, ...]]:
    """Return URI -> (kind, run, step, fingerprint, sources)."""
    with open_catalog(url) as catalog:
        return {
            row.uri.removeprefix(f"{root}/"): (
                row.kind,
                row.run,
                row.step,
                row.fingerprint,
                [s.source.uri.removeprefix(f"{root}/") for s in catalog.lineage(row.id).ancestors],
            )
            for row in catalog.list(limit=None)
        }


def test_outputs_without_a_card_get_their_source_by_fingerprint(outputs: Path) -> None:
    before = kinds_and_origins(str(outputs / "catalog.sqlite"), outputs)
    url = str(outputs / "new.sqlite")
    for _ in range(2):
        with open_catalog(url) as catalog:
            rebuild(
                catalog,
                [str(outputs / "llama")],
                output_roots=[str(outputs / "whole")],
                fingerprint_settings=Settings(),
            )
            assert sorted(c.verb for c in catalog.conversions()) == ["rebuilt", "rebuilt"]
        after = kinds_and_origins(url, outputs)
        cast, known = after.pop("whole/cast"), {k: v for k, v in before.items() if k != "whole/cast"}
        assert after == known
        assert (cast[0], cast[4]) == ("derived", [])  # other numbers: nothing is claimed


def test_a_source_written_meanwhile_is_newer_than_its_output(outputs: Path) -> None:
    looks: list[datetime] = []
    with open_catalog(str(outputs / "new.sqlite")) as catalog:
        rebuild(
            catalog,
            [str(outputs / "llama")],
            output_roots=[str(outputs / "whole")],
            fingerprint_settings=Settings(),
            on_place=lambda line: looks.append(datetime.now(UTC)),
        )
        assert all(c.started_at < looks[0] for c in catalog.conversions())  # retire goes by that


def test_equal_fingerprints_alone_are_not_lineage(outputs: Path) -> None:
    url = str(outputs / "new.sqlite")
    with open_catalog(url) as catalog:
        rebuild(catalog, [str(outputs)], fingerprint_settings=Settings())
    assert all(row[0] == "source" and row[4] == [] for row in kinds_and_origins(url, outputs).values())
    with open_catalog(url) as catalog:
        rebuild(catalog, [str(outputs)], output_roots=[str(outputs / "whole")])
    found = kinds_and_origins(url, outputs)
    assert found["whole/ten"][4] == ["llama/step-10"]  # its fingerprint was known


def test_of_several_equal_sources_none_is_guessed(outputs: Path) -> None:
    shutil.copytree(outputs / "llama" / "step-10", outputs / "other" / "step-11")
    url = str(outputs / "new.sqlite")
    with open_catalog(url) as catalog:
        roots = [str(outputs / "llama"), str(outputs / "other")]
        found = rebuild(
            catalog, roots, output_roots=[str(outputs / "whole")], fingerprint_settings=Settings()
        )
    origins = {r.uri: r.made_from for r in found.recorded}
    assert origins[str(outputs / "whole/ten")] is None
    assert origins[str(outputs / "whole/step-20.pt")] == str(outputs / "llama/step-20")


@pytest.mark.parametrize("card", ["", "# x\n\n- source: `/a` (dcp)\n", "- source: `a`\n" * 1000])
def test_other_cards_give_no_source(card: str) -> None:
    assert provenance(card, "x") is None


def test_on_the_command_line(world: Path, tmp_path: Path, cli: Any) -> None:
    where = ["--catalog", str(tmp_path / "new.sqlite")]
    done = cli("catalog", "rebuild", str(world), *where)
    assert done.code == 0
    assert done.stdout == "5 checkpoints recorded, 2 of them linked to their source\n"
    form = json.loads(cli("catalog", "rebuild", str(world), "--output", "json", *where).stdout)
    assert len(form["recorded"]) == 5
    assert form["left_out"] == []


def test_outputs_on_the_command_line(outputs: Path, cli: Any) -> None:
    done = cli(
        "catalog",
        "rebuild",
        str(outputs / "llama"),
        "--made",
        str(outputs / "whole"),
        "--fingerprints",
        "--catalog",
        str(outputs / "new.sqlite"),
    )
    assert done.stdout == "5 checkpoints recorded, 2 of them linked to their source\n"
