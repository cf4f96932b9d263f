"""Test that other libraries open our outputs, and that we read theirs.

Readers and writers here run in a process of their own, which imports nothing of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from samples import FIXTURES, differences, read_safetensors, read_torch, tensors_of

if TYPE_CHECKING:
    from driver import Cli

DIMS = FIXTURES / "torch" / "dcp_dims_4r"
TITAN = FIXTURES / "torch" / "dcp_torchtitan_like_4r"

DIGESTS = """
def digests(items):
    import hashlib, torch
    out = {}
    for name, t in items:
        raw = t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""
        out[name] = [str(t.dtype), list(t.shape), hashlib.sha256(raw).hexdigest()]
    return out
"""


# Runs one request a line: torch is imported once.
SERVE = """
import contextlib, io, json, sys
for line in sys.stdin:
    code, *sys.argv[1:] = json.loads(line)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    print(printed.getvalue().splitlines()[-1], flush=True)
"""
Foreign = Callable[..., Any]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    """Run Python code in a process that cannot import this project; return the JSON that it prints."""
    log = tmp_path_factory.mktemp("foreign") / "stderr"
    command = [sys.executable, "-I", "-W", "ignore", "-c", SERVE]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, cwd="/", **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(code: str, *argv: object) -> Any:
            print(json.dumps([DIGESTS + code, *map(str, argv)]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, log.read_text()[-3000:]
            return json.loads(answer)

        yield ask


def digests(tensors: dict[str, Any]) -> dict[str, list[Any]]:
    """The same digests, of our side's tensors."""
    import hashlib

    return {k: [f"torch.{d}", list(s), hashlib.sha256(raw).hexdigest()] for k, (d, s, raw) in tensors.items()}


SAFE_OPEN = """
import json, sys, glob
from safetensors import safe_open
out = {}
for file in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with safe_open(file, "pt") as f:
        assert f.metadata() is None or all(isinstance(v, str) for v in f.metadata().values())
        out |= digests((k, f.get_tensor(k)) for k in f.keys())
print(json.dumps(out))
"""


def test_safetensors_opens_our_safetensors(cli: Cli, foreign: Foreign, tmp_path: Path) -> None:
    done = cli("consolidate", DIMS / "ckpt", tmp_path / "out")
    assert done.code == 0, done
    truth = read_safetensors(DIMS / "expected.safetensors")
    assert foreign(SAFE_OPEN, tmp_path / "out") == digests(truth)


def test_safetensors_opens_our_shards_by_index(cli: Cli, foreign: Foreign, tmp_path: Path) -> None:
    """Split into many files: the index names every tensor once, in the file that holds it."""
    dst = tmp_path / "out"
    done = cli("export", TITAN / "ckpt", dst, "--max-file-size", "2KB")
    assert done.code == 0, done
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in dst.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    found = foreign(SAFE_OPEN, dst)
    assert sorted(index["weight_map"]) == sorted(found)
    truth = digests(read_safetensors(TITAN / "expected.safetensors"))
    assert {k: v for k, v in truth.items() if k in found} == found
    assert index["metadata"]["total_size"] == sum(len(v[2]) for v in read_safetensors(dst).values())
    for name, file in index["weight_map"].items():
        assert name in read_safetensors(dst / file)


TORCH_LOAD = """
import json, sys, torch
state = torch.load(sys.argv[1], weights_only=True, mmap=True)
flat = {}
def walk(node, path):
    if isinstance(node, torch.Tensor):
        flat[path] = node
    elif isinstance(node, dict):
        for k, v in node.items():
            walk(v, f"{path}.{k}" if path else str(k))
    elif isinstance(node, (list, tuple)):
        for k, v in enumerate(node):
            walk(v, f"{path}.{k}")
walk(state, "")
print(json.dumps(digests(flat.items())))
"""


def test_torch_opens_our_torch_file(cli: Cli, foreign: Foreign, tmp_path: Path) -> None:
    """The same bytes, under each usual file name."""
    source = FIXTURES / "torch" / "dcp_odd_dtypes_2r"
    files = [tmp_path / f"out{suffix}" for suffix in (".pt", ".pth", ".bin")]
    for file in files:
        done = cli("consolidate", source / "ckpt", file)
        assert done.code == 0, done
    assert len({file.read_bytes() for file in files}) == 1
    truth = tensors_of(read_torch(source / "expected_all.pt", trusted=True))
    assert foreign(TORCH_LOAD, files[0]) == digests(truth)


