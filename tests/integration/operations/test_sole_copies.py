"""A child that retire relied on is replaced only while another checkpoint holds the same tensors."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from retiring import delete_now as retire

from ckptcore.conversion.pipeline import convert
from ckptcore.errors import DestinationExists, UsageError
from ckptcore.operations.retention import purge as module
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.planning.request import Request, Settings

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)


class Steps:
    """Two watched steps of a run; the first may go. `other` is a checkpoint of other tensors."""

    def __init__(self, catalog, url, runs, tmp_path):
        self.catalog, self.url, self.tmp = catalog, url, tmp_path
        self.source, self.child, self.other = runs / "llama/step-1", tmp_path / "out/a", tmp_path / "other"
        for number, place in enumerate((self.source, runs / "llama/step-2", self.other)):
            dcp.save({"a": torch.full((4, 4), number + 0.5)}, checkpoint_id=place, no_dist=True)
        self.convert(runs / "llama/step-2", tmp_path / "out/b")

    def convert(self, source, target, **options):
        return convert(Request(str(source), str(target), **options), MEANS, None, self.url)

    def fate(self, **options):
        found = retire(self.catalog, Policy(1), yes=True, **options)
        return next(i for i in found.items if i.source.uri == str(self.source))

    def retired(self, **options):
        assert self.fate(**options).fate.value == "deleted"

    def refuses(self, target=None, **options):
        """The destination keeps every byte, and no staging folder is left."""
        target = target or self.child
        before = {p: p.read_bytes() for p in target.rglob("*") if p.is_file()}
        with pytest.raises(DestinationExists, match="only proven copy") as error:
            self.convert(self.other, target, overwrite=True, **options)
        assert str(self.source) in error.value.message
        assert before
        assert {p: p.read_bytes() for p in target.rglob("*") if p.is_file()} == before
        assert not list(target.parent.glob(f".{target.name}.ckptcore"))


@pytest.fixture
def steps(catalog, url, runs, watch, tmp_path):
    watch()
    made = Steps(catalog, url, runs, tmp_path)
    made.convert(made.source, made.child)
    return made


def test_the_only_copy_is_not_replaced(steps):
    steps.retired()
    steps.refuses()
    steps.refuses(overwrite_foreign=True)
    steps.refuses(to="dcp")
    with pytest.raises(UsageError, match="has obligations"):  # around it
        steps.convert(steps.other, steps.child.parent, overwrite=True, overwrite_foreign=True)


def test_a_kept_source_allows_it(steps):
    steps.convert(steps.other, steps.child, overwrite=True)


def test_another_copy_allows_it(steps):
    steps.convert(steps.source, steps.tmp / "out/second", to="dcp")
    steps.retired()
    steps.convert(steps.other, steps.child, overwrite=True)
    steps.child = steps.tmp / "out/second"  # now it is the only one
    steps.refuses()


def test_a_copy_that_is_gone_does_not_count(steps):
    steps.convert(steps.source, steps.tmp / "out/second")
    steps.retired()
    shutil.rmtree(steps.tmp / "out/second")
    steps.refuses()


def test_a_copy_of_links_to_it_does_not_count(steps):
    steps.convert(steps.source, steps.tmp / "out/second")
    steps.retired()
    file = steps.tmp / "out/second/model.safetensors"
    file.unlink()
    file.symlink_to(steps.child / "model.safetensors")
    steps.refuses()


def test_a_cast_copy_does_not_count(steps):
    steps.convert(steps.source, steps.tmp / "out/second", dtype="bfloat16")
    steps.retired()
    steps.refuses()


def test_what_a_loss_was_accepted_for_is_not_replaced(catalog, url, runs, watch, tmp_path):
    watch()
    steps = Steps(catalog, url, runs, tmp_path)
    steps.convert(steps.source, steps.child, dtype="bfloat16")
    steps.retired(allowed=Allowed(cast=True))
    steps.refuses()


def test_other_content_at_its_place_is_replaced(steps):
    """The child was moved away by hand: nothing of it is at its place."""
    steps.retired()
    shutil.rmtree(steps.child)
    dcp.save({"b": torch.ones(2)}, checkpoint_id=steps.child, no_dist=True)
    steps.convert(steps.other, steps.child, overwrite=True)


def test_no_source_is_deleted_while_its_child_is_replaced(steps, monkeypatch):
    """The conversion began before, or while the source is set aside."""
    request = Request(str(steps.other), str(steps.child), overwrite=True)
    begin = steps.catalog.begin
    facts = {"source_uri": request.source, "destination_uri": request.destination, "verb": "consolidate"}
    begun = begin(request.as_dict(), **facts, tool_version="0")
    found = steps.fate()
    assert (found.fate.value, "writes to" in found.why[0]) == ("unsafe", True), found.why
    steps.catalog.fail(begun, code="destination-exists", message="it exists")
    require = module._read_child

    def overtaken(*given):
        begin(request.as_dict(), **facts, tool_version="0")
        return require(*given)

    monkeypatch.setattr(module, "_read_child", overtaken)
    found = steps.fate()
    assert (found.fate.value, "writes to" in found.why[0]) == ("unsafe", True), found.why
    assert (steps.source / ".metadata").is_file()
    assert steps.catalog.show(str(steps.source)).checkpoint.state == "present"


def test_the_command_line_says_why(steps, cli):
    steps.retired()
    given = ("consolidate", steps.other, steps.child, "--overwrite", "--catalog", steps.url)
    done = cli(*given, catalog=True)
    assert done.code == 7, done
    assert "only proven copy" in done.stderr
