"""A source, the copy that a deletion counts on, and what may happen to both before the copy is replaced."""

from __future__ import annotations

import os
import shutil
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from retiring import MEANS
from safetensors import safe_open
from safetensors.torch import save_file
from sqlalchemy import delete, insert, select

from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.models import Base
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts, record_fingerprint
from ckptcore.errors import DestinationExists
from ckptcore.operations.rebuild_catalog import rebuild
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.purge import purge
from ckptcore.operations.retention.retire import retire
from ckptcore.planning.request import Request

NOW, WEEK = timedelta(0), timedelta(days=7)


def save(place, number, **more):
    """A DCP checkpoint of three tensors and two objects; all of them are different for each number."""
    state = {
        "weight": torch.arange(12.0).reshape(3, 4) + 100 * number,
        "bias": torch.full((4,), number + 0.5),
        "zero": torch.zeros(4),
        "note": f"note of {number}",
        "step": number,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "assuming the intent is to save in a single process": it is
        dcp.save(state | more, checkpoint_id=place, no_dist=True)
    return place


def rows_of(catalog):
    """Every row of a catalog, by table."""
    with catalog.reading() as conn:
        return {t.name: [dict(r._mapping) for r in conn.execute(select(t))] for t in _tables()}


def put_rows(catalog, rows):
    """Puts a backup back: the catalog knows nothing else."""
    with catalog.writing() as conn:
        for table in reversed(_tables()):
            conn.execute(delete(table))
        for table in _tables():
            if rows[table.name]:
                conn.execute(insert(table), rows[table.name])


def _tables():
    return Base.metadata.sorted_tables


class Copies:
    """Two watched steps, the first of which may go; its copy `copy`; and `other`, of other contents."""

    def __init__(self, catalog, url, tmp_path):
        self.catalog, self.url, self.tmp = catalog, url, tmp_path.resolve()
        self.runs = self.tmp / "runs"
        self.source, self.newest = self.runs / "llama/step-1", self.runs / "llama/step-2"
        self.out = self.tmp / "out"
        self.copy, self.other = self.out / "k", self.tmp / "other"
        for number, place in enumerate((self.source, self.newest, self.other), start=1):
            save(place, number)
        with catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), "r", str(self.runs))
        catalog.record_validation(facts(inspect(str(self.newest)), str(self.newest)), ())
        self.convert(self.source, self.copy)

    def convert(self, source, target, *, catalog=None, **options):
        """A conversion with the catalog, or with another one; False for none."""
        url = self.url if catalog is None else catalog
        return convert(Request(str(source), str(target), **options), MEANS, None, url)

    def retire(self, grace=NOW, keep=1, **options):
        return retire(self.catalog, Policy(keep), yes=True, grace=grace, **options)

    def fate(self, **options):
        """What becomes of the source."""
        items = self.retire(**options).items
        return next(each for each in items if each.source.uri == str(self.source))

    def counted_on(self, **options):
        """The source is deleted, because of its copy."""
        done = self.fate(**options)
        assert done.fate.value == "deleted", done.why
        assert not self.source.exists()
        return self

    def aside(self, grace=WEEK, **options):
        """The source is set aside; returns the folder with its record."""
        done = self.fate(grace=grace, **options)
        assert done.fate.value == "retired", done.why
        assert not self.source.exists()
        (home,) = self.homes(self.source)
        return home

    def due(self, after=WEEK + timedelta(hours=1)):
        """A purge after some time."""
        return tuple(purge(self.catalog, MEANS, None, due=datetime.now(UTC) + after))

    def homes(self, place):
        return sorted(place.parent.glob(f".{place.name}.retiring-*.ckptcore"))

    def rebuilt(self, *made):
        return rebuild(
            self.catalog, [], output_roots=[str(each) for each in made], fingerprint_settings=MEANS
        )

    def validated(self, place):
        """`ckptcore validate`, and `ckptcore fingerprint`."""
        from ckptcore.comparison.fingerprint import fingerprint

        manifest = inspect(str(place))
        self.catalog.record_validation(facts(manifest, str(place), verified="coverage"), (), level="coverage")
        record_fingerprint(manifest, str(place), fingerprint(manifest, MEANS).tensors, {}, self.url)

    def overwrite(self, target=None, **options):
        return self.convert(self.other, target or self.copy, overwrite=True, **options)

    def refuses(self, target=None, *says, **options):
        """The destination is not replaced, and keeps every byte."""
        target = target or self.copy
        before = files_of(target)
        assert before
        with pytest.raises(DestinationExists) as error:
            self.overwrite(target, **options)
        for each in ("only proven copy", *says):
            assert each in error.value.message, error.value.message
        assert files_of(target) == before
        assert not list(target.parent.glob(f".{target.name}.ckptcore"))
        return error.value

    def replaces(self, target=None, **options):
        """The destination is replaced."""
        target = target or self.copy
        self.overwrite(target, **options)
        assert tensors_of(target)["weight"][0, 0] == 300


def files_of(place):
    """Every file at a place by its name, with its bytes."""
    if place.is_file():
        return {"": place.read_bytes()}
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


def tensors_of(place):
    """The tensors of a safetensors folder, by safetensors itself."""
    with safe_open(place / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def is_copy_of(place, number):
    """A safetensors folder holds all of `save`'s contents of a number."""
    found = tensors_of(place)
    assert torch.equal(found["weight"], torch.arange(12.0).reshape(3, 4) + 100 * number)
    assert torch.equal(found["bias"], torch.full((4,), number + 0.5))
    with safe_open(place / "model.safetensors", "pt") as file:
        assert f"note of {number}" in str(file.metadata())


def rewrite(place, *, drop_objects=False, **more):
    """Writes a safetensors folder by hand: its tensors and some more."""
    file = place / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = tensors_of(place) | more
    file.unlink()
    save_file(tensors, file, None if drop_objects else metadata)


def copy_by_hand(place, target):
    shutil.copytree(place, target)
    return target


def tensor_bytes(place, tensor):
    """The file of a place that has a tensor's elements, and where they begin."""
    elements = tensor.numpy().tobytes()
    files = [place] if place.is_file() else [p for p in sorted(place.rglob("*")) if p.is_file()]
    file = next(p for p in files if elements in p.read_bytes())
    return file, file.read_bytes().index(elements)


def flip(file, at=-1):
    """One bit of a file is another one, and nothing else shows it."""
    seen = os.stat(file)
    data = bytearray(Path(file).read_bytes())
    data[at] ^= 1
    with open(file, "r+b") as opened:
        opened.write(data)
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
