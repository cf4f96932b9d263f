"""Every byte counts: flipping a bit of a file changes a tensor, an object or a finding, or hits structure.

Structure is what the account of the reading explains (`ckptcore.core.byte_ledger`). In a torch zip only the
fields of `Archive.unchecked` are, and in a payload only elements that no tensor has. Where it is as coarse as
a file of metadata, `CAPS` bounds what may stay unnoticed there, or the test could not fail:
`docs/reference/structure.md` lists what that is.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from samples import SAMPLES

import ckptcore
from ckptcore.core.dtype import BY_NAME
from ckptcore.core.manifest import Envelope, Manifest
from ckptcore.encodings.torchzip.archive import Archive, Window, is_zip
from ckptcore.encodings.torchzip.before_zip import BEFORE_ZIP, is_before_zip
from ckptcore.errors import CkptError
from ckptcore.formats import FORMATS

LARGEST = 64 << 10
SHORT = 300  # flips of all cases together in `make test`
SOAK = 16 << 10  # flips of a case in `make soak`: all but of the largest files
# Of a file of this kind, the share of bytes whose change may stay unnoticed.
CAPS = {
    ".metadata": 0.12,
    ".distcp": 0.12,
    ".zip": 0.12,
    ".json": 0.02,
    ".safetensors": 0.0,
    "before-zip": 0.08,
}
# Sample, and one of its files.
QKV = "model/model/decoder/0/pp_block/attn/qkv_proj"
FILES = (
    ("dcp_file_per_item_2r", ".metadata"),
    ("dcp_file_per_item_2r", "__1_0.distcp"),
    ("dcp_safetensors_fmt_2r", "__0_0.distcp"),
    ("dcp_zstd_2r", "__0_0.distcp"),
    ("api_torch_dist_0.16.1_sephint", "metadata.json"),
    ("api_torch_dist_0.16.1_sephint", "common.pt"),
    ("api_zarr_0.12.3", "optimizer.state.exp_avg.flat2d_col/.zarray"),
    ("api_zarr_0.12.3", "optimizer.state.exp_avg.flat2d_col/1.0"),
    ("api_zarr_0.12.3", "rng_state/shard_0.0_2.2.pt"),
    ("fsdp_dtensor_llama_dp4_0.19.2", ".metadata"),
    ("legacy_llama_tp2pp2_0.15.3", "iter_0000100/mp_rank_00_000/model_optim_rng.pt"),
    ("pipe2_z1_ws2", "mp_rank_00_model_states.pt"),
    ("pipe2_z1_ws2", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    ("pipe2_z1_ws2_universal", "zero/0.lin.weight/fp32.pt"),
    ("v3_bf16params_ws2", ".metadata.json"),
    ("v3_bf16params_ws2", "train/rank0.pt"),
    ("olmo1_local_ws2", "metadata.yaml"),
    ("olmo1_local_ws2", "train/rank1.pt"),
    ("olmo1_unsharded_safetensors", "train.pt"),
    ("v01_dtensor_ws4", "metadata.json"),
    ("v01_dtensor_ws4", "rank_1.safetensors"),
    ("hf_sharded_4r", "shard-00001-model-00001-of-00001.safetensors"),
    ("hf_fp8_block", "model-00001-of-00001.safetensors"),
    ("hf_fp8_block", "model.safetensors.index.json"),
    ("lightning_fabric_mp_nested_2r", "meta.pt"),
    ("accelerate_fsdp2_2r", "scheduler.bin"),
    ("before_zip", "model.pt"),
    ("meta_llama3_tp2", "consolidated.01.pth"),
    ("tc_default_2r", "model_1.pt"),
    ("tc_safetensors_2r", "model_0.safetensors"),
    ("nanotron_tp2", "checkpoint_metadata.json"),
    ("dit_pipeline", "model_index.json"),
    ("dit_pipeline", "vae/diffusion_pytorch_model.safetensors"),
    ("nanotron_tp2", f"{QKV}/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"),
)


def _safetensors(folder: Path) -> None:
    about = {"format": "pt", "rank": "8", "note": "a user's text"}
    save_file(
        {"b": torch.arange(5.0), "a": torch.ones(3, dtype=torch.int64)}, folder / "x.safetensors", about
    )


def _torch_save(folder: Path) -> None:
    state = {"w": torch.arange(12.0)[2:5], "lr": 0.1, "names": ["a", "b"], "n": torch.tensor(3)}
    torch.save(state, folder / "model.pt")


def _rank_files(folder: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.ones(4), "rng": torch.arange(5) + rank}, folder / f"model_rank{rank}.pt")


MADE: dict[str, tuple[Callable[[Path], None], str]] = {
    "safetensors": (_safetensors, "x.safetensors"),
    "torch_save": (_torch_save, "model.pt"),
    "torch_ranks": (_rank_files, "model_rank1.pt"),
}
ALIKE = {"torch_dcp", "deepspeed_universal", "deepspeed_universal_zero3"}  # read as dcp and deepspeed are
CASES = [*FILES, *((name, path) for name, (_, path) in MADE.items())]


def _id(case: tuple[str, str]) -> str:
    return f"{case[0]}-{Path(case[1]).name}"


@dataclass(frozen=True)
class Seen:
    """What is reported about a checkpoint; the text of an error, where it cannot be opened."""

    error: str = ""
    digest: str = ""
    findings: frozenset[tuple[str, str | None, str | None, str]] = frozenset()


def look(root: Path) -> tuple[Seen, Manifest | None]:
    try:
        manifest = ckptcore.open(str(root))
        report = ckptcore.check(manifest, "bytes", workers=1)
    except CkptError as error:
        return Seen(f"{error.code}: {error.message}"), None
    findings = frozenset((f.code, f.fqn, f.file, f.message) for f in report.findings)
    return Seen("", manifest.digest, findings), manifest


def values(manifest: Manifest) -> str:
    """A digest of all tensors that can be read."""
    readable = [t.fqn for t in manifest.tensors]
    return ckptcore.fingerprint(manifest, include=readable).fingerprint if readable else ""


class Structure:
    """Where a change of one file's bytes may stay unnoticed."""

    def __init__(self, manifest: Manifest, root: Path, file: str) -> None:
        self._raw, self._manifest, self._file = (root / file).read_bytes(), manifest, file
        assert manifest.ledger is not None
        self._free = np.zeros(len(self._raw), np.bool_)
        if is_zip(self._raw) and not file.endswith(".distcp"):
            self._zip(0, len(self._raw))
        else:
            for spans in manifest.ledger.structure.get(file, ()):
                for start, end in spans.tolist():
                    self._free[start:end] = True
        for start, end in self._items():
            self._free[start:end] = True

    def __contains__(self, at: int) -> bool:
        return bool(self._free[at])

    @property
    def share(self) -> float:
        return float(self._free.mean())

    def _zip(self, start: int, length: int) -> None:
        raw = self._raw[start : start + length]
        archive = Archive(Window(lambda at, n: raw[at : at + n], len(raw)), self._file)
        for first, end in (archive.unchecked() + start).tolist():
            self._free[first:end] = True

    def _items(self) -> Iterator[tuple[int, int]]:
        """Mark what is around the payloads in items, and yield elements that are behind an array's end."""
        manifest, items = self._manifest, self._manifest.items
        number = next((n for n, f in enumerate(manifest.files) if f.path == self._file), -1)
        for n in np.flatnonzero(items.file == number).tolist():
            item = items[n]
            if item.envelope is Envelope.TORCHZIP and not item.codec:
                self._zip(item.start, item.length)
            elif item.codec:  # an encoder may write one content in several ways
                yield item.start, item.start + item.length
            elif item.envelope is Envelope.SAFETENSORS:
                header = int.from_bytes(self._raw[item.start : item.start + 8], "little")
                yield item.start, item.start + 8 + header
            elif not self._file.endswith((".pt", ".bin")):
                yield from self._excess(n, item.start, item.length)

    def _excess(self, item: int, start: int, length: int) -> Iterator[tuple[int, int]]:
        manifest = self._manifest
        for row in np.flatnonzero(manifest.chunks.item == item).tolist():
            spec = manifest.tensors[int(manifest.chunks.tensor[row])]
            chunk = next(c for c in manifest.chunks_of(int(manifest.chunks.tensor[row])) if c.item == item)
            if chunk.view is None or chunk.view.strides is None:
                continue
            width, used = BY_NAME[spec.dtype].itemsize, np.zeros(length, np.bool_)
            shape = [*chunk.box.shape, width]
            view = np.lib.stride_tricks.as_strided(
                used[chunk.view.start :], shape, [*(s * width for s in chunk.view.strides), 1]
            )
            view[...] = True
            yield from ((start + at, start + at + 1) for at in np.flatnonzero(~used).tolist())


