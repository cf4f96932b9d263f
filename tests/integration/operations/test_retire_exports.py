"""Retire and exports: no source is deleted for an export of a part, or one that failed its verification."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from retiring import MEANS
from retiring import delete_now as retire

from ckptcore.api import verify_export
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import convert
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.planning.request import Request

EVERYTHING = Allowed.of(["*", "**", "cast"])  # whatever may be given up by name
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
Q = "layers.0.self_attn.q_proj"


def state(step, lora):
    generator = torch.Generator().manual_seed(step)
    shapes = {"embed_tokens.weight": (8, 4), f"{Q}.weight": (4, 4), "norm.weight": (4,)}
    if lora:
        del shapes[f"{Q}.weight"]
        shapes |= {f"{Q}.base_layer.weight": (4, 4)}
        shapes |= {f"{Q}.lora_A.default.weight": (2, 4), f"{Q}.lora_B.default.weight": (4, 2)}
    prefix = "base_model.model." if lora else ""
    return {f"{prefix}model.{n}": torch.randn(shape, generator=generator) for n, shape in shapes.items()}


class Steps:
    """Two watched steps of a run, the first of which may go."""

    def __init__(self, catalog, url, runs, tmp_path, *, lora):
        self.catalog, self.url = catalog, url
        self.source, self.child = runs / "llama/step-1", tmp_path / "out/step-1"
        for step in (1, 2):
            place = runs / f"llama/step-{step}"
            dcp.save(state(step, lora), checkpoint_id=place, no_dist=True)
        self.export(self.source.with_name("step-2"), tmp_path / "out/step-2", names="stored")
        self.config = tmp_path / "adapter"
        self.config.mkdir()
        (self.config / "adapter_config.json").write_text(json.dumps(ADAPTER))

    def export(self, source=None, child=None, verb="export", **options):
        request = Request(str(source or self.source), str(child or self.child), verb=verb, **options)
        return convert(request, MEANS, None, self.url)

    def fate(self, *, yes=True, **options):
        found = retire(self.catalog, Policy(1), yes=yes, **options)
        return next(i for i in found.items if i.source.step == 1)

    def keeps(self):
        """Whatever is allowed, read again or not, in a dry run and for good; the reasons."""
        why = []
        for options in ({}, {"fingerprint_settings": MEANS}):
            for allowed in (None, EVERYTHING):
                for yes in (False, True):
                    found = self.fate(yes=yes, allowed=allowed, **options)
                    assert found.fate.value == "unsafe", (options, allowed, yes, found.why)
                    why += found.why
        assert (self.source / ".metadata").is_file()
        return " ".join(why)


@pytest.fixture
def steps(catalog, url, runs, watch, tmp_path):
    watch()
    return lambda lora=False: Steps(catalog, url, runs, tmp_path, lora=lora)


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("part", [{"include": ("model.layers.*",)}, {"exclude": ("*norm*",)}])
def test_a_part_replaces_no_source(steps, part, dtype):
    made = steps()
    made.export(**part, dtype=dtype)
    assert "has other tensors" in made.keeps()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_adapter_alone_replaces_no_source(steps, dtype):
    made = steps(lora=True)
    made.export(config=str(made.config), dtype=dtype)
    assert (made.child / "adapter_model.safetensors").is_file()
    assert "has other tensors" in made.keeps()


@pytest.mark.parametrize("lora", [False, True])
def test_a_part_in_place_of_all_replaces_no_source(steps, lora):
    """The catalog knows both conversions: the checkpoint that is there counts."""
    made = steps(lora)
    made.export(names="stored")
    assert made.fate(yes=False).fate.value not in ("unsafe", "kept")
    if lora:
        made.export(config=str(made.config), overwrite=True)
    else:
        made.export(include=("model.layers.*",), overwrite=True)
    made.keeps()


def test_a_part_does_not_hide_another_that_holds_all(steps, tmp_path):
    made = steps()
    made.export(child=tmp_path / "all", names="stored")
    made.export(include=("model.layers.*",))
    found = made.fate()
    assert found.fate.value == "deleted", found.why
    assert not made.source.exists()


@pytest.mark.parametrize("check", ["names", "logits", "fingerprints"])
def test_a_failed_verdict_replaces_no_source(steps, catalog, check, tmp_path):
    """It may hold every tensor bit for bit, beside a config that makes another model of them."""
    made = steps()
    made.export(names="stored")
    written = catalog.show(str(made.child)).written_by[0].id
    catalog.record_verdict(written, [("elements", "ok", "x"), (check, "failed", "rope_theta differs")])
    assert "failed when it was verified" in made.keeps()
    made.export(child=Path(tmp_path / "again"), names="stored")
    catalog.record_verdict(written, [("elements", "not-done", "x")])  # takes nothing back
    assert made.fate(yes=False).fate.value not in ("unsafe", "kept")
    found = made.fate()
    assert (found.fate.value, found.replacement.child.uri) == ("deleted", str(tmp_path / "again")), found.why


def test_an_older_good_child_replaces_one_that_failed(steps, catalog, tmp_path):
    made = steps()
    made.export(child=tmp_path / "older", names="stored")
    made.export(names="stored")
    written = catalog.show(str(made.child)).written_by[0].id
    catalog.record_verdict(written, [("names", "failed", "x")])
    found = made.fate()
    assert (found.fate.value, found.replacement.child.uri) == ("deleted", str(tmp_path / "older")), found.why


def test_a_failed_verdict_of_what_was_replaced_counts_no_more(steps, catalog):
    made = steps()
    made.export(names="stored")
    catalog.record_verdict(catalog.show(str(made.child)).written_by[0].id, [("names", "failed", "x")])
    made.keeps()
    made.export(names="stored", overwrite=True, max_file_size=64)
    found = made.fate()
    assert found.fate.value == "deleted", found.why


def test_a_later_export_does_not_take_back_a_failed_verdict(steps, catalog):
    """The same export again, over itself, is the same folder: its conversion's verdict is what counts."""
    made = steps()
    made.export(names="stored")
    first = catalog.show(str(made.child)).written_by[0].id
    made.export(names="stored", overwrite=True)
    rows = catalog.show(str(made.child)).written_by
    catalog.record_verdict(rows[0].id, [("names", "failed", "x")])
    if len(rows) > 1:
        catalog.record_verdict(first, [("names", "ok", "x")])
    made.keeps()


