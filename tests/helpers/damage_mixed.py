"""Damage folders: mix in files of another format, step or checkpoint."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from damage_sites import Cut, Row, Rows, Tree, put
from samples import FIXTURES

TABLE = Rows()


def _tensors() -> dict[str, Any]:
    import torch

    return {"stale.weight": torch.full((3, 5), 7.0), "stale.bias": torch.ones(5)}


@cache
def _safetensors() -> bytes:
    from safetensors.torch import save

    return save(_tensors(), {"format": "pt"})


@cache
def _torch_file() -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(_tensors(), out)
    return out.getvalue()


@cache
def _dcp(name: str) -> bytes:
    return (FIXTURES / "torch" / "dcp_nested_2r" / "ckpt" / name).read_bytes()


_INDEX = {
    "metadata": {"total_size": 80},
    "weight_map": dict.fromkeys(("stale.weight", "stale.bias"), "model.safetensors"),
}
_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}

# What other tools leave, by the name that they give it. Each is laid beside every sample that has none.
FOREIGN: dict[str, Callable[[], bytes]] = {
    "model.safetensors": _safetensors,
    "model-00001-of-00002.safetensors": _safetensors,
    "model.safetensors.index.json": lambda: json.dumps(_INDEX).encode(),
    "adapter_model.safetensors": _safetensors,
    "shard-00001-model-00001-of-00001.safetensors": _safetensors,
    "rank_0.safetensors": _safetensors,
    "rank_9.safetensors": _safetensors,
    "pytorch_model.bin": _torch_file,
    "pytorch_model_fsdp.bin": _torch_file,
    "model.pt": _torch_file,
    "optimizer.pt": _torch_file,
    "rank0.pt": _torch_file,
    "model_world_size_2_rank_0.pt": _torch_file,
    "common.pt": _torch_file,
    "meta.pt": _torch_file,
    "train/rank0.pt": _torch_file,
    "train/rank7.pt": _torch_file,
    "mp_rank_00/model_optim_rng.pt": _torch_file,
    ".metadata": lambda: _dcp(".metadata"),
    ".metadata.tmp": lambda: _dcp(".metadata"),
    "__0_0.distcp": lambda: _dcp("__0_0.distcp"),
    "__7_0.distcp": lambda: _dcp("__0_0.distcp"),
    "__7.metadata": lambda: _dcp(".metadata"),
    "metadata.json": lambda: json.dumps(_CONFIG).encode(),
    "integrity.json": lambda: json.dumps({"algorithm": "sha256", "files": {}}).encode(),
    "config.json": lambda: b'{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}',
    "latest_checkpointed_iteration.txt": lambda: b"7",
    "latest": lambda: b"global_step7",
    "stale.weight/.zarray": lambda: (
        b'{"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "<f4", "order": "C",'
        b' "compressor": null, "filters": null, "fill_value": null}'
    ),
    "README.md": lambda: b"# notes\n",
}


def _beside(name: str) -> Row:
    def row(tree: Tree, rng: random.Random) -> Iterator[Cut]:
        if tree.name is None and name not in tree.kinds:
            facts = {"dcp-root"} if DCP & tree.kinds.keys() else set()
            facts |= set() if any(p.startswith("train") for p in tree.kinds) else {"trainless"}
            yield Cut(name, partial(put, path=name, data=FOREIGN[name]()), frozenset(facts))

    return row


DCP = {".metadata", "__0.metadata"}


for _name in FOREIGN:
    TABLE.enter(f"foreign-{_name.lstrip('.').replace('/', '-')}", _beside(_name))


@TABLE
def other_checkpoint_beside(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Another checkpoint, of another format, unpacked into the same folder."""
    if tree.name is not None:
        return
    for other in OTHERS:
        files = [p for p in sorted(other.rglob("*")) if p.is_file()]
        names = {p.relative_to(other).as_posix(): p for p in files}
        if names and not names.keys() & tree.kinds.keys() and not _related(tree, names):
            yield Cut(other.parent.name, partial(_laid_over, names=names))


