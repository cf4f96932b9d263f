"""Use plug-ins made for release 0.1: they read and write, and a warning names what to change."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from npy_plugin import OLD_PLUGIN
from paths import ROOT

import ckptcore
from ckptcore import moved_modules
from ckptcore.core.manifest import Manifest
from ckptcore.formats import (
    Abilities,
    Arrangement,
    Builder,
    Format,
    Layout,
    Reader,
    Source,
    Writer,
    by_name,
    registry,
)

# A format that is written, too, and always one file: a line of JSON, then the tensors' bytes.
FLAT = """
import json
import ckptcore.manifest
from ckptcore.box import Box
from ckptcore.builder import Builder
from ckptcore.formats.base import Abilities, Evidence, FileLayout, Format, Literal, Slot
from ckptcore.manifest import Item, TensorSpec, View

NAME = "flat_old"

def detect(source):
    names = [source.name] if source.name else list(source.listing)
    said = b'{"format": "' + NAME.encode() + b'"'
    flat = len(names) == 1 and source.store.read(names[0], 0, len(said)) == said
    return Evidence(NAME, (f"{names[0]} says so",)) if flat else None

def read(source):
    builder = Builder()
    path = source.name or next(iter(source.listing))
    size = source.listing[path]
    line = source.store.read(path, 0, size).split(b"\\n")[0]
    at, file = len(line) + 1, builder.file(path, size)
    for name, dtype, shape in json.loads(line)["tensors"]:
        spec = TensorSpec(name, dtype, tuple(shape))
        item = builder.item(Item(file, at, spec.nbytes))
        box = Box((0,) * len(shape), spec.shape)
        builder.chunk(builder.tensor(spec), box.offset, box.shape, item, View())
        at += spec.nbytes
    return builder.build(NAME, source.store.url, {})

def arrange(request):
    rows = [[t.fqn, t.dtype, list(t.shape)] for t in request.tensors]
    line = json.dumps({"format": NAME, "tensors": rows, "paths": len(request.paths)}).encode() + b"\\n"
    at, slots = len(line), []
    for n, t in enumerate(request.tensors):
        slots.append(Slot(n, at))
        at += t.nbytes
    tensors = tuple(range(len(slots)))
    return [FileLayout(request.single or "all.flat", at, tensors, tuple(slots), (Literal(0, line),), True)]

def place(source):
    return lambda path: ("moved", *path)
"""
FLAT_OLD = (
    FLAT
    + """
FORMAT = Format(NAME, "flat", "a line", Abilities(True, True, "a sum", False), detect, read,
                arrange=arrange, versions=("2", "1"), single_file=True, nests=True, shards=True, place=place)
"""
)
FLAT_NEW = (
    FLAT
    + """
from ckptcore.formats import Layout, Reader, Writer
LAYOUT = Layout(arrange, nests=True, place=place)
NAME = "flat_new"
FORMAT = Format(NAME, "flat", "a line", detect, Reader(read, checksums="a sum"),
                Writer(LAYOUT, for_mesh=LAYOUT, single_file=True), versions=("2", "1"))
"""
)


def install(folder: Path, **modules: str) -> None:
    """The files that pip would install for a package with these modules, each with a FORMAT."""
    info = folder / "plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    points = "".join(f"{name} = {name}:FORMAT\n" for name in modules)
    (info / "entry_points.txt").write_text(f"[ckptcore.formats]\n{points}")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)


def run(folder: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code with the package installed."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=kept | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_an_old_package_is_read_with_a_warning(tmp_path: Path) -> None:
    install(tmp_path / "site", npy_plugin=OLD_PLUGIN)
    (tmp_path / "src").mkdir()
    # .npy, format 1.0: as numpy.save writes it.
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }".ljust(117) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(range(24))
    (tmp_path / "src/w.npy").write_bytes(data)
    code = f"""
import ckptcore, json
manifest = ckptcore.open({str(tmp_path / "src")!r})
report = ckptcore.check(manifest, level="bytes")
from ckptcore.formats import registry
form = registry().find("read", "npy_folder")
print(json.dumps([manifest.format, [[t.fqn, t.shape] for t in manifest.tensors], report.ok,
    ckptcore.read(manifest, "w").flatten().view(__import__("torch").uint8).tolist(), form.versions]))
"""
    done = run(tmp_path / "site", code, "-W", "always::DeprecationWarning:npy_plugin")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["npy_folder", [["w", [2, 3]]], True, list(range(24)), ["1"]]
    assert "ckptcore.builder has moved to ckptcore.core.manifest_builder" in done.stderr
    assert "ckptcore.manifest has moved to ckptcore.core.manifest" in done.stderr
    assert "the fields of Format have changed: give Format a reader=Reader(...)" in done.stderr
    # With the fields of release 0.1 its warnings are errors: the package is named, and does no harm.
    script = "import json; from ckptcore.formats import registry; print(json.dumps(registry().broken))"
    done = run(tmp_path / "site", script, "-W", "error::DeprecationWarning:npy_plugin")
    assert done.returncode == 0, done.stderr
    assert "npy_plugin:FORMAT fails: DeprecationWarning" in done.stdout


def test_single_file_formats(tmp_path: Path) -> None:
    """With the fields of release 0.1 and with those of today: the same bytes, in a file and on a mesh."""
    install(tmp_path / "site", flat_old=FLAT_OLD, flat_new=FLAT_NEW)
    code = f"""
