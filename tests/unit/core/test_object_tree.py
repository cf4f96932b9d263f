"""Objects: the form that docs/reference/objects.md specifies is the one that is written and read."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from safetensors import safe_open
from safetensors.torch import save_file

import ckptcore
from ckptcore.core import object_tree
from ckptcore.core.object_tree import Named, Refused, TensorRef, decode, encode
from ckptcore.errors import UnreadablePart
from ckptcore.formats.huggingface.folder import OBJECTS, OBJECTS_VERSION

PAGE = (ROOT / "docs/reference/objects.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?:`(?P<kind>\w+)`)? ?\| `(?P<form>.+?)` \| (?P<value>.+) \|$", re.MULTILINE)
KINDS, NAMED = (list(ROW.finditer(part)) for part in PAGE.split("\n## ")[2:4])
NAMES: dict[str, Any] = {"OrderedDict": OrderedDict, "TensorRef": TensorRef, "Refused": Refused}


@pytest.mark.parametrize("row", KINDS, ids=lambda row: str(row["kind"] or row["form"]))
def test_each_kind_is_what_the_page_says(row: re.Match[str]) -> None:
    form, value = json.loads(row["form"]), eval(row["value"].strip("`"), NAMES)
    assert decode(form) == value
    assert type(decode(form)) is type(value)
    assert encode(value) == form
    assert row["kind"] == (form.get("$") if isinstance(form, dict) else None)


@pytest.mark.parametrize("row", NAMED, ids=lambda row: str(row["kind"]))
def test_each_named_value_has_one_field(row: re.Match[str]) -> None:
    form = json.loads(row["form"])
    assert form.keys() == {"$", "value"}
    found = decode(form)
    assert type(found) is Named
    assert found.kind == row["kind"]
    assert encode(found) == form


def test_the_page_has_every_kind() -> None:
    assert {row["kind"] for row in KINDS} - {None} == set(object_tree._DECODE)
    # Kinds that the code names; those of trainers' own containers are no values of theirs.
    root = Path(ckptcore.__file__).parent
    texts = "".join(p.read_text(encoding="utf-8") for p in (root / "encodings").rglob("*.py"))
    texts += "".join(p.read_text(encoding="utf-8") for p in (root / "formats/megatron").rglob("*.py"))
    named = set(re.findall(r"\bNamed\(\s*\"(\w+)\"", texts))
    assert named
    assert named <= {row["kind"] for row in NAMED}


def test_a_version_is_written(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "step": 7}, tmp_path / "model.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    for name in ("model", "plain"):
        ckptcore.convert(str(tmp_path / f"{name}.pt"), str(tmp_path / f"{name}.safetensors"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", OBJECTS: '{"step":7}', OBJECTS_VERSION: "1"}
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("version", [None, "1"])
def test_files_of_known_versions_are_read(version: str | None, tmp_path: Path) -> None:
    metadata = {OBJECTS: '{"step": 7}'} | ({OBJECTS_VERSION: version} if version else {})
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", metadata)
    manifest = ckptcore.open(str(tmp_path))
    assert [(b.key, b.tree) for b in manifest.blobs] == [("step", 7)]


@pytest.mark.parametrize("version", ["2", "", "one", "01"])
def test_objects_of_another_version_are_refused_and_block_no_tensor(version: str, tmp_path: Path) -> None:
    form = '{"step": {"$": "step", "of": 2}}'
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {OBJECTS: form, OBJECTS_VERSION: version})
    source = str(tmp_path / "model.safetensors")
    manifest = ckptcore.open(source)
    assert ckptcore.read(manifest, "w").tolist() == [1, 1]
    (found,) = ckptcore.check(manifest).findings
    assert (found.code, found.fqn) == ("unreadable-part", OBJECTS)
    assert f"version must be 1 (got {version!r})" in found.message
    with pytest.raises(UnreadablePart, match=OBJECTS):
        ckptcore.convert(source, str(tmp_path / "out.safetensors"))
    assert not (tmp_path / "out.safetensors").exists()
    ckptcore.convert(source, str(tmp_path / "out.safetensors"), exclude=[OBJECTS])
    assert ckptcore.read(ckptcore.open(str(tmp_path / "out.safetensors")), "w").tolist() == [1, 1]
