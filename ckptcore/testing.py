"""Test that a format of another package conforms.

For example::

    import pytest
    from ckptcore.testing import CASES, Sample

    SAMPLE = Sample(Path("tests/step-10"), Path("tests/expected.safetensors"))

    @pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
    def test_my_format(case, tmp_path):
        case(SAMPLE, tmp_path)

A sample is a real checkpoint from the real writer. The expected tensors beside it were saved from the model
in memory and not from the checkpoint. A case raises AssertionError with what is wrong, and `Skip` where it
does not apply.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import SkipTest as Skip

from ckptcore.api import check, convert, read
from ckptcore.api import open as open_checkpoint
from ckptcore.core.manifest import Manifest
from ckptcore.errors import LEVELS, CkptError
from ckptcore.formats import detect, open_source, registry

if TYPE_CHECKING:
    import torch

__all__ = ["CASES", "DAMAGES", "Case", "Sample", "Skip"]
_MOST_DAMAGES = 40


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint with its expected tensors.

    Attributes:
        source: Folder or file of the checkpoint.
        expected: A safetensors file with the full tensors.
        format: Name of the format that must recognise it, or None for any.
        undetectable: Damages (keys of `DAMAGES`) that nothing in the format can show.
    """

    source: Path
    expected: Path
    format: str | None = None
    undetectable: frozenset[str] = frozenset()


Case = Callable[[Sample, Path], None]


def recognised(sample: Sample, tmp: Path) -> None:
    """Check that exactly one format recognises the sample, and gives evidence."""
    recognised_format, evidence = detect(open_source(str(sample.source)))
    assert sample.format in (None, recognised_format.name), (
        f"recognised as {recognised_format.name}: {evidence.because}"
    )
    assert evidence.because, "the format gives no evidence"


def described_without_torch(sample: Sample, tmp: Path) -> None:
    """Check that the manifest has every expected tensor with its dtype and shape."""
    manifest = _opened(sample)
    truth = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in _truth(sample)}
    listed = {t.fqn: (t.dtype, t.shape) for t in manifest.tensors}
    wrong = sorted(n for n in truth if listed.get(n) != truth[n])
    assert not wrong, f"{wrong[0]}: expected {truth[wrong[0]]} (got {listed.get(wrong[0])})"
    assert Manifest.load(manifest.dump()).digest == manifest.digest


def sound_at_every_level(sample: Sample, tmp: Path) -> None:
    """Check that the undamaged sample has no finding that is an error."""
    manifest = _opened(sample)
    for level in LEVELS:
        report = check(manifest, level)
        assert report.ok, f"level {level}: {[f.message for f in report.findings][:3]}"


def read_as_it_is(sample: Sample, tmp: Path) -> None:
    """Check that every expected tensor is read bit for bit."""
    manifest = _opened(sample)
    for name, tensor in _truth(sample):
        assert _bits(read(manifest, name)) == _bits(tensor), f"{name} differs"


def consolidated(sample: Sample, tmp: Path) -> None:
    """Check that a conversion holds every expected tensor bit for bit and leaves the source unchanged."""
    from safetensors.torch import load_file

    before = _contents(sample.source)
    _convert(sample.source, tmp / "out.safetensors")
    assert _contents(sample.source) == before, "the source was changed"
    tensors = load_file(tmp / "out.safetensors")
    for name, tensor in _truth(sample):
        assert name in tensors, f"{name} is missing"
        assert _bits(tensors[name]) == _bits(tensor), f"{name} differs"


def damage_is_found(sample: Sample, tmp: Path) -> None:
    """Check that a missing or truncated file is a finding or an error, and that nothing is written."""
    manifest = _opened(sample)
    used = {manifest.files[int(i)].path for i in set(manifest.items.file.tolist())}
    root = Path(manifest.root)
    for n, (name, damage, damaged) in enumerate(_damages(root, sorted(used), tmp)):
        if n == _MOST_DAMAGES:
            break
        if damage in sample.undetectable:
            continue
        where = f"{name} {damage}"
        source = damaged / sample.source.relative_to(root) if sample.source != root else damaged
        target = tmp / "never.safetensors"
        with suppress(CkptError):  # an error when it is opened counts, too
            assert not check(open_checkpoint(str(source)), "bytes").ok, f"{where}: no finding"
        try:
            _convert(source, target)
        except CkptError:
            assert not target.exists(), f"{where}: an output was written"
        else:
            raise AssertionError(f"{where}: it was converted without an error")


def written_and_read_back(sample: Sample, tmp: Path) -> None:
    """Check that what the format writes is recognised, complete and bit-equal."""
    recognised_format, _ = detect(open_source(str(sample.source)))
    if recognised_format.writer is None:
        raise Skip(f"{recognised_format.name} is not written")
    target = tmp / "again"
    _convert(sample.source, target, to=recognised_format.name)
    manifest = open_checkpoint(str(target))
    assert manifest.format == recognised_format.name, f"the output is recognised as {manifest.format}"
    assert check(manifest, "bytes").ok
    for name, tensor in _truth(sample):
        assert _bits(read(manifest, name)) == _bits(tensor), f"{name} differs"


def registered(sample: Sample, tmp: Path) -> None:
    """Check that the format is registered, and that its abilities fit its writer."""
    recognised_format, _ = detect(open_source(str(sample.source)))
    assert registry().find("read", recognised_format.name) is recognised_format
    assert recognised_format.abilities.reads
    assert recognised_format.abilities.writes == (recognised_format.writer is not None)


CASES: tuple[Case, ...] = (
    registered,
    recognised,
    described_without_torch,
    sound_at_every_level,
    read_as_it_is,
    consolidated,
    damage_is_found,
    written_and_read_back,
)


def _opened(sample: Sample) -> Manifest:
    return open_checkpoint(str(sample.source))


def _convert(source: Path, target: Path, to: str = "") -> None:
    convert(str(source), str(target), to=to)


def _truth(sample: Sample) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(sample.expected, "pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no dict
            yield name, file.get_tensor(name)


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    import torch

    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return str(tensor.dtype), tuple(tensor.shape), raw


def _contents(source: Path) -> dict[str, bytes]:
    if source.is_file():
        return {source.name: source.read_bytes()}
    return {str(p.relative_to(source)): p.read_bytes() for p in sorted(source.rglob("*")) if p.is_file()}


def _damages(root: Path, used: list[str], tmp: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield the file, the damage, and the copy of the checkpoint that has it."""
    for name in used:
        for damage, change in DAMAGES.items():
            copy = tmp / "damaged"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(root, copy)
            if change(copy / name):
                yield name, damage, copy


def _remove(path: Path) -> bool:
    path.unlink()
    return True


def _truncate(path: Path) -> bool:
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    return bool(data)


def _halve(path: Path) -> bool:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return len(data) > 1


DAMAGES = {"removed": _remove, "cut by one byte": _truncate, "cut in half": _halve}
