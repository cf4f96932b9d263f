"""Find the samples, which are real checkpoints, with their expected tensors.

A sample is a folder with a checkpoint as its tool wrote it, and beside it the truth, made from the
in-memory model and not from the checkpoint: ``expected*.safetensors``, and ``expected_all.pt``
for the dtypes that safetensors has no name for.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
import tarfile
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import zstandard

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
ARCHIVES = sorted(FIXTURES.glob("*.tar.zst"))
RANK_LOCAL = re.compile(r"__\d+\.metadata")

# One tensor as compared here: torch's dtype name, shape, row-major little-endian bytes.
Value = tuple[str, tuple[int, ...], bytes]
Tensors = dict[str, Value]

# The spelling in a safetensors header, as the safetensors library documents it.
SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample folder. corpus: from ``--corpus``, not from this repository."""

    name: str
    root: Path
    corpus: bool = False

    @property
    def dcp_folders(self) -> tuple[Path, ...]:
        """Every folder inside that holds files of torch.distributed.checkpoint, natural order."""
        found = {
            p.parent
            for p in self.root.rglob("*")
            if p.name in {".metadata", ".metadata.tmp"}
            or p.suffix == ".distcp"
            or RANK_LOCAL.fullmatch(p.name)
        }
        return tuple(sorted(found))

    @property
    def checkpoints(self) -> list[Path]:
        """The paths that a user of the sample would give on the command line."""
        inside = [p for p in sorted(self.root.iterdir()) if not p.name.startswith("expected")]
        return [p for p in inside if p.is_dir() or p.suffix in {".ckpt", ".pt", ".safetensors"}]

    @property
    def expected(self) -> tuple[Path, ...]:
        """The truth's files."""
        names = sorted(p for p in self.root.iterdir() if p.name.startswith("expected"))
        return tuple(p for p in names if p.suffix in {".safetensors", ".pt"})

    @property
    def is_simple(self) -> bool:
        """Whether it is what CONTRIBUTING.md asks for: one checkpoint, and one file of the whole truth."""
        return (self.root / "ckpt").is_dir() and (self.root / "expected.safetensors").is_file()

    @property
    def megatron(self) -> bool:
        """Whether Megatron-Core wrote it: torch files inside another format's folder."""
        marks = [*self.root.rglob("metadata.json"), *self.root.rglob("latest_checkpointed_iter*")]
        return any("sharded_backend" in p.read_text(errors="replace") for p in marks)


SAMPLES: pytest.StashKey[list[Sample]] = pytest.StashKey()


def unpack(under: Path, archive: Path) -> Path:
    """The folder with an archive's samples; made once, safe against other processes doing so."""
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    target = under / f"{archive.name.split('.')[0]}-{digest}"
    if target.is_dir():
        return target
    under.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=under))
    with archive.open("rb") as packed:
        plain = zstandard.ZstdDecompressor().stream_reader(packed).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        # Python before 3.11.4 has no filters: https://peps.python.org/pep-0706/
        tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        tar.extractall(staging)
    try:
        os.rename(staging, target)
    except OSError:  # another process was first
        if not target.is_dir():
            raise
        shutil.rmtree(staging)
    return target


def discover(archived: list[Path], corpus: Path | None) -> list[Sample]:
    """Every sample: those of the repository, then those of the corpus."""
    origins = [FIXTURES / "torch", *archived]
    origins += [p for p in sorted(FIXTURES.iterdir()) if p.is_dir() and p not in origins]
    own = [
        Sample(p.name, p)
        for folder in origins
        for p in sorted(folder.iterdir())
        if p.is_dir() and _is_sample(p)
    ]
    if corpus is None:
        return own
    if not corpus.is_dir():
        raise pytest.UsageError(f"--corpus {corpus}: no such folder")
    found = [Sample(f"corpus/{p.relative_to(corpus)}", p, corpus=True) for p in sorted(sample_roots(corpus))]
    if not found:
        raise pytest.UsageError(f"--corpus {corpus}: no folder with an expected* file inside")
    return own + found


def sample_roots(corpus: Path) -> Iterator[Path]:
    """Sample folders, ``<sample>/`` or ``<family>/<sample>/``: the truth or a checkpoint inside."""
    for first in sorted(p for p in corpus.iterdir() if p.is_dir()):
        if _is_sample(first):
            yield first
            continue
        yield from (p for p in sorted(first.iterdir()) if p.is_dir() and _is_sample(p))


def _is_sample(folder: Path) -> bool:
    return any(p.name.startswith("expected") for p in folder.iterdir()) or bool(
        [p for p in folder.iterdir() if p.is_dir() and p.name.startswith(("ckpt", "step", "iter"))]
    )


