"""Measure an export from Megatron at full size, and the architecture map of a large model.

    python megatron.py export FOLDER --ckptcore CKPTCORE [--layers 14] [--scale 1] [--runs 3] [--json]
    python megatron.py map FOLDER [--layers 61] [--experts 256] [--runs 3] [--json]

``export``: from a Llama with 8B's widths as Megatron-Core saves it, its layers stacked, with TP 2 x PP 2, to
Hugging Face's folder in bf16; compared with ``cp -r`` of the same checkpoint, both flushed to the disk.
``map``: map the names of a mixture of experts, and compare every name and shape with transformers' model on
the meta device; imports do not count. Exit status 1 when a bound is not kept.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memory
import numpy as np
from verdicts import ended

from ckptcore.utils.units import show_size

TP, PP = 2, 2
HEADS, GROUPS = 32, 8
TIMES, PEAK, SECONDS = 3.0, (450 + 256) << 20, 5.0
_MEMORY = "256MiB"
Shape = tuple[int, ...]
Part = tuple[Shape, Shape, int, Callable[[], Any]]  # offset, shape, rank, values


def llama(layers: int, scale: int) -> Iterator[tuple[str, Shape, int]]:
    """Yield (name, shape, dim that tensor parallelism shards, or -1) of a Llama with 8B's widths."""
    hidden, ffn, vocab = 4096 // scale, 14336 // scale, 128256 // scale
    rows = hidden + 2 * GROUPS * (hidden // HEADS)
    stacked = "decoder.layers"
    yield "embedding.word_embeddings.weight", (vocab, hidden), 0
    yield f"{stacked}.self_attention.linear_qkv.layer_norm_weight", (layers, hidden), -1
    yield f"{stacked}.self_attention.linear_qkv.weight", (layers, rows, hidden), 1
    yield f"{stacked}.self_attention.linear_proj.weight", (layers, hidden, hidden), 2
    yield f"{stacked}.mlp.linear_fc1.layer_norm_weight", (layers, hidden), -1
    yield f"{stacked}.mlp.linear_fc1.weight", (layers, 2 * ffn, hidden), 1
    yield f"{stacked}.mlp.linear_fc2.weight", (layers, hidden, ffn), 2
    yield "decoder.final_layernorm.weight", (hidden,), -1
    yield "output_layer.weight", (vocab, hidden), 0


class Values:
    """The bits of every chunk, reproducible: windows of one random buffer."""

    def __init__(self, nbytes: int) -> None:
        raw = np.random.SFC64(7).random_raw(nbytes // 8) & np.uint64(0xBFFF_BFFF_BFFF_BFFF)
        self._bits = raw.view(np.uint16)

    def chunk(self, tensor: int, layer: int, shard: int, shape: Shape) -> np.ndarray[Any, Any]:
        count = int(np.prod(shape))
        begin = (tensor * 7919 + layer * 104_729 + shard * 15_485_863) % (len(self._bits) - count + 1)
        return self._bits[begin : begin + count].reshape(shape)


def parts(source: list[tuple[str, Shape, int]], values: Values, number: int) -> Iterator[Part]:
    """Yield the chunks of a tensor in Megatron-Core: one for each layer and tensor-parallel rank."""
    name, shape, dim = source[number]
    layered, shards = name.startswith("decoder.layers."), TP if dim >= 0 else 1
    count = shape[0] if layered else 1
    for layer in range(count):
        for shard in range(shards):
            part = [1, *shape[1:]] if layered else list(shape)
            offset = [layer, *(0 for _ in shape[1:])] if layered else [0] * len(shape)
            if dim >= 0:
                part[dim] //= TP
                offset[dim] = shard * part[dim]
            last = (layer * PP // count) if layered else int(not name.startswith("embedding"))
            args = (number, layer, shard, tuple(part))
            yield tuple(offset), tuple(part), last * TP + shard, lambda args=args: values.chunk(*args)


def write(folder: Path, source: list[tuple[str, Shape, int]], values: Values) -> int:
    """Write the checkpoint's folder, one chunk in memory at a time; return its bytes."""
    import torch
    from torch.distributed.checkpoint import metadata as meta
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    folder.mkdir(parents=True)
    names = [f"__{rank}_0.distcp" for rank in range(TP * PP)]
    files = [(folder / name).open("wb") for name in names]
    listed: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for number, (name, shape, _) in enumerate(source):
        chunks = []
        for offset, part, rank, value in parts(source, values, number):
            item = io.BytesIO()
            torch.save(torch.from_numpy(value().copy()).view(torch.bfloat16), item)
            begin = files[rank].tell()
            files[rank].write(item.getbuffer())
            chunks.append(meta.ChunkStorageMetadata(torch.Size(offset), torch.Size(part)))
            place = _StorageInfo(names[rank], begin, files[rank].tell() - begin)
            stored[meta.MetadataIndex(name, torch.Size(offset), len(chunks) - 1)] = place
        properties = meta.TensorProperties(dtype=torch.bfloat16)
        listed[name] = meta.TensorStorageMetadata(properties, torch.Size(shape), chunks)
    for file in files:
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(meta.Metadata(listed, {}, stored)))
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(
        json.dumps(backends | {"common_backend": "torch", "common_backend_version": 1})
    )
    torch.save({"iteration": 1, "checkpoint_version": 3.0}, folder / "common.pt")
    return sum(path.stat().st_size for path in folder.iterdir())


def config(layers: int, scale: int) -> dict[str, Any]:
    """Return the config.json of that Llama."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096 // scale,
        "intermediate_size": 14336 // scale,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": 4096 // scale // HEADS,
        "vocab_size": 128256 // scale,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def wrong(out: Path, source: list[tuple[str, Shape, int]], values: Values) -> Iterator[str]:
    """Yield tensors of the first and last layer, and the vocabulary's, that differ from the saved ones."""
    import torch
    from safetensors import safe_open

    files = {}
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)

    def full(suffix: str, layer: int) -> np.ndarray[Any, Any]:
        number = next(n for n, (name, _, _) in enumerate(source) if name.endswith(suffix))
        dim = source[number][2]
        found = [p for p in parts(source, values, number) if len(p[0]) < 3 or p[0][0] == layer]
        return np.concatenate([p[3]() for p in found], axis=max(dim, 0))

    def check(name: str, right: np.ndarray[Any, Any]) -> Iterator[str]:
        with safe_open(files[name], "pt") as opened:
            got = opened.get_tensor(name)
        if got.dtype != torch.bfloat16 or not np.array_equal(
            got.view(torch.int16).numpy().view(np.uint16), right
        ):
            yield name

    yield from check("model.embed_tokens.weight", full("word_embeddings.weight", 0))
    yield from check("lm_head.weight", full("output_layer.weight", 0))
    layers = source[1][1][0]
    for layer in {0, layers - 1}:
        root = f"model.layers.{layer}."
        qkv = full("linear_qkv.weight", layer)[0]
        grouped = qkv.reshape(GROUPS, HEADS // GROUPS + 2, -1, qkv.shape[1])
        cuts = {"q": grouped[:, :-2], "k": grouped[:, -2], "v": grouped[:, -1]}
        for kind, rows in cuts.items():
            yield from check(f"{root}self_attn.{kind}_proj.weight", rows.reshape(-1, qkv.shape[1]))
        gate, up = np.split(full("linear_fc1.weight", layer)[0], 2)
        yield from check(f"{root}mlp.gate_proj.weight", gate)
        yield from check(f"{root}mlp.up_proj.weight", up)
        yield from check(f"{root}mlp.down_proj.weight", full("linear_fc2.weight", layer)[0])


def export(given: argparse.Namespace) -> dict[str, Any]:
    """Measure both ways in turn, and the peak memory of ckptcore."""
    folder = given.folder / "megatron"
    source = list(llama(given.layers, given.scale))
    largest = max(int(np.prod(s)) // (s[0] if n.startswith("decoder.layers.") else 1) for n, s, _ in source)
    values = Values(2 * largest + (64 << 20))
    try:
        nbytes = write(folder / "ckpt", source, values)
        (folder / "config").mkdir()
        (folder / "config/config.json").write_text(json.dumps(config(given.layers, given.scale)))
        ours = [str(given.ckptcore), "export", str(folder / "ckpt"), str(folder / "out"), "--no-catalog"]
        ours += ["--config", str(folder / "config"), "--dtype", "bf16", "--memory", _MEMORY]
        script = 'cp -r "$0" "$1" && sync -f "$1"'
        theirs = ["sh", "-c", script, str(folder / "ckpt"), str(folder / "copy")]
        times: dict[str, list[float]] = {"cp": [], "ckptcore": []}
        peak, bad = 0, list[str]()
        for turn in range(given.runs):
            for name in sorted(times, reverse=bool(turn % 2)):
                subprocess.run(["sync", "-f", str(folder)], check=True)
                used = memory.measure(theirs if name == "cp" else ours)
                if used.returncode:
                    raise RuntimeError(f"{name}: exit {used.returncode}: {used.stderr[-600:]}")
                times[name].append(used.seconds)
                if name == "ckptcore":
                    peak = max(peak, used.peak_bytes)
                    bad += wrong(folder / "out", source, values)
                shutil.rmtree(folder / ("copy" if name == "cp" else "out"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratio = medians["ckptcore"] / medians["cp"]
    return {
        "figure": ratio,
        "measured": f"{ratio:.2f} x cp -r ({medians['ckptcore']:.1f} s, {medians['cp']:.1f} s) of "
        f"{show_size(nbytes)}, {peak / (1 << 20):.0f} MiB" + (f"; wrong: {', '.join(bad)}" if bad else ""),
        "bound": f"<= {TIMES:g} x cp -r, <= {PEAK / (1 << 20):.0f} MiB (budget {_MEMORY})",
        "ok": ratio <= TIMES and peak <= PEAK and not bad,
        "seconds": times,
        "peak_bytes": peak,
    }


def experts(layers: int, count: int) -> Iterator[tuple[str, Shape]]:
    """Yield a mixture of experts with narrow widths, in the names of Transformer Engine's grouped layers."""
    hidden, ffn, head, vocab = 64, 32, 16, 1024
    yield "embedding.word_embeddings.weight", (vocab, hidden)
    for n in range(layers):
        layer = f"decoder.layers.{n}"
        yield f"{layer}.self_attention.linear_qkv.weight", (8 * head, hidden)
        yield f"{layer}.self_attention.linear_qkv.layer_norm_weight", (hidden,)
        yield f"{layer}.self_attention.q_layernorm.weight", (head,)
        yield f"{layer}.self_attention.k_layernorm.weight", (head,)
        yield f"{layer}.self_attention.linear_proj.weight", (hidden, 4 * head)
        yield f"{layer}.pre_mlp_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.router.weight", (count, hidden)
        for e in range(count):
            yield f"{layer}.mlp.experts.linear_fc1.weight{e}", (2 * ffn, hidden)
            yield f"{layer}.mlp.experts.linear_fc2.weight{e}", (hidden, ffn)
    yield "decoder.final_layernorm.weight", (hidden,)
    yield "output_layer.weight", (vocab, hidden)


def mapped(given: argparse.Namespace) -> dict[str, Any]:
    """Measure seconds of the map, and of the check by transformers' own loader."""
    import make_ckpt
    import transformers

    import ckptcore
    from ckptcore.naming.rename import remap
    from ckptcore.planning.meta_model import describe
    from ckptcore.planning.name_maps import NameRequest, map_names

    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    form = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    # A model of one layer goes first, so that imports and reading the tables do not count.
    sizes = ((1, 2), *((given.layers, given.experts),) * given.runs)
    times: dict[str, list[float]] = {"map": [], "check": []}
    made = 0
    for turn, (layers, count) in enumerate(sizes):
        folder = given.folder / f"experts-{turn}"
        try:
            make_ckpt.write_hollow(make_ckpt.Source(tuple(experts(layers, count)), "bf16", 1, 0), folder)
            manifest = ckptcore.open(str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        bare = remap(manifest)
        settings = form | {"num_hidden_layers": layers, "num_experts": count}
        begin = time.perf_counter()
        found = map_names(
            bare, "megatron", NameRequest(to="hf-hub", source=manifest, config=settings, url="config")
        )
        half = time.perf_counter()
        answer = describe(settings, {t.fqn: list(t.shape) for t in found.mapped.manifest.tensors})
        end = time.perf_counter()
        if any(answer.get(kind, True) for kind in ("missing", "unexpected", "shapes", "broken")):
            raise RuntimeError(f"the mapped names do not fit transformers' model: {str(answer)[:600]}")
        if turn:
            made = len(found.mapped.manifest.tensors)
            times["map"].append(half - begin)
            times["check"].append(end - half)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    figure = sum(medians.values())
    return {
        "figure": figure,
        "measured": f"{figure:.2f} s for {made:,} tensors: "
        + ", ".join(f"{n} {seconds:.2f} s" for n, seconds in medians.items()),
        "bound": f"< {SECONDS:g} s",
        "ok": figure < SECONDS,
        "seconds": times,
    }


def main() -> int:
    """Run one of them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("export", "map"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--scale", type=int, default=1, help="divide all widths by this")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ckptcore", type=Path, default=Path(sys.executable).with_name("ckptcore"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.layers = given.layers or (14 if given.what == "export" else 61)
    load = os.getloadavg()[0]
    result = (export if given.what == "export" else mapped)(given)
    return ended(result, load, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
