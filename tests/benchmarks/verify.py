"""Compare a converted checkpoint with the bits that were saved.

The expected tensors are recomputed from the source's name (make_ckpt.shard), so neither torch's loader nor
the converter is trusted. The loader of the output's own format (safetensors or `torch.load`) reads each
tensor. Every name, shape, dtype and bit is compared, one tensor at a time.

    python verify.py row-2gb OUT [--scale 16] [--dtype bf16]

Peak memory: a few times the largest tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from make_ckpt import SOURCES, Source, shard
from safetensors import safe_open

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}


def truth(source: Source, index: int) -> torch.Tensor:
    """Return tensor ``index`` before sharding."""
    dim = source.sharded_dim(index)
    if dim is None:
        return shard(source, index, 0)
    return torch.cat([shard(source, index, rank) for rank in range(source.ranks)], dim)


@contextmanager
def opened(output: Path) -> Iterator[dict[str, Callable[[], torch.Tensor]]]:
    """Yield loaders of the tensors of a safetensors file, Hugging Face folder, DCP folder or torch.save file.

    Raises:
        ValueError: A file and the index have different names.
    """
    if (output / ".metadata").is_file():
        yield _dcp(output)
        return
    single = output / "model.pt" if output.is_dir() else output
    if single.suffix in {".pt", ".ckpt"} and single.exists():
        yield dict(_flat(torch.load(single, mmap=True, weights_only=True)))
        return
    with ExitStack() as stack:
        tensors: dict[str, Callable[[], torch.Tensor]] = {}
        for path, names in _safetensors_files(output).items():
            file = stack.enter_context(safe_open(path, framework="pt"))
            stored = set(file.keys())
            if names is not None and names != stored:
                raise ValueError(f"{path} and the index differ in {sorted(names ^ stored)[:3]}")
            tensors |= {name: lambda f=file, n=name: f.get_tensor(n) for name in stored}
        yield tensors


def _safetensors_files(output: Path) -> dict[Path, set[str] | None]:
    """Return each file and its names in the index; None where there is no index."""
    if output.is_file():
        return {output: None}
    index = output / "model.safetensors.index.json"
    if not index.exists():
        return {output / "model.safetensors": None}
    files: dict[Path, set[str] | None] = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        files.setdefault(output / file, set()).add(name)  # type: ignore[union-attr]  # never None
    return files


def _dcp(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Return loaders of the tensors of a DCP folder; torch's own loader reads each alone."""
    import torch.distributed.checkpoint as dcp

    def load(name: str, stored: Any) -> torch.Tensor:
        state = {name: torch.empty(stored.size, dtype=stored.properties.dtype)}
        dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(), no_dist=True)
        return state[name]

    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {
        name: lambda name=name, stored=stored: load(name, stored)
        for name, stored in metadata.state_dict_metadata.items()
        if hasattr(stored, "size")
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Callable[[], Any]]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield prefix + key, lambda v=value: v


def differences(source: Source, output: Path, dtype: str | None) -> Iterator[str]:
    """Yield one line for each tensor that is missing, unexpected or unequal."""
    names = [name for name, _ in source.tensors]
    with opened(output) as tensors:
        # A training state dict has its model under a name, a model's file does not.
        parts = (p for p in ("model.", "state_dict.") if any(p + name in tensors for name in names))
        prefix = next(parts, "")
        known = {name if name.startswith("optim.") else prefix + name for name in names}
        yield from (f"{n}: unexpected" for n in sorted(set(tensors) - known))
        for index, name in enumerate(names):
            stored = (
                name if name.startswith("optim.") else prefix + name
            )  # optimizer state is beside the model
            if stored not in tensors:
                yield f"{name}: missing"
                continue
            want = truth(source, index)
            if dtype is not None:
                want = want.to(_DTYPES[dtype])
            got = tensors[stored]()
            if got.shape != want.shape or got.dtype != want.dtype:
                yield f"{name}: {got.dtype} {tuple(got.shape)} where {want.dtype} {want.shape}"
            elif not torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8)):
                yield f"{name}: bits differ"


def main() -> int:
    """Print the differences; exit status 1 when there are any."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", choices=SOURCES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--dtype", choices=_DTYPES, help="the requested cast")
    args = parser.parse_args()
    found = list(differences(SOURCES[args.source](args.scale), args.output, args.dtype))
    for line in found[:20]:
        print(line, file=sys.stderr)
    if found:
        print(f"{args.output}: {len(found)} tensors differ from the source", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
