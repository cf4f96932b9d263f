"""Test `ckptcore.from_checkpoint`: its model is the one that `from_pretrained` makes of the export."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import small_models  # noqa: E402
import warm  # noqa: E402
from deepspeed_files import MOMENTS, each, model_states, moment, save, shapes_of  # noqa: E402
from driver import REPOSITORY  # noqa: E402
from export_cells import differing  # noqa: E402
from export_results import Cell  # noqa: E402
from export_sources import WRITERS, Tiny, weights  # noqa: E402
from paths import FIXTURES, JOBS  # noqa: E402
from same_models import require_same  # noqa: E402

import ckptcore  # noqa: E402
from ckptcore import errors  # noqa: E402

Tinies = Callable[[str], Tiny]
RANKS = 2
IMPORTS = os.pathsep.join([str(REPOSITORY), str(Path(warm.__file__).parent)])  # of jobs


def _zero3(tiny: Tiny, form: str, folder: Path) -> Path:
    """Write a save of DeepSpeed's ZeRO-3."""
    group = {name: tensor.float() for name, tensor in tiny.live.named_parameters()}
    group = {name: tensor.detach() for name, tensor in group.items()}
    files = {}
    for rank in range(RANKS):
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        files[f"{prefix}_model_states.pt"] = model_states(
            RANKS,
            module={name: torch.zeros(0) for name in group},
            param_shapes=[shapes_of(group)],
            ds_config={"zero_optimization": {"stage": 3}},
        )
        moments = {k: each({n: moment(k, v) for n, v in group.items()}, RANKS)[rank] for k in MOMENTS}
        files[f"{prefix}_optim_states.pt"] = {
            "zero_stage": 3,
            "partition_count": RANKS,
            "optimizer_state_dict": {"state": {0: {"step": torch.tensor(5.0)} | moments}, "param_groups": []},
            "fp32_flat_groups": [each(group, RANKS)[rank]],
        }
    return save(folder, files)


SOURCES = {**WRITERS, "zero3": _zero3}
# Tied, stacked experts, grouped queries, buffers in float32, joined projections, transposed layers, an added
# constant, infinity in the config; each source once, and both a cast and none.
CELLS = [
    (Cell("gpt2", "megatron", "layers"), None),
    (Cell("llama", "megatron", "stacked"), "bfloat16"),
    (Cell("gemma3", "megatron", "layers"), None),
    (Cell("qwen3_moe", "torchtitan", "fused"), None),
    (Cell("mixtral", "hf-hub", ""), "float16"),
    (Cell("olmoe", "olmo_core", "one"), None),
    (Cell("deepseek_v3", "verl", ""), "bfloat16"),
    (Cell("gpt_oss", "hf-live", ""), "bfloat16"),
    (Cell("llama4", "hf-hub", ""), None),
    (Cell("qwen3", "zero3", ""), "bfloat16"),
    (Cell("nemotron_h", "hf-live", ""), None),
]


def exported(source: Path, out: Path, **options: Any) -> Any:
    """Return what `from_pretrained` makes of the export."""
    ckptcore.convert(source, out, verb="export", catalog=False, **options)
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(out)


def files_below(folder: Path) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.disable_progress_bar()


@pytest.mark.alike(4)
@pytest.mark.parametrize(("cell", "dtype"), CELLS, ids=lambda value: str(value))
def test_it_is_the_model_of_the_export(tinies: Tinies, tmp_path: Path, cell: Cell, dtype: str | None) -> None:
    tiny = tinies(cell.family)
    source = SOURCES[cell.source](tiny, cell.form, tmp_path / "source")
    options = {"config": tiny.hub, **({"dtype": dtype} if dtype else {})}
    before = files_below(tmp_path)
    model = ckptcore.from_checkpoint(source, **options)
    assert files_below(tmp_path) == before
    right = exported(source, tmp_path / "out", **options)
    require_same(model, right)
    for name, each_model in (("ours", model), ("right", right)):
        each_model.save_pretrained(tmp_path / name)
    assert differing(weights(tmp_path / "ours"), weights(tmp_path / "right")) == []


def test_generation_config_and_a_torch_dtype(tinies: Tinies, tmp_path: Path) -> None:
    source = shutil.copytree(tinies("llama").hub, tmp_path / "source")
    (source / "generation_config.json").write_text('{"max_new_tokens": 7, "do_sample": true}')
    model = ckptcore.from_checkpoint(ckptcore.open(source), dtype=torch.float16, device="cpu")
    assert (model.generation_config.max_new_tokens, model.dtype) == (7, torch.float16)
    require_same(model, exported(source, tmp_path / "out", dtype="float16"))
    assert model.config.name_or_path == str(source)


def test_the_default_device_of_the_caller_does_not_count(tinies: Tinies) -> None:
    right = tinies("llama").live
    with torch.device("meta"):
        model = ckptcore.from_checkpoint(tinies("llama").hub)
    require_same(model, right)


def test_a_config_without_a_class(tinies: Tinies, tmp_path: Path) -> None:
    """It is the first class of the model type that has exactly these tensors."""
    source = shutil.copytree(tinies("llama").hub, tmp_path / "source")
    form = json.loads((source / "config.json").read_text())
    del form["architectures"]
    (source / "config.json").write_text(json.dumps(form))
    assert type(ckptcore.from_checkpoint(source)).__name__ == "LlamaForCausalLM"