import ckptcore, json, pathlib, torch
from safetensors.torch import save_file
root = pathlib.Path({str(tmp_path)!r})
save_file({{"a.w": torch.arange(6.0), "n": torch.tensor([7])}}, root / "model.safetensors")
for name in ("flat_old", "flat_new"):
    for verb, more in (("consolidate", {{}}), ("reshard", {{"mesh": "fsdp=2"}})):
        target = root / f"{{verb}}_{{name}}"
        ckptcore.convert(str(root / "model.safetensors"), str(target), to=name, verb=verb, **more)
        read = ckptcore.open(str(target))
        assert read.format == name, read.format
        assert sorted(t.fqn for t in read.tensors) == ["moved.a.w", "moved.n"]
        assert ckptcore.read(read, "moved.a.w").tolist() == [0, 1, 2, 3, 4, 5]
for name in ("flat_old", "flat_new"):  # one file may have any suffix, also one that other formats use
    target = root / f"{{name}}.bin"
    ckptcore.convert(str(root / "model.safetensors"), str(target), to=name)
    assert target.is_file() and ckptcore.open(str(target)).format == name
    ckptcore.convert(str(root / "model.safetensors"), str(target), to=name, overwrite=True)
for to, target in (("dcp", "x.safetensors"), ("lightning", "y.safetensors")):
    try:
        ckptcore.convert(str(root / "model.safetensors"), str(root / target), to=to, verb="consolidate")
    except ckptcore.CkptError as error:
        print(error.code, error.message.split(" the dest")[0])
try:
    ckptcore.convert(str(root / "model.safetensors"), str(root / "x"), to="flat_old", verb="export")
except ckptcore.CkptError as error:
    print(error.code, error.message)
try:
    ckptcore.convert(str(root / "model.safetensors"), str(root / "x"), to="torch_save", verb="reshard",
                     mesh="fsdp=2")
except ckptcore.CkptError as error:
    print(error.code, error.hint)
