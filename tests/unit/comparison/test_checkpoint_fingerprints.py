"""Test that copies of any layout have equal fingerprints."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import samples
import warm
from paths import FIXTURES

import ckptcore
from ckptcore import Settings, api
from ckptcore.conversion.file_fingerprints import fingerprints
from ckptcore.conversion.staging.open_staging import staging_of_plan
from ckptcore.errors import DamagedCheckpoint, OutputMismatch
from ckptcore.execution.receipts import read_receipt
from ckptcore.fingerprints.sums import map_digest
from ckptcore.planning.plan import load_file_plan, load_head

TORCH = (
    "dcp_dims_4r",
    "dcp_multishard_2r",
    "dcp_nested_2r",
    "dcp_odd_dtypes_2r",
    "dcp_safetensors_fmt_2r",
    "dcp_torchtitan_like_4r",
    "dcp_zstd_2r",
)
NOTHING_DONE = map_digest([], [], [])
ON = Settings(fingerprint=True)


@pytest.fixture
def state() -> dict[str, Any]:
    import torch

    torch.manual_seed(3)
    return {
        "embed.weight": torch.randn(301, 64),
        "layers.0.wq.weight": torch.randn(64, 96).to(torch.bfloat16),
        "layers.0.norm.weight": torch.randn(64),
        "layers.0.bias": torch.randn(67).to(torch.bfloat16),
        "step": torch.tensor(7),
        "flags": torch.rand(33) < 0.5,
    }


@pytest.fixture
def source(tmp_path: Path, state: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder = tmp_path / "source"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return folder


def convert(source: str, destination: str, **options: Any) -> Any:
    means = options.pop("settings", ON)
    return api.convert(source, destination, settings=means, **options)


def taken(path: Path, **options: Any) -> str:
    return api.fingerprint(str(path), **options).fingerprint


@pytest.mark.alike(3)
@pytest.mark.parametrize("name", TORCH)
def test_samples_have_the_fingerprint_of_the_truth(name: str, tmp_path: Path) -> None:
    """The state that the training process had in memory, and every copy of it."""
    folder = FIXTURES / "torch" / name
    ckpt = folder / "ckpt"
    found = api.fingerprint(str(ckpt))
    assert found.map_digest == NOTHING_DONE
    mine = {fqn: rest for fqn, *rest in found.tensors}
    truth = api.fingerprint(str(folder / "expected.safetensors"))
    assert {fqn: rest for fqn, *rest in truth.tensors if fqn in mine} == {
        fqn: mine[fqn] for fqn, *_ in truth.tensors if fqn in mine
    }
    assert set(mine) & {fqn for fqn, *_ in truth.tensors}
    for number, to in enumerate(("safetensors", "torch_save")):
        suffix = ".pt" if to == "torch_save" else ""
        if to == "safetensors" and any(dtype.startswith("complex") for _, dtype, *_ in found.tensors):
            continue
        copy = tmp_path / f"copy{number}{suffix}"
        result = convert(str(ckpt), str(copy), to=to, settings=replace(ON, memory=1 << 20, workers=2))
        assert (result.fingerprint, result.map_digest) == (found.fingerprint, NOTHING_DONE)
        assert result.fingerprints == tuple(sorted(found.tensors, key=_by_name(result.fingerprints)))


def _by_name(order: Any) -> Any:
    place = {row[0]: n for n, row in enumerate(order)}
    return lambda row: place[row[0]]


def test_formats_topologies_and_files_do_not_matter(source: Path, tmp_path: Path) -> None:
    total = api.fingerprint(str(source))
    made = [
        convert(str(source), str(tmp_path / "a.pt")),
        convert(str(source), str(tmp_path / "b"), max_file_size=20_000),
        convert(str(source), str(tmp_path / "c"), verb="reshard", mesh="fsdp=2"),
        convert(str(source), str(tmp_path / "d"), verb="reshard", mesh="fsdp=3"),
    ]
    made.append(convert(str(tmp_path / "c"), str(tmp_path / "e"), verb="reshard", mesh="fsdp=5"))
    made.append(convert(str(tmp_path / "d"), str(tmp_path / "f.safetensors")))
    assert len(made[1].files) > 1
    for result in made:
        assert result.fingerprint == total.fingerprint
        assert result.map_digest == NOTHING_DONE
        assert taken(Path(result.destination)) == total.fingerprint
        assert {r[0]: r for r in result.fingerprints} == {r[0]: r for r in total.tensors}


def test_meshes_do_not_matter(tmp_path: Path) -> None:
    """Boxes cut in both dims, in uneven parts, and replicas on every rank."""
    import torch
    from safetensors.torch import save_file

    shapes = {
        "embed_tokens": (509, 36),
        "layers.0.self_attn.q_proj": (40, 36),
        "norm": (36,),
        "layers.0.self_attn.o_proj": (36, 40),
        "layers.0.mlp.down_proj": (36, 92),
    }
    state = {f"model.{n}.weight": torch.randn(s).to(torch.bfloat16) for n, s in shapes.items()}
    save_file(state, tmp_path / "hf.safetensors")
    total = taken(tmp_path / "hf.safetensors")
    for mesh in ("fsdp=2,tp=2", "tp=4", "fsdp=3,tp=2"):
        result = convert(str(tmp_path / "hf.safetensors"), str(tmp_path / mesh), verb="reshard", mesh=mesh)
        assert taken(tmp_path / mesh) == result.fingerprint == total


@pytest.mark.parametrize("workers", [1, 3])
def test_budgets_and_workers_do_not_matter(workers: int, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    big = {"w": torch.arange(1_300_007, dtype=torch.int32), "c": torch.randn(700, 1001).t().contiguous()}
    save_file(big, tmp_path / "big.safetensors")
    small = replace(ON, memory=2 << 20, workers=workers)
    expected = taken(tmp_path / "big.safetensors", settings=Settings(workers=2))
    assert taken(tmp_path / "big.safetensors", settings=small) == expected
    result = convert(
        str(tmp_path / "big.safetensors"),
        str(tmp_path / "out"),
        verb="reshard",
        mesh="fsdp=3",
        settings=small,
    )
    assert result.fingerprint == expected


def test_it_is_computed_before_the_cast(source: Path, tmp_path: Path) -> None:
    total = taken(source)
    result = convert(str(source), str(tmp_path / "cast"), dtype="bf16")
    assert result.fingerprint == total
    assert taken(tmp_path / "cast") != total
    repeated = convert(str(source), str(tmp_path / "again"), verb="reshard", mesh="fsdp=2", dtype="fp16")
    assert repeated.fingerprint == total


def test_computed_tensors_are_their_values(tmp_path: Path) -> None:
    """Quantised weights have the fingerprint of their values, written as such or cast."""
    ckpt = FIXTURES / "torch" / "hf_fp8_block" / "ckpt"
    found = api.fingerprint(str(ckpt))
    plain = convert(str(ckpt), str(tmp_path / "plain"))
    cast = convert(str(ckpt), str(tmp_path / "cast"), dtype="bf16")
    assert plain.fingerprint == cast.fingerprint == found.fingerprint == taken(tmp_path / "plain")
    stored = api.fingerprint(str(ckpt), keep_quantized=True)
    assert stored.fingerprint != found.fingerprint
    kept = convert(str(ckpt), str(tmp_path / "kept"), keep_quantized=True)
    assert kept.fingerprint == stored.fingerprint


def test_names_are_part_of_it_and_of_the_map(source: Path, tmp_path: Path) -> None:
    total = taken(source)
    options: list[dict[str, Any]] = [
        {"rename": [("layers.", "blocks.")]},
        {"exclude": ["step"]},
        {"include": ["layers.*"]},
    ]
    seen = {(total, NOTHING_DONE)}
    for number, each in enumerate(options):
        result = convert(str(source), str(tmp_path / f"out{number}"), **each)
        found = api.fingerprint(str(source), **each)
        assert (result.fingerprint, result.map_digest) == (found.fingerprint, found.map_digest)
        assert taken(tmp_path / f"out{number}") == found.fingerprint
        seen.add((found.fingerprint, found.map_digest))
    assert len(seen) == 4


def test_tied_tensors_count_once(tmp_path: Path, source: Path, state: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    tied = tmp_path / "tied.safetensors"
    save_file({**state, "head.weight": state["embed.weight"].clone()}, tied)
    result = convert(str(tied), str(tmp_path / "out"), tie=[("head.weight", "embed.weight")])
    assert result.fingerprint == taken(source)
    assert result.map_digest != NOTHING_DONE


def test_one_changed_bit_changes_it(source: Path, state: dict[str, Any]) -> None:
    before = api.fingerprint(str(source))
    file = source / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 16
    file.write_bytes(raw)
    after = api.fingerprint(str(source))
    assert after.fingerprint != before.fingerprint
    assert sum(a != b for a, b in zip(before.tensors, after.tensors, strict=True)) == 1


def test_damage_has_no_fingerprint(tmp_path: Path) -> None:
    import shutil

    ckpt = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "torch" / "dcp_dims_4r" / "ckpt", ckpt)
    victim = min(ckpt.glob("*.distcp"))
    raw = bytearray(victim.read_bytes())
    at = len(raw) // 2
    raw[at : at + 64] = bytes(b ^ 0x55 for b in raw[at : at + 64])
    victim.write_bytes(raw)
    with pytest.raises(DamagedCheckpoint):
        api.fingerprint(str(ckpt))


def test_files_written_in_other_processes_add_up(source: Path, tmp_path: Path) -> None:
    total = taken(source)
    prepared = api.prepare(str(source), str(tmp_path / "out"), max_file_size=20_000)
    assert len(prepared.files) > 2
    script = (
        "import sys; from ckptcore import Settings, api; "
        "api.execute(sys.argv[1], [int(sys.argv[2])], settings=Settings(fingerprint=True))"
    )
    for index in reversed(range(len(prepared.files))):
        subprocess.run([*warm.python(), "-c", script, prepared.plan_uri, str(index)], check=True)
    assert api.publish(prepared).fingerprint == total


KILLED = """
import importlib, os, signal, sys
execute = importlib.import_module("ckptcore.execution.execute")
from ckptcore import Settings, api
write, count = execute.write_receipt, 0
def dying(*args):
    global count
    count += 1
    if count > 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