def test_zip_tools_open_our_torch_file(cli: Cli, tmp_path: Path) -> None:
    """Every record has the correct CRC-32, and payloads are at multiples of 64 bytes for mmap."""
    import zipfile

    done = cli("consolidate", DIMS / "ckpt", tmp_path / "out.pt")
    assert done.code == 0, done
    data = (tmp_path / "out.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
        payloads = [i for i in archive.infolist() if "/data/" in i.filename]
        assert payloads
        for info in payloads:
            name, extra = (int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
            assert (info.header_offset + 30 + name + extra) % 64 == 0


SAVE_LLAMA = """
import json, sys, torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(3)
for kind in ("tied", "untied"):
    folder = sys.argv[1] + "/" + kind
    config = LlamaConfig(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=kind == "tied")
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(20)[None]).logits.sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()},
        checkpoint_id=folder + "/ckpt", no_dist=True)
    config.save_pretrained(folder + "/config")
    model.save_pretrained(folder + "/theirs", max_shard_size="30KB")
    # The oracle is their own folder opened their own way: in memory, `.to(bfloat16)` has also cast the
    # rotary frequencies, which no checkpoint holds.
    with torch.no_grad():
        same = LlamaForCausalLM.from_pretrained(folder + "/theirs")
        torch.save(same(torch.arange(20)[None]).logits, folder + "/logits.pt")
print("{}")
"""

LOAD_LLAMA = """
import json, sys, torch
from transformers import AutoModelForCausalLM
out = []
for folder, logits in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        same = torch.equal(model(torch.arange(20)[None]).logits, torch.load(logits))
    out.append([same, str(model.dtype), {k: sorted(map(str, v)) for k, v in info.items() if v}])
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def llamas(foreign: Foreign, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tied`` and ``untied``: a small Llama, saved by DCP and by transformers, and its logits."""
    folder = tmp_path_factory.mktemp("llamas")
    foreign(SAVE_LLAMA, folder)
    return folder


@pytest.mark.soak  # exports/test_export compares logits in every run
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_transformers_opens_our_folder(
    kind: str, llamas: Path, foreign: Foreign, cli: Cli, tmp_path: Path
) -> None:
    """A model that was saved with DCP and exported gives the same logits, without warnings."""
    saved, out = llamas / kind, tmp_path / kind
    flags = ["--max-file-size", "30KB"] if kind == "tied" else []
    done = cli("export", saved / "ckpt", out, "--config", saved / "config", *flags)
    assert done.code == 0, done
    assert foreign(LOAD_LLAMA, out, saved / "logits.pt") == [[True, "torch.bfloat16", {}]]


@pytest.mark.soak
def test_reads_what_transformers_saved(llamas: Path, cli: Cli, tmp_path: Path) -> None:
    """A sharded folder of save_pretrained, by its index."""
    source = llamas / "untied" / "theirs"
    theirs = read_safetensors(source)
    assert len(list(source.glob("*.safetensors"))) > 1
    done = cli("consolidate", source, tmp_path / "out.pt")
    assert done.code == 0, done
    found = tensors_of(read_torch(tmp_path / "out.pt"))
    assert sorted(found) == sorted(theirs)
    assert not differences(theirs, found)


SAVE_FILES = """
import sys, torch
from safetensors.torch import save_file
maker = torch.Generator().manual_seed(5)
def bits(dtype, *shape):
    n = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=maker).view(dtype).reshape(shape)
dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
state = {f"t.{d}": bits(d, 5, 3) for d in dtypes} | {
    "bool": torch.tensor([True, False]), "scalar": bits(torch.float32).reshape(()),
    "empty": torch.empty(0, 4), "漢字": bits(torch.int16, 7)}
save_file(state, sys.argv[1] + "/one.safetensors", metadata={"format": "pt", "note": "hello"})
state["c128"] = bits(torch.complex128, 2)
base = bits(torch.float32, 40)
state |= {"view": base[10:20], "transposed": bits(torch.int32, 4, 6).t(), "shared": base}
state["nested"] = {"list": [bits(torch.float32, 2), 5, "x"], "none": None}
state["parameter"] = torch.nn.Parameter(bits(torch.bfloat16, 3, 3))
torch.save(state, sys.argv[1] + "/new.pt")
torch.save({"a": state["view"]}, sys.argv[1] + "/old.pt", _use_new_zipfile_serialization=False)
print("{}")
"""


def test_reads_what_safetensors_and_torch_saved(cli: Cli, foreign: Foreign, tmp_path: Path) -> None:
    foreign(SAVE_FILES, tmp_path)
    cases = {
        "one.safetensors": read_safetensors(tmp_path / "one.safetensors"),
        "new.pt": tensors_of(read_torch(tmp_path / "new.pt")),
    }
    for name, truth in cases.items():
        checked = cli("validate", tmp_path / name, "--level", "bytes", "--output", "json")
        assert checked.code == 0, checked
        done = cli("consolidate", tmp_path / name, tmp_path / f"{name}.out.pt")
        assert done.code == 0, done
        ours = read_torch(tmp_path / f"{name}.out.pt")
        found = tensors_of(ours)
        assert sorted(found) == sorted(truth), name
        assert not differences(truth, found), name
    assert cli("consolidate", tmp_path / "new.pt", tmp_path / "new.safetensors").code == 14


@pytest.mark.soak
def test_reads_torchs_old_file_format(cli: Cli, foreign: Foreign, tmp_path: Path) -> None:
    foreign(SAVE_FILES, tmp_path)
    done = cli("consolidate", tmp_path / "old.pt", tmp_path / "out.pt", "--output", "json")
    assert done.code == 0, done
    truth = tensors_of(torch.load(tmp_path / "old.pt", weights_only=True))
    assert truth
    assert not differences(truth, tensors_of(read_torch(tmp_path / "out.pt")))