"""
    done = run(tmp_path / "site", code)
    assert done.returncode == 0, done.stderr
    no_dcp, no_lightning, no_export, no_mesh = done.stdout.splitlines()
    assert (no_dcp, no_lightning) == ("usage --to dcp does not fit", "usage --to lightning does not fit")
    assert no_export == "usage cannot export to flat_old: an export has only the model"
    assert no_mesh.startswith("usage one of: dcp, ")
    assert no_mesh.endswith("flat_old, flat_new")
    old, new = (tmp_path / f"consolidate_flat_{which}" for which in ("old", "new"))
    assert old.is_file()
    assert old.read_bytes() == new.read_bytes().replace(b"flat_new", b"flat_old")
    assert [p.name for p in (tmp_path / "reshard_flat_old").iterdir()] == ["all.flat"]


def _detect(source: Source) -> None:
    return None


def _read(source: Source) -> Manifest:
    """The manifest of a folder without tensors."""
    return Builder().build("x", source.store.url, {})


def _arrange(request: Arrangement) -> tuple[()]:
    return ()


def _place(source: Manifest) -> Any:
    return lambda path: path


def old(*args: Any, **fields: Any) -> Format:
    with pytest.warns(DeprecationWarning, match="the fields of Format have changed"):
        return Format(*args, **fields)


def old_attribute(form: Format, name: str) -> Any:
    with pytest.warns(DeprecationWarning, match=f"Format.{name} has moved into its reader or writer"):
        return getattr(form, name)


FACTS = ("x", "an x", "`x`")
ABLE = Abilities(reads=True, writes=True, checksums="CRC", objects=True)


def test_old_fields_become_a_reader_and_a_writer() -> None:
    reads = old(*FACTS, ABLE, _detect, _read)
    assert reads.reader == Reader(_read, "CRC", objects=True)
    assert reads.writer is None
    assert reads.abilities == Abilities(reads=True, writes=False, checksums="CRC", objects=True)
    writes = old(*FACTS, ABLE, _detect, _read, _arrange, ("3",), True, True, False, _place)
    layout = Layout(_arrange, nests=True, place=_place)
    assert (writes.writer, writes.versions) == (Writer(layout, single_file=True), ("3",))
    named = dict(zip(("name", "title", "recognised_by"), FACTS, strict=True))
    meshed = old(**named, abilities=ABLE, detect=_detect, read=_read, arrange=_arrange, shards=True)
    assert meshed.writer == Writer(Layout(_arrange), for_mesh=Layout(_arrange))
    apart = old(*FACTS, ABLE, _detect, _read, _arrange, for_mesh=meshed, single_file=True)
    assert apart.writer == Writer(Layout(_arrange), for_mesh=Layout(_arrange), single_file=True)
    items = old(*FACTS, ABLE, _detect, _read, _arrange, serializations=("torch_save", "safetensors"))
    assert items.writer is not None
    assert items.writer.serializations == ("torch_save", "safetensors")


def test_a_copy_may_change_old_fields() -> None:
    """As in a package that derived a format from one of this project."""
    dcp = by_name("dcp")
    with pytest.warns(DeprecationWarning, match="fields of Format"):
        mine = dataclasses.replace(dcp, name="mine", read=_read, single_file=True)
    assert dcp.reader is not None
    assert mine.reader == dataclasses.replace(dcp.reader, read=_read)
    assert mine.writer == dataclasses.replace(dcp.writer, single_file=True)
    with pytest.warns(DeprecationWarning, match="fields of Format"):
        other = dataclasses.replace(dcp, arrange=_arrange)
    assert other.writer is not None
    assert other.writer.for_mesh == Layout(_arrange, nests=True)


def test_old_attributes_are_there() -> None:
    lightning, refused = by_name("lightning"), by_name("accelerate")
    assert lightning.reader is not None
    assert lightning.writer is not None
    names = ("read", "arrange", "single_file", "nests", "shards", "place", "serializations", "for_mesh")
    found = {name: old_attribute(lightning, name) for name in names}
    none = {name: old_attribute(refused, name) for name in names}
    meshed = old_attribute(found.pop("for_mesh"), "place")
    layout = lightning.writer.whole
    assert found == {
        "read": lightning.reader.read,
        "arrange": layout.arrange,
        "single_file": True,
        "nests": True,
        "shards": True,
        "place": layout.place,
        "serializations": ("torch_save",),
    }
    assert lightning.writer.for_mesh is not None
    assert meshed is lightning.writer.for_mesh.place
    assert refused.reader is not None
    assert none.pop("read") is refused.reader.read
    assert not any(none[name] for name in names if name not in ("read", "serializations"))
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ = lightning.nosuch  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("args", "fields", "message"),
    [
        ((*FACTS, ABLE, _detect), {"detect": _detect}, "several values for detect"),
        ((*FACTS, ABLE, _detect), {"nosuch": 1}, "nosuch"),
        ((*FACTS, ABLE, *[None] * 20), {}, "at most 14 fields"),
        ((*FACTS, _detect, _read), {}, r"reader of format 'x' must be a Reader \(got function\)"),
        ((*FACTS, _detect), {"reader": Reader(_read), "writer": _arrange}, "writer of format 'x' must be"),
        ((*FACTS, _detect), {"writer": Writer(Layout(_arrange))}, "must have a reader"),
    ],
)
def test_invalid_formats_are_refused(args: Any, fields: Any, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(TypeError, match=message):
            Format(*args, **fields)


@pytest.mark.parametrize("name", moved_modules.ALIASES)
def test_an_old_module_is_the_new_one(name: str) -> None:
    sys.modules.pop(f"ckptcore.{name}", None)
    with pytest.warns(DeprecationWarning, match="has moved to") as caught:
        found = importlib.import_module(f"ckptcore.{name}")
    assert found is importlib.import_module(f"ckptcore.{moved_modules.ALIASES[name]}")
    assert found.__spec__ is not None
    assert found.__spec__.name == found.__name__  # the module of today stays as it was
    assert len(caught) == 1
    assert name not in ckptcore.__all__, "an alias would take the place of a public function"


def test_other_old_modules_name_the_new_ones() -> None:
    for room, modules in moved_modules.ROOMS.items():
        assert importlib.util.find_spec(f"ckptcore.{room}") is not None
        for old_name in modules.split():
            with pytest.raises(ModuleNotFoundError, match=rf"moved into the package ckptcore\.{room};"):
                importlib.import_module(f"ckptcore.{old_name}")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from ckptcore import staging", "ckptcore.staging has moved into the package ckptcore.conversion"),
        ("import ckptcore.formats._dcpread", "ckptcore.formats._dcpread was private"),
        ("from ckptcore.topology import Topology", "cannot import Topology from ckptcore.topology"),
        ("from ckptcore.formats.dcp import FORMAT", "by_name gives a format"),
        ("import ckptcore.nosuch", "No module named 'ckptcore.nosuch'"),
        ("from ckptcore import nosuch", "cannot import name 'nosuch' from 'ckptcore'"),
        ("from ckptcore.formats import nosuch", "cannot import name 'nosuch' from 'ckptcore.formats'"),
    ],
)
def test_unknown_modules_and_names(code: str, message: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(code, {})
    assert message in str(caught.value)


def test_the_registry_lists_each_format_once() -> None:
    found = registry().formats
    assert len({f.name for f in found}) == len(found)