execute.write_receipt = dying
api.convert(sys.argv[1], sys.argv[2], max_file_size=20_000,
            settings=Settings(workers=1, fingerprint=sys.argv[3] == "yes"))
"""


@pytest.mark.parametrize("summed", ["yes", "no"])
def test_a_killed_and_resumed_run_has_the_same(summed: str, source: Path, tmp_path: Path) -> None:
    """Sums come from the receipts of the first run; files that were written without sums are rewritten."""
    total = taken(source)
    destination = tmp_path / "out"
    killed = [*warm.python(), "-c", KILLED, str(source), str(destination), summed]
    done = subprocess.run(killed, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not destination.exists()
    result = convert(str(source), str(destination), max_file_size=20_000)
    assert result.fingerprint == total
    assert sum(f.reused for f in result.files) == (2 if summed == "yes" else 0)


def test_without_sums_there_is_none(source: Path, tmp_path: Path) -> None:
    off = Settings(fingerprint=False)
    result = convert(str(source), str(tmp_path / "out"), settings=off)
    assert (result.fingerprint, result.fingerprints) == (None, ())
    # Files of a run without are kept by a run without.
    prepared = api.prepare(str(source), str(tmp_path / "two"))
    api.execute(prepared, settings=off)
    [repeated] = api.execute(prepared, settings=off)
    assert repeated.reused
    [summed] = api.execute(prepared, settings=ON)
    assert not summed.reused
    assert api.publish(prepared).fingerprint == taken(source)


def test_bytes_that_no_other_check_reads_are_read(source: Path, tmp_path: Path) -> None:
    bare = Settings(verify=False, digest=False, fingerprint=True)
    assert convert(str(source), str(tmp_path / "out"), settings=bare).fingerprint == taken(source)


def test_replicas_in_several_files_count_once(source: Path, tmp_path: Path) -> None:
    prepared = api.prepare(str(source), str(tmp_path / "out"))
    api.execute(prepared, settings=ON)
    staging = staging_of_plan(prepared.plan_uri)
    plan = load_file_plan(staging.plan, 0)
    receipt = read_receipt(staging.receipts, load_head(staging.plan).digest, 0)
    assert receipt is not None
    assert receipt.sums is not None
    once = fingerprints([plan], [receipt])
    assert once is not None
    assert fingerprints([plan, plan], [receipt, receipt]) == once
    other = replace(receipt, sums=bytes(16) + receipt.sums[16:])
    with pytest.raises(OutputMismatch, match="different elements"):
        fingerprints([plan, plan], [receipt, other])
    half = replace(plan, columns=replace(plan.columns, full=plan.columns.full * 2))
    assert fingerprints([half], [receipt]) is None


def test_by_default_only_a_reshard_has_one(source: Path, tmp_path: Path) -> None:
    assert api.convert(str(source), str(tmp_path / "whole")).fingerprint is None
    resharded = api.convert(str(source), str(tmp_path / "cut"), verb="reshard", mesh="fsdp=2")
    assert resharded.fingerprint == taken(source)
    off = Settings(fingerprint=False)
    bare = api.convert(str(source), str(tmp_path / "bare"), verb="reshard", mesh="fsdp=2", settings=off)
    assert bare.fingerprint is None


def test_the_model_part_has_the_fingerprint_of_its_export(tmp_path: Path) -> None:
    ckpt = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
    found = ckptcore.fingerprint(str(ckpt), model=True)
    result = convert(str(ckpt), str(tmp_path / "out"), verb="export")
    assert (found.fingerprint, found.map_digest) == (result.fingerprint, result.map_digest)
    assert found.fingerprint == taken(tmp_path / "out")


def test_samples_of_other_families_have_the_fingerprint_of_their_copy(tmp_path: Path) -> None:
    for number, ckpt in enumerate(
        (FIXTURES / "torch" / "hf_sharded_4r" / "ckpt", FIXTURES / "olmo" / "v01_dtensor_ws4" / "ckpt")
    ):
        if not ckpt.exists():
            ckpt = next(p for p in ckpt.parent.iterdir() if p.is_dir())
        result = convert(str(ckpt), str(tmp_path / f"{number}.pt"))
        assert result.fingerprint == taken(ckpt)


def test_truth_by_numpy(source: Path, state: dict[str, Any]) -> None:
    """The bits of the file are those of the tensors: the array has the fingerprint of the stored tensor."""
    from ckptcore.core.box import Box
    from ckptcore.fingerprints.sums import box_sum, tensor_fingerprint

    found = {fqn: each for fqn, *_, each in api.fingerprint(str(source)).tensors}
    for fqn, tensor in state.items():
        dtype, shape, raw = samples.value(tensor)
        total = box_sum(dtype, shape, Box.full(shape), np.frombuffer(raw, np.uint8))
        assert found[fqn] == tensor_fingerprint(dtype, shape, total)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_device_sums_its_own_tiles(device: str, source: Path, tmp_path: Path) -> None:
    """A device sums large parts that are cast in it, and what it computes, on "cpu" with torch; the host sums
    the rest, and all of it where no tensor is cast or computed."""
    import torch

    from ckptcore.execution import device as devices
    from ckptcore.execution import tensor_filler

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    ckpt = FIXTURES / "torch" / "hf_fp8_block" / "ckpt"
    means = replace(ON, memory=1 << 22, workers=2, device=device)
    wanted = taken(source), taken(ckpt)
    sums, total = list[str](), devices.DeviceSums.box_total

    def counted(device_sums: Any, dtype: str, *of: Any) -> Any:
        sums.append(dtype)
        return total(device_sums, dtype, *of)

    with (
        mock.patch.object(devices.DeviceSums, "box_total", counted),
        mock.patch.object(tensor_filler, "_DEVICE_SUM", 64),
        mock.patch("ckptcore.execution.execute.slots_on", lambda _, n: devices.DeviceSlots(device, n)),
    ):
        cast = convert(str(source), str(tmp_path / "cast"), dtype="fp16", settings=means)
        assert set(sums) == {"float32", "bfloat16"}
        cut = convert(str(source), str(tmp_path / "cut"), verb="reshard", mesh="fsdp=3", settings=means)
        repeated = convert(str(tmp_path / "cut"), str(tmp_path / "whole"), settings=means)
        computed = convert(str(ckpt), str(tmp_path / "fp8"), dtype="bf16", settings=means)
        read = taken(source, settings=means), taken(ckpt, settings=means)
    assert (cast.fingerprint, computed.fingerprint) == wanted
    assert cut.fingerprint == repeated.fingerprint == wanted[0]
    assert read == wanted
