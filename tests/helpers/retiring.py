"""A source, its child and a catalog that knows both, for tests that try to make `retire` lose a byte."""

from __future__ import annotations

import os
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from checkpoints import save
from sqlalchemy import text

from ckptcore import api
from ckptcore.catalog import watched_roots as roots
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.operations.retention.retire import retire
from ckptcore.planning.request import Request, Settings


def delete_now(catalog, policy, scope=None, **options):
    """Retires without a grace period, unless one is given: what goes is deleted at once."""
    return retire(catalog, policy, scope, **({"grace": timedelta(0)} | options))


MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)


def on_both(names, often):
    """(database, name) of each on both databases; those that are not ``often`` of interest on PostgreSQL run
    there in the long tier."""
    rare = pytest.mark.soak
    return [
        pytest.param(kind, name, marks=rare if kind == "postgresql" and name not in often else ())
        for kind in ("sqlite", "postgresql")
        for name in names
    ]


def snapshot(folder):
    """Everything in a folder by name: kind, and bytes or target."""
    found = {}
    for at, folders, files in os.walk(folder):
        for name in folders + files:
            path = os.path.join(at, name)
            kind = stat.S_IFMT(os.lstat(path).st_mode)
            content = os.readlink(path) if kind == stat.S_IFLNK else None
            content = Path(path).read_bytes() if kind == stat.S_IFREG else content
            found[os.path.relpath(path, folder)] = kind, content
    return found


class Template:
    """What worlds are copies of: saving with torch each time would take most of a test."""

    def __init__(self, tmp):
        self.dcp = save(tmp / "dcp", 1)
        self.other_step = save(tmp / "again", 77)  # another step in files of the same names and sizes
        # A checkpoint whose conversion has the very same names and bytes: whatever leads from the child to
        # the source then proves everything.
        convert(Request(str(self.dcp), str(tmp / "plain")), MEANS, None, False)
        self.plain = tmp / "plain"
        self.tensors = {
            name: api.read(api.open(str(self.dcp)), name) for name in ("layers.0.weight", "scale")
        }


class World:
    """One watched root with a run of two steps; the first may go when it is proven elsewhere."""

    def __init__(self, template, catalog, url, tmp, name):
        self.template, self.catalog, self.url, self.name = template, catalog, url, name
        self.tmp = (tmp / name).resolve()
        self.root, self.elsewhere = self.tmp / "runs", self.tmp / "elsewhere"
        self.run = f"run-{name}"
        self.source, self.child = self.root / self.run / "step-1", self.tmp / "out" / "step-1"
        self.elsewhere.mkdir(parents=True, exist_ok=True)
        self.mounts = []

    def make(self, form="dcp", **options):
        """Saves, watches, converts."""
        settings = options.pop("settings", MEANS)
        for step in (self.source, self.source.with_name("step-2")):
            shutil.copytree(getattr(self.template, form), step)
        newest = str(self.source.with_name("step-2"))
        self.catalog.record_validation(facts(inspect(newest), newest), ())
        with self.catalog.writing() as conn:
            roots.add(conn, datetime.now(UTC), self.name, str(self.root))
        convert(Request(str(self.source), str(self.child), **options), settings, None, self.url)
        return self

    def sql(self, statement, **values):
        """Edits rows behind everybody's back."""
        with self.catalog.writing() as conn:
            changed = conn.execute(text(statement), values).rowcount
            assert changed
            return changed

    def mount(self, what, where, *options):
        where.mkdir(parents=True, exist_ok=True)
        assert os.system(f"mount {' '.join(options) or '--bind'} {what} {where}") == 0
        self.mounts.append(where)

    def unmount(self):
        while self.mounts:
            os.system(f"umount {self.mounts.pop()}")

    def retire(self, *loss, take=False, cast=False, last=1):
        """What becomes of the first step."""
        allowed = Allowed(cast, loss)
        found = delete_now(
            self.catalog,
            Policy(last),
            self.name,
            yes=True,
            purging=True,
            allowed=allowed,
            fingerprint_settings=MEANS if take else None,
        )
        self.left = found.left
        return next((item for item in found.items if item.source.step == 1), None)

    def keeps(self, *says, kept=None, **options):
        """The source is not deleted and every byte of it is where it was; the reasons say so."""
        kept = kept or self.source
        before = snapshot(kept)
        found = self.retire(**options)
        assert found.fate.value in ("unsafe", "kept"), (found.fate, found.why)
        assert snapshot(kept) == before
        assert before
        reasons = " ".join(found.why) + str(getattr(found, "unproven", ""))
        for each in says:
            assert each in reasons, reasons
        return found

    def deletes(self, *loss, **options):
        """The source is gone, and what it held is in its child."""
        found = self.retire(*loss, **options)
        assert found.fate.value == "deleted", found.why
        assert not os.path.lexists(self.source)
        assert sorted(os.listdir(self.source.parent)) == ["step-2"]
        self.holds_all(self.child)
        return found

    def holds_all(self, place):
        """A place holds every tensor, bit for bit."""
        manifest = api.open(str(place))
        for name, value in self.template.tensors.items():
            assert torch.equal(api.read(manifest, name), value)
