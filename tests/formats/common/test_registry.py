"""Test the registry: defaults, and what other packages may add."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from unittest import SkipTest

import pytest
import samples
from npy_plugin import PLUGIN
from paths import ROOT
from samples import FIXTURES

from ckptcore.errors import UnsupportedFormat, UsageError
from ckptcore.formats import FORMATS, registry
from ckptcore.formats.plugins import entry_points, register
from ckptcore.testing import CASES, DAMAGES, Case, Sample, written_and_read_back


def install(folder: Path, entries: str) -> None:
    """The files that pip would install for a package with these entry points."""
    (folder / "npy_plugin.py").write_text(PLUGIN)
    info = folder / "npy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npy-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ckptcore.formats]\n{entries}\n")


def test_every_own_format_is_its_own_default() -> None:
    found = registry()
    assert found.formats[: len(FORMATS)] == FORMATS
    for f in FORMATS:
        assert found.find("read", f.name) is f
        assert found.find("read", f.name, f.versions[0]) is f
        assert found.package(f.name) == "ckptcore"
        assert f.abilities.writes == (f.writer is not None)
    for action, name, version in [("read", "nosuch", None), ("read", "dcp", "99")]:
        with pytest.raises(UsageError) as caught:
            found.find(action, name, version)  # type: ignore[arg-type]
        assert caught.value.hint


def test_a_package_adds_a_format_and_proves_it(tmp_path: Path) -> None:
    install(tmp_path, "npy = npy_plugin:FORMAT")
    test = tmp_path / "test_npy.py"
    test.write_text(
        """
import numpy, pytest, safetensors.numpy
from ckptcore.testing import CASES, Sample

@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_npy(case, tmp_path):
    truth = {"model.a": numpy.arange(12, dtype="<f4").reshape(3, 4), "model.n": numpy.array([7], "<i8")}
    (tmp_path / "src").mkdir()
    for name, value in truth.items():
        numpy.save(tmp_path / "src" / f"{name}.npy", value)
    safetensors.numpy.save_file(truth, tmp_path / "truth.safetensors")
    # Nothing in a folder of arrays says how many there should be.
    lost = frozenset({"removed"})
    case(Sample(tmp_path / "src", tmp_path / "truth.safetensors", "npy_folder", lost), tmp_path)
"""
    )
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(
        run, env=_env(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(CASES) - 1} passed, 1 skipped" in done.stdout, done.stdout[-500:]


def test_an_unusable_package_is_named_and_skipped(tmp_path: Path) -> None:
    install(tmp_path, "a = npy_plugin:NOT_A_FORMAT\nb = npy_plugin:MISSING\nc = npy_plugin:FORMAT")
    command = [sys.executable, "-m", "ckptcore", "formats", "--output", "json"]
    done = subprocess.run(
        command, env=_env(tmp_path), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    assert [b["package"] for b in listed["broken"]] == ["npy-plugin", "npy-plugin"]
    assert listed["formats"][-1]["name"] == "npy_folder"
    assert listed["formats"][-1]["package"] == "npy-plugin"


def test_a_taken_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        dist = None
        value = "other:FORMAT"

        def load(self) -> object:
            return FORMATS[0]

    monkeypatch.setattr("ckptcore.formats.plugins.entry_points", lambda group: [Point()])
    found = register(FORMATS)
    assert found.formats == FORMATS
    assert "already provided by ckptcore" in found.broken[0][1]


def test_packages_are_asked_where_one_may_have_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: asked.append(group) or [])
    # The libraries of other tests add finders (the backport `importlib_metadata` does), and then we ask.
    folders = [f for f in sys.meta_path if f is PathFinder or not hasattr(f, "find_distributions")]
    monkeypatch.setattr("sys.meta_path", folders)
    monkeypatch.setattr("sys.path", [str(tmp_path), str(tmp_path / "none")])
    assert list(entry_points("our.group")) == asked == []
    install(tmp_path, "npy = npy_plugin:FORMAT")
    assert list(entry_points("our.group")) == asked == []
    list(entry_points("ckptcore.formats"))
    assert asked.pop() == "ckptcore.formats"
    (tmp_path / "packages.zip").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path / "packages.zip")])
    list(entry_points("our.group"))
    assert asked.pop() == "our.group"
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.meta_path", [*sys.meta_path, type("Finder", (), {"find_distributions": None})])
    list(entry_points("our.group"))
    assert asked == ["our.group"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", ["dcp_dims_4r", "dcp_threads_2r"])
def test_our_own_formats_keep_the_shipped_conformance(case: Case, name: str, tmp_path: Path) -> None:
    folder = FIXTURES / "torch" / name
    try:
        case(Sample(folder / "ckpt", folder / "expected.safetensors", "dcp"), tmp_path)
    except SkipTest as skip:
        pytest.skip(str(skip))


# Samples of which files may be damaged: the whole files beside these shards are no part of what is read, and
# what is wrong with them is a warning.
UNDETECTABLE = {"hf_bugs_0d_4r": frozenset(DAMAGES)}
# The cases open the folder that they are given, and not one that it names.
ROOTS = {"legacy_llama_tp2pp2_0.15.3": "iter_0000100", "legacy_mixtral_ep2pp2_0.15.3": "iter_0000100"}
# What is written is a step that a run begins from, with the model's config, which the sample has not.
WITHOUT_CONFIG = {"nanotron_tp2"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make test` does an eighth of the cases with each sample, other ones with the next."""
    if "kept" not in metafunc.fixturenames:
        return
    all_samples = metafunc.config.stash[samples.SAMPLES]
    found = [s for s in all_samples if not s.corpus and not s.dcp_folders and s.is_simple]
    pairs = [
        pytest.param(
            case, sample, id=f"{sample.name}-{case.__name__}", marks=pytest.mark.soak if (n + m) % 8 else []
        )
        for n, sample in enumerate(found)
        for m, case in enumerate(CASES)
    ]
    metafunc.parametrize(("case", "kept"), pairs)


def test_samples_keep_the_shipped_conformance(case: Case, kept: samples.Sample, tmp_path: Path) -> None:
    """The sample of a new format is among them as soon as it is in `tests/fixtures`."""
    source = kept.root / "ckpt" / ROOTS.get(kept.name, "")
    lost = UNDETECTABLE.get(kept.name, frozenset())
    sample = Sample(source, kept.root / "expected.safetensors", undetectable=lost)
    if case is written_and_read_back and kept.name in WITHOUT_CONFIG:
        with pytest.raises(UnsupportedFormat, match="without the config of its model"):
            case(sample, tmp_path)
        return
    try:
        case(sample, tmp_path)
    except SkipTest as skip:
        pytest.skip(str(skip))


def _env(folder: Path) -> dict[str, str]:
    import os

    root = ROOT
    # What this run of pytest was given is not meant for another one.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": f"{folder}{os.pathsep}{root}", "PYTHONDONTWRITEBYTECODE": "1"}