def _flip(source: Path) -> None:
    """Change one bit in the middle of the largest item."""
    path = max(source.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _lose(source: Path) -> None:
    max(source.glob("*.distcp"), key=lambda file: file.stat().st_size).unlink()


@pytest.mark.parametrize(
    ("damage", "error"), [(_flip, errors.DamagedCheckpoint), (_lose, errors.DamagedCheckpoint)]
)
def test_damage_is_refused(
    tinies: Tinies, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception]
) -> None:
    source = WRITERS["hf-live"](tinies("llama"), "", tmp_path / "source")
    damage(source)
    with pytest.raises(error):
        ckptcore.from_checkpoint(source, config=tinies("llama").hub)


def test_tied_tensors_that_differ_are_refused(tinies: Tinies, tmp_path: Path) -> None:
    tiny = tinies("gemma2")
    state = {**tiny.live.state_dict()}
    state["lm_head.weight"] = state["lm_head.weight"].clone()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "equal", no_dist=True)
    require_same(ckptcore.from_checkpoint(tmp_path / "equal", tiny.hub), tiny.live)
    state["lm_head.weight"][-1, -1] += 1
    dcp.save({"model": state}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(errors.DamagedCheckpoint, match=r"lm_head\.weight: its copies .* differ in 1 of"):
        ckptcore.from_checkpoint(tmp_path / "other", tiny.hub)


def test_quantised_weights_are_refused(tinies: Tinies, tmp_path: Path) -> None:
    """Those that a reader decodes, and those of a config that says so."""
    with pytest.raises(errors.UnsupportedDtype, match=r"its weights are quantised .* would be computed"):
        ckptcore.from_checkpoint(FIXTURES / "torch" / "hf_fp8_block" / "ckpt")
    source = shutil.copytree(tinies("llama").hub, tmp_path / "source")
    form = json.loads((source / "config.json").read_text())
    form["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(form))
    with pytest.raises(errors.UnsupportedDtype, match=r"config\.json has quantization_config"):
        ckptcore.from_checkpoint(source)


def test_what_no_config_describes_is_refused(tinies: Tinies, tmp_path: Path) -> None:
    tiny = tinies("llama")
    save_file(weights(tiny.hub), tmp_path / "model.safetensors")
    with pytest.raises(errors.UsageError, match=r"no config\.json was found"):
        ckptcore.from_checkpoint(tmp_path)
    with pytest.raises(errors.NameMismatch, match=r"does not fit .*: missing: "):
        ckptcore.from_checkpoint(tmp_path, tinies("gpt2").hub)


def test_what_no_map_leads_to_is_refused(
    tinies: Tinies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader of transformers gets the names of the export; the maps have to know the parameters, too."""
    from ckptcore.live_model import from_checkpoint as module

    monkeypatch.setattr(module, "map_live_names", lambda *_, **options: None)
    with pytest.raises(errors.NameMismatch, match=r"maps have no values for .*gate_up_proj"):
        ckptcore.from_checkpoint(tinies("mixtral").hub)


def test_a_renaming_that_finds_another_tensor_is_not_followed(tmp_path: Path) -> None:
    """The final norm of deepseek_v4 has a name in which loading finds the norms of keys and values."""
    model = small_models.filled("deepseek_v4")
    model.save_pretrained(tmp_path)
    require_same(ckptcore.from_checkpoint(tmp_path), type(model).from_pretrained(tmp_path))


def test_ranks_share_a_model(tinies: Tinies, tmp_path: Path) -> None:
    """FSDP2 on two gloo ranks: each has its boxes of the model, and an error of one is raised on both."""
    cases = []
    for family, form in (("gpt2", "megatron"), ("mixtral", "torchtitan")):
        tiny = tinies(family)
        kind = "layers" if form == "megatron" else "old"
        source = WRITERS[form](tiny, kind, tmp_path / family)
        exported(source, tmp_path / f"{family}-out", config=tiny.hub)
        cases += [source, tiny.hub, tmp_path / f"{family}-out"]
    done = subprocess.run(
        [*warm.python(), str(JOBS / "from_checkpoint_job.py"), *map(str, cases)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": IMPORTS},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["gpt2", "mixtral"]


MEASURED = """
import sys, torch, transformers, ckptcore
from ckptcore.planning import transformers_process
from strict_exports import ask_here
transformers.logging.disable_progress_bar()
transformers_process.ask = ask_here
torch.set_num_threads(1)
def highest():
    return int([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0]) << 10
ckptcore.from_checkpoint(sys.argv[1])  # modules are imported
open("/proc/self/clear_refs", "w").write("5")
before = highest()
model = ckptcore.from_checkpoint(sys.argv[2])
print(highest() - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.soak
def test_memory_is_that_of_the_model(tinies: Tinies, tmp_path: Path) -> None:
    """The files have each expert alone, and a parameter all of a layer: it is filled in place."""
    config = transformers.MixtralConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=2048,
        num_local_experts=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["MixtralForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    state = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            state[name.replace(".mlp.", ".block_sparse_moe.")] = torch.empty(tensor.shape)
    for expert in range(16):
        place = f"model.layers.0.block_sparse_moe.experts.{expert}"
        for part, shape in (("w1", (2048, 512)), ("w3", (2048, 512)), ("w2", (512, 2048))):
            state[f"{place}.{part}.weight"] = torch.empty(shape)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURED, tinies("mixtral").hub, tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ) | {"PYTHONPATH": IMPORTS, "LOCAL_WORLD_SIZE": "64"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    taken, model_bytes = map(int, done.stdout.split())
    assert model_bytes > 190 << 20
    assert taken < model_bytes + (64 << 20), (taken, model_bytes)