def placed(request: pytest.FixtureRequest, case: tuple[str, str], folder: Path) -> tuple[Path, str]:
    """A private copy of a case's checkpoint, and the file's path in it."""
    name, file = case
    if name in MADE:
        folder.mkdir()
        MADE[name][0](folder)
        return (folder / file if name == "safetensors" else folder), file
    sample = next(s for s in request.config.stash[SAMPLES] if s.name == name)
    source = next(c for c in sample.checkpoints if (c / file).is_file())
    return Path(shutil.copytree(source, folder)), file


def test_every_reader_has_a_case(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    roots = (placed(request, case, tmp_path / str(n))[0] for n, case in enumerate(CASES))
    readable = {f.name for f in FORMATS if f.reader} - ALIKE
    assert {ckptcore.open(str(root)).format for root in roots} == readable, (
        "give each a row in FILES: a sample, and one of its files"
    )


@pytest.mark.parametrize("case", CASES, ids=_id)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["some", "all"])
def test_a_flipped_bit(
    request: pytest.FixtureRequest, case: tuple[str, str], every: bool, tmp_path: Path
) -> None:
    root, file = placed(request, case, tmp_path / "ckpt")
    good, manifest = look(root)
    assert manifest is not None, good.error
    folder = root if root.is_dir() else root.parent
    below = Path(manifest.root).relative_to(folder).as_posix()  # a tracker may name a folder of steps
    structure = Structure(manifest, folder / below, file.removeprefix(f"{below}/"))
    truth, raw = values(manifest), (folder / file).read_bytes()
    assert len(raw) <= LARGEST
    kind = ".zip" if is_zip(raw) and not file.endswith(".distcp") else Path(file).suffix or Path(file).name
    kind = "before-zip" if is_before_zip(raw[:BEFORE_ZIP]) else kind
    cap = CAPS.get(kind, 0.0)
    if kind == ".zip":
        assert structure.share <= cap, "the fields that are not checked are few"
    rng = random.Random(f"{case[0]} {file}")
    places = rng.sample(range(len(raw)), min(SOAK if every else SHORT // len(CASES), len(raw)))
    unnoticed = []
    for at in sorted(places):
        bit = rng.randrange(8)
        (folder / file).write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
        seen, changed = look(root)
        if seen == good and changed is not None and values(changed) == truth:
            unnoticed.append(at)
    outside = [at for at in unnoticed if at not in structure]
    assert not outside, f"{len(outside)} of {len(places)} flips: {outside[:10]}"
    # Of few flips, a few more than the share may happen to hit it.
    assert len(unnoticed) <= cap * len(places) + (0 if every else 3), unnoticed[:20]