@pytest.mark.parametrize("file", ["README.md", "model.safetensors"])
def test_an_export_with_a_changed_file_replaces_no_source(steps, file):
    made = steps()
    made.export(names="stored")
    data = bytearray((made.child / file).read_bytes())
    data[-1] ^= 1
    (made.child / file).write_bytes(data)
    found = made.fate()
    assert (found.fate.value, made.source.exists()) == ("unsafe", True), found.why


@pytest.mark.parametrize("grace", [timedelta(0), timedelta(days=7)], ids=["purged", "set aside"])
def test_an_export_is_verified_after_its_source_was_retired(steps, tmp_path, grace):
    """Against what is set aside, and after its purge against the copy that took its place."""
    made = steps()
    made.export(names="stored", config="none")
    copy = tmp_path / "copy/step-1"
    made.export(child=copy, verb="consolidate")  # the newest conversion that holds all of it
    before = verify_export(made.child, catalog=made.url)
    assert made.fate(grace=grace).fate.value == ("retired" if grace else "deleted")
    after = verify_export(made.child, catalog=made.url)
    assert [(c.name, c.verdict) for c in after.checks] == [(c.name, c.verdict) for c in before.checks]
    assert str(made.source) in after.found_by
    assert ("is set aside" if grace else f"{copy} took its place") in after.found_by
    weights = made.child / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert verify_export(made.child, catalog=made.url).verdict == "failed"


def test_an_export_that_took_the_place_of_its_source_says_so(steps, capsys):
    made = steps()
    made.export(names="stored", config="none")
    assert made.fate().fate.value == "deleted"
    proof = verify_export(made.child, catalog=made.url)
    assert "was retired, and this export took its place" in " ".join(c.summary for c in proof.checks)
    assert run(["catalog", "lineage", str(made.child), "--catalog", made.url]) == 0
    assert "(deleted)" in capsys.readouterr().out