def _related(tree: Tree, names: dict[str, Path]) -> bool:
    """Whether the two are of one format, whose folders may simply join."""
    mine = {Path(p).suffix for p in tree.kinds} - {".json"}
    return bool(mine & {Path(p).suffix for p in names} - {".json"})


def _laid_over(root: Path, names: dict[str, Path]) -> None:
    for name, path in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, root / name)


OTHERS = (
    FIXTURES / "torch" / "dcp_zstd_2r" / "ckpt",
    FIXTURES / "torch" / "hf_sharded_4r" / "ckpt",
    FIXTURES / "olmo" / "v01_dtensor_ws4" / "ckpt",
    FIXTURES / "megatron" / "legacy_llama_tp2pp2_0.15.3" / "ckpt",
)


@TABLE
def file_of_another_checkpoint(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """The file of the same name of another sample of the family: another step, model or world."""
    if tree.name is not None:
        return
    family = [p for p in sorted(tree.root.parent.parent.iterdir()) if p.is_dir() and p != tree.root.parent]
    for path in tree.files():
        found = [p for s in family for p in sorted(s.glob(f"*/{path}")) if p.is_file()]
        found = [p for p in found if p.stat().st_size and p.read_bytes() != tree.read(path)]
        if found:
            other = rng.choice(found)
            facts = frozenset({"rankless"} if OBJECTS.search(path) and not tree.has_digests else set())
            where = f"{other.relative_to(tree.root.parent.parent)} over {path}"
            yield Cut(where, partial(_laid_over, names={path: other}), facts)


# Files of values that no other file speaks of.
OBJECTS = re.compile(
    r"(?:^|/)(?:(?:common|meta|train)\.pt|scheduler\.bin|random_states_\d+\.pkl|train/rank|shard_[\d._]+\.pt)"
    r"|^zero/.+\.pt$"  # of a universal folder: one tensor, or the optimizer's options
)


@TABLE
def common_state_twice(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Megatron-Core's common state as a file, beside the one inside (0.18 and before, 0.19)."""
    if b"common_state/shard_0_1" in (tree.read(".metadata") if ".metadata" in tree.kinds else b""):
        yield Cut("common.pt", partial(put, path="common.pt", data=_common_file()))


@cache
def _common_file() -> bytes:
    import argparse

    import torch

    out = io.BytesIO()
    args = argparse.Namespace(num_layers=99, hidden_size=1)
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 12345, "content_metadata": None}, out)
    return out.getvalue()


@TABLE
def tracker_names_another(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """A root's tracker tells an iteration that is not there, or nothing that is one."""
    for path in tree.kinds:
        if path.endswith("latest_checkpointed_iteration.txt"):
            for text in (b"999", b"release", b"-1", b"", b"100\n100", b"../100"):
                yield Cut(f"{text!r} in {path}", partial(put, path=path, data=text))


@TABLE
def trainer_states_exchanged(tree: Tree, rng: random.Random) -> Iterator[Cut]:
    """Trainer state of two ranks under each other's name, where the ranks' states differ."""
    import torch

    files = [p for p in tree.files("zip") if "train/rank" in p]
    if len(files) < 2:
        return
    one, two = files[:2]

    def require_rankless(root: Path) -> None:
        for n, path in enumerate((one, two)):
            state = torch.load(root / path, weights_only=True)
            torch.save(state | {"seed": 100 + n}, root / path)

    def swapped(root: Path) -> None:
        a, b = (root / one).read_bytes(), (root / two).read_bytes()
        put(root, one, b)
        put(root, two, a)

    def copied(root: Path) -> None:
        put(root, two, (root / one).read_bytes())

    yield Cut(f"{one} and {two}", swapped, frozenset({"rankless"}), require_rankless)
    yield Cut(f"{one} over {two}", copied, frozenset({"rankless"}), require_rankless)
