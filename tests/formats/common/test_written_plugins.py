"""Use plug-ins that write: one file of any suffix, and folders for a mesh; invalid formats are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from ckptcore.core.manifest import Manifest
from ckptcore.formats import Arrangement, Builder, Format, Layout, Reader, Source, Writer, registry

# A format that is written, too, and always one file: a line of JSON, then the tensors' bytes.
FLAT = """
import json
from ckptcore.formats import (
    Box, Builder, Evidence, FileLayout, Format, Item, Layout, Literal, Reader, Slot, TensorSpec, View, Writer,
)

NAME = "flat"

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

LAYOUT = Layout(arrange, nests=True, place=place)
FORMAT = Format(NAME, "flat", "a line", detect, Reader(read, checksums="a sum"),
                Writer(LAYOUT, for_mesh=LAYOUT, single_file=True), versions=("2", "1"))
"""


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


@pytest.mark.soak
def test_single_file_formats(tmp_path: Path) -> None:
    """A plug-in writes one file of any suffix, and on a mesh a folder."""
    install(tmp_path / "site", flat=FLAT)
    code = f"""
import ckptcore, json, pathlib, torch
from safetensors.torch import save_file
root = pathlib.Path({str(tmp_path)!r})
save_file({{"a.w": torch.arange(6.0), "n": torch.tensor([7])}}, root / "model.safetensors")
for verb, more in (("consolidate", {{}}), ("reshard", {{"mesh": "fsdp=2"}})):
    target = root / verb
    ckptcore.convert(str(root / "model.safetensors"), str(target), to="flat", verb=verb, **more)
    read = ckptcore.open(str(target))
    assert read.format == "flat", read.format
    assert sorted(t.fqn for t in read.tensors) == ["moved.a.w", "moved.n"]
    assert ckptcore.read(read, "moved.a.w").tolist() == [0, 1, 2, 3, 4, 5]
target = root / "flat.bin"  # one file may have any suffix, also one that other formats use
ckptcore.convert(str(root / "model.safetensors"), str(target), to="flat")
assert target.is_file() and ckptcore.open(str(target)).format == "flat"
ckptcore.convert(str(root / "model.safetensors"), str(target), to="flat", overwrite=True)
for to, target in (("dcp", "x.safetensors"), ("lightning", "y.safetensors")):
    try:
        ckptcore.convert(str(root / "model.safetensors"), str(root / target), to=to, verb="consolidate")
    except ckptcore.CkptError as error:
        print(error.code, error.message.split(" the dest")[0])
try:
    ckptcore.convert(str(root / "model.safetensors"), str(root / "x"), to="flat", verb="export")
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
    assert no_export == "usage cannot export to flat: an export has only the model"
    assert no_mesh.startswith("usage one of: dcp, ")
    assert no_mesh.endswith(", flat")
    assert (tmp_path / "consolidate").is_file()
    assert [p.name for p in (tmp_path / "reshard").iterdir()] == ["all.flat"]


def _detect(source: Source) -> None:
    return None


def _read(source: Source) -> Manifest:
    """The manifest of a folder without tensors."""
    return Builder().build("x", source.store.url, {})


def _arrange(request: Arrangement) -> tuple[()]:
    return ()


FACTS = ("x", "an x", "`x`")


@pytest.mark.parametrize(
    ("args", "fields", "message"),
    [
        ((*FACTS, _detect), {"nosuch": 1}, "nosuch"),
        ((*FACTS, _detect, _read), {}, r"reader of format 'x' must be a Reader \(got function\)"),
        ((*FACTS, _detect), {"reader": Reader(_read), "writer": _arrange}, "writer of format 'x' must be"),
        ((*FACTS, _detect), {"writer": Writer(Layout(_arrange))}, "must have a reader"),
    ],
)
def test_invalid_formats_are_refused(args: Any, fields: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Format(*args, **fields)


@pytest.mark.parametrize(
    ("code", "message"),
    [
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