def tree_digest(folder: Path) -> str:
    """A digest over every name, type, mode, link target and byte below a folder (or of a file)."""
    total = hashlib.blake2b()
    if not folder.is_dir():
        return hashlib.blake2b(folder.read_bytes()).hexdigest()
    for path in sorted(folder.rglob("*")):
        facts: list[Any] = [str(path.relative_to(folder)), oct(path.lstat().st_mode)]
        total.update(repr(facts).encode())
        if path.is_symlink():
            total.update(os.readlink(path).encode())
        elif path.is_file():
            total.update(hashlib.blake2b(path.read_bytes()).digest())
    return total.hexdigest()


def read_safetensors(path: Path) -> Tensors:
    """The tensors of a safetensors file or a folder of them, read with nothing but its own page."""
    if path.is_dir():
        out: Tensors = {}
        for part in sorted(path.glob("*.safetensors")):
            more = read_safetensors(part)
            assert not out.keys() & more.keys(), f"{part} repeats {sorted(out.keys() & more.keys())}"
            out |= more
        return out
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    covered = 0
    out = {}
    for name, row in sorted(header.items(), key=lambda kv: kv[1]["data_offsets"]):
        start, stop = row["data_offsets"]
        assert start == covered, f"{path}: {name} starts at {start}, the one before ends at {covered}"
        covered = stop
        out[name] = (SAFETENSORS_DTYPES[row["dtype"]], tuple(row["shape"]), body[start:stop])
    assert covered == len(body), f"{path}: {len(body)} bytes of data, {covered} in use"
    return out


def read_torch(path: Path, *, trusted: bool = False) -> dict[str, Any]:
    """What torch.load makes of a file. trusted: written by this test or a committed sample."""
    import torch

    with warnings.catch_warnings():
        # "ComplexHalf support is experimental": its bytes are not.
        warnings.filterwarnings("ignore", "ComplexHalf")
        return dict(torch.load(path, weights_only=not trusted))


def value(tensor: Any) -> Value:
    """A torch tensor as it is compared here."""
    import torch

    plain = tensor.detach()
    if plain.is_complex():
        plain = plain.resolve_conj()
    plain = plain.resolve_neg().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw


def flatten(tree: Any, *, descend_tuples: bool = True) -> dict[str, Any]:
    """Leaves by dotted path; the keys that torch.distributed.checkpoint gives them."""
    out: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        items: list[tuple[Any, Any]] | None = None
        if isinstance(node, Mapping):
            items = list(node.items())
        elif isinstance(node, list) or (descend_tuples and isinstance(node, tuple)):
            items = list(enumerate(node))
        if items is None:
            assert path not in out, f"two leaves are called {path}"
            out[path] = node
            return
        for key, child in items:
            walk(child, f"{path}.{key}" if path else str(key))

    walk(tree, "")
    return out


def tensors_of(tree: Any) -> Tensors:
    """The tensors of a tree by dotted path."""
    import torch

    return {k: value(v) for k, v in flatten(tree).items() if isinstance(v, torch.Tensor)}


@cache
def expected_tensors(path: Path) -> Tensors:
    """The tensors of one truth file; ``parameter::moment`` is spelled as optimizers save it."""
    if path.suffix == ".safetensors":
        found = read_safetensors(path)
    else:
        found = tensors_of(read_torch(path, trusted=True))
    return {f"state.{k.replace('::', '.')}" if "::" in k else k: v for k, v in found.items()}


def prefix_of(truth: Tensors, found: Tensors) -> str | None:
    """What the checkpoint puts before every name of the truth; None where it does not hold it.

    Lightning and Accelerate store the model under ``model.``; the truth names are the model's own.
    """
    if truth.keys() <= found.keys():
        return ""
    some = min(truth, key=lambda k: (sum(f.endswith(k) for f in found), k))
    fits = [
        p
        for p in sorted({f.removesuffix(some) for f in found if f.endswith(some)})
        if p.endswith(".") and all(p + k in found for k in truth)
    ]
    assert len(fits) <= 1, f"more than one part of the checkpoint has these names: {fits}"
    return fits[0] if fits else None


def differences(truth: Tensors, found: Tensors, prefix: str = "") -> list[str]:
    """One line per tensor of the truth that is missing or not bit-equal."""
    out = []
    for name, (dtype, shape, raw) in truth.items():
        other = found.get(prefix + name)
        if other is None:
            out.append(f"{name}: missing")
        elif other[:2] != (dtype, shape):
            out.append(f"{name}: {dtype}{list(shape)} became {other[0]}{list(other[1])}")
        elif other[2] != raw:
            at = next(i for i, (a, b) in enumerate(zip(raw, other[2], strict=False)) if a != b)
            out.append(f"{name}: {dtype}{list(shape)} differs first at byte {at}")
    return out


def contents(path: Path) -> dict[str, bytes]:
    """Every byte of an output but the one part that may differ: the README's provenance."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != "README.md"
    }


def seed_of(request: pytest.FixtureRequest) -> int:
    """The seed of tests on fresh checkpoints: that of ``--seed``, else a new one."""
    given = request.config.getoption("--seed")
    return int(given) if given is not None else random.SystemRandom().randrange(1 << 30)
