"""One odd tensor in a real sample of every format: a finding by its name, and everything else converts."""

from __future__ import annotations

import base64
import fnmatch
import json
import pickle
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from legacy_ranks import Case, save
from odd_tensors import KINDS

import ckptcore
from ckptcore.__main__ import main
from ckptcore.errors import UnreadablePart
from ckptcore.formats import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore")


class _Stubs(pickle.Unpickler):
    """Builds classes of packages that are not installed, and keeps their names."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            parts = module.split(".")
            for n in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
            made = type(name, (), {"__module__": module})
            setattr(sys.modules[module], name, made)
            return made


def dcp(folder: Path, name: str) -> None:
    """Edit the metadata as if the job had a dtype of bits."""
    path = folder / ".metadata"
    before = set(sys.modules)
    with path.open("rb") as file:
        metadata = _Stubs(file).load()
    metadata.state_dict_metadata[name].properties.dtype = torch.bits8
    path.write_bytes(pickle.dumps(metadata))
    for module in set(sys.modules) - before:
        if not hasattr(sys.modules[module], "__file__"):
            del sys.modules[module]


def header(folder: Path, name: str) -> None:
    """Edit the dtype of a tensor in each safetensors file that has it; OLMo's names are pickles in base64."""
    done = 0
    for path in sorted(folder.rglob("*.safetensors")):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        for key in [k for k in header if k == name or name.encode() in _decoded(k)]:
            header[key]["dtype"] = "F6_E2M3"
            done += 1
        new = json.dumps(header).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + size :])
    assert done


def named_file(folder: Path, name: str) -> None:
    """Edit the tensor of the files that are below the folder named after it."""
    header(folder / "model" / name.rpartition(".")[0].replace(".", "/"), "data")


def _decoded(key: str) -> bytes:
    try:
        return base64.b64decode(key, altchars=b"-_", validate=True)
    except ValueError:
        return b""


def zarr(folder: Path, name: str) -> None:
    path = folder / name / ".zarray"
    array = json.loads(path.read_text())
    path.write_text(json.dumps({**array, "dtype": "<U1"}))


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8)


def listed_header(folder: Path, name: str) -> None:
    """Edit a header, and the list of the tensors of all ranks."""
    header(folder, name)
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["tensors"][name]["dtype"] = "F6_E2M3"
    (folder / "metadata.json").write_text(json.dumps(metadata))


def rank_files(folder: Path, name: str) -> None:
    for path in sorted({*folder.glob("model_*.pt"), *folder.glob("consolidated.*.pth")}):
        tree = torch.load(path, weights_only=False)
        tree[name] = quantized()
        torch.save(tree, path)


def rank_module(folder: Path, name: str) -> None:
    """A weight of the module that all data-parallel ranks share."""
    path = folder / "mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=False)
    tree["module"][name] = quantized()
    torch.save(tree, path)


def flat_module(folder: Path, name: str) -> None:
    """The flat parameter of a module of one rank."""
    path = folder / "model" / "rank1.pt"
    tree = torch.load(path, weights_only=False)
    module = tree["modules"][1]
    (handle,) = [h for h in module["handles"] if "flat_param.data" in h]
    handle["flat_param.data"] = quantized()
    torch.save(tree, path)


def legacy(folder: Path, name: str) -> None:
    shutil.rmtree(folder)

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        if rank == (1, 0, 0):
            tree["model"]["decoder.layers.1.self_attention.linear_proj.weight"] = quantized()

    save(Case(tp=2, pp=2), folder, edit)


@dataclass(frozen=True)
class Odd:
    """A sample, the folder of its checkpoint, and what is odd.

    edit: gets the folder below it, and the stored name. fqn: of the tensor, or of those made from it. export:
    options that name the model, where the checkpoint has several.
    """

    sample: str
    at: str
    edit: Callable[[Path, str], None]
    name: str
    fqn: tuple[str, ...]
    below: str = ""
    export: tuple[tuple[str, str], ...] = ()


NORM = "model.final_layer_norm.pp_block.weight"
W = "embedding.word_embeddings.weight"
FORMATS_WITH: dict[str, Odd] = {
    "dcp": Odd("dcp_fsdp2_bf16_4r", "ckpt", dcp, "model.embed.weight", ("model.embed.weight",)),
    "lightning": Odd(
        "lightning_trainer_mp_sharded_2r",
        "step4.ckpt",
        dcp,
        "state_dict.net.0.weight",
        ("state_dict.net.0.weight",),
    ),
    "accelerate": Odd(
        "accelerate_fsdp2_2r",
        "ckpt",
        dcp,
        "model.embed.weight",
        ("model.embed.weight",),
        "pytorch_model_fsdp_0",
    ),
    "olmo_core": Odd(
        "v3_bf16params_ws2",
        "step3",
        dcp,
        "model.embeddings.weight",
        ("model.embeddings.weight",),
        "model_and_optim",
    ),
    "torch_dist": Odd("api_torch_dist_0.19.2", "ckpt", dcp, W, (W,)),
    "fsdp_dtensor": Odd(
        "fsdp_dtensor_llama_dp4_0.19.2", "ckpt", dcp, f"model.module.{W}", (f"model.module.{W}",)
    ),
    "zarr": Odd("api_zarr_0.12.3", "ckpt", zarr, W, (W,)),
    "megatron_legacy": Odd(
        "legacy_llama_tp2pp2_0.15.3",
        "ckpt",
        legacy,
        "",
        ("decoder.layers.self_attention.linear_proj.weight",),
    ),
    "hf_shards": Odd(
        "hf_sharded_4r", "ckpt", header, "model.embed_tokens.weight", ("model.embed_tokens.weight",)
    ),
    "hf_quantized": Odd("hf_fp8_block", "ckpt", header, "norm.weight", ("norm.weight",)),
    "olmo_v01": Odd(
        "v01_fsdp1_fp32_ws2",
        "step3",
        listed_header,
        "transformer.wte.weight",
        ("model.transformer.wte.weight",),
        "model",
    ),
    "olmo_unsharded": Odd(
        "olmo1_unsharded_safetensors",
        "step2-unsharded",
        header,
        "transformer.wte.weight",
        ("model.transformer.wte.weight",),
    ),
    "deepspeed": Odd("z2_bf16_ws4", "ckpt", rank_module, "pos_scale", ("module.pos_scale",)),
    "olmo_local": Odd("olmo1_local_ws2", "step2", flat_module, "", ("model.transformer.blocks.0.*",)),
    "meta": Odd(
        "meta_llama3_tp2",
        "ckpt",
        rank_files,
        "layers.0.feed_forward.w1.weight",
        ("layers.0.feed_forward.w1.weight",),
    ),
    "torch_checkpointing": Odd("tc_safetensors_2r", "ckpt", header, "norm.weight", ("model.norm.weight",)),
    "nanotron": Odd("nanotron_tp2", "ckpt", named_file, NORM, (NORM,)),
    "diffusers": Odd(
        "dit_pipeline",
        "ckpt",
        header,
        "quant_conv.weight",
        ("vae.quant_conv.weight",),
        export=(("model_prefix", "vae."), ("config", "none")),
    ),
    "torch_ranks": Odd(
        "verl_fsdp2_4r",
        "ckpt",
        rank_files,
        "model.embed_tokens.weight",
        ("model.embed_tokens.weight",),
        "global_step_10/actor",
    ),
}
# safetensors, torch_save and the other trees of `lightning` and `torch_ranks`: test_unreadable_parts.py.
ELSEWHERE = {"safetensors", "torch_save"}
# The same reader and files as `fsdp_dtensor`; only one name in `.metadata` differs.
# Universal folders are read as `deepspeed`: the others are names for `--to`.
ALIKE = {"torch_dcp", "deepspeed_universal", "deepspeed_universal_zero3"}


def test_every_format_is_here() -> None:
    readable = {f.name for f in FORMATS if f.reader} - ELSEWHERE - ALIKE
    assert readable - FORMATS_WITH.keys() == set(), (
        "give each a row in FORMATS_WITH: how an odd tensor looks in it"
    )
    assert FORMATS_WITH.keys() - readable == set()


@pytest.mark.usefixtures("asked_here")
@pytest.mark.parametrize("form", FORMATS_WITH)
def test_an_odd_tensor(
    form: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = FORMATS_WITH[form]
    (sample,) = [s for s in request.config.stash[samples.SAMPLES] if s.name == odd.sample and not s.corpus]
    source = tmp_path / odd.at
    shutil.copytree(sample.root / odd.at, source)
    odd.edit(source / odd.below, odd.name)

    manifest = ckptcore.open(str(source))
    assert manifest.format == form
    errors = [f for f in ckptcore.check(manifest).findings if f.severity == "error"]
    assert errors
    assert {f.code for f in errors} == {"unreadable-part"}
    names = {f.fqn for f in errors}
    assert None not in names
    if "*" in odd.fqn[0]:
        assert fnmatch.filter(map(str, names), odd.fqn[0]) == list(map(str, names))
    else:
        assert names == set(odd.fqn)
    assert not names & {t.fqn for t in manifest.tensors}

    assert main(["validate", str(source), "--output", "json"]) == 1
    assert names == {f["fqn"] for f in json.loads(capsys.readouterr().out)["findings"] if f["fqn"] in names}
    for verb in ("consolidate", "export"):
        options: dict[str, Any] = dict(odd.export) if verb == "export" else {}
        with pytest.raises(UnreadablePart) as caught:
            ckptcore.plan(manifest, str(tmp_path / "out"), verb=verb, **options)
        assert caught.value.exit_code == 27
        # Stored names: not every sample is a model that an architecture's map knows.
        options |= {"names": "stored"} if verb == "export" else {}
        planned = ckptcore.plan(manifest, str(tmp_path / "out"), verb=verb, exclude=list(odd.fqn), **options)
        assert sum(f.tensors for f in planned.plan.files)
    assert main(["consolidate", str(source), str(tmp_path / "no")]) == 27
    excluded = [a for name in odd.fqn for a in ("--exclude", name)]
    assert main(["consolidate", str(source), str(tmp_path / "out"), *excluded]) == 0
    found = ckptcore.open(str(tmp_path / "out"))
    assert found.tensors
    for spec in found.tensors:
        here, there = ckptcore.read(found, spec.fqn), ckptcore.read(manifest, spec.fqn)
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        assert torch.equal(here.reshape(-1).view(torch.uint8), there.reshape(-1).view(torch.uint8)), spec.fqn


@pytest.mark.grid
@pytest.mark.parametrize("where", ["weight", "all ranks", "no rule", "buffer"])
@pytest.mark.parametrize("kind", ["bits8", "jagged", "subclass", "module"])
def test_odd_tensors_of_megatron_ranks(kind: str, where: str, tmp_path: Path) -> None:
    """A weight of one rank or of all, one that no rule merges, and a buffer of the optimizer."""

    def edit(tree: dict[str, Any], rank: tuple[int, int, int]) -> None:
        odd = KINDS[kind]()
        if where == "all ranks" or (where == "weight" and rank == (1, 0, 0)):
            tree["model"]["decoder.layers.1.self_attention.linear_proj.weight"] = odd
        elif where == "no rule":
            tree["model"]["odd"] = odd
        elif where == "buffer":
            tree["optimizer"] = {"state": {0: {"exp_avg": odd}}, "param_groups": [{"params": [0]}]}

    source = save(Case(tp=2, pp=2), tmp_path / "ckpt", edit)
    manifest = ckptcore.open(str(source))
    errors = [f for f in ckptcore.check(manifest).findings if f.severity == "error"]
    names = {f.fqn for f in errors}
    weight = "decoder.layers.self_attention.linear_proj.weight"
    ranks = {f"mp_rank_0{t}_00{p}" for t in range(2) for p in range(2)}
    assert (
        names
        == {
            "weight": {weight},
            "all ranks": {weight},
            "no rule": {f"odd/{r}" for r in ranks},
            "buffer": {
                f"optimizer/{r}.state.0.exp_avg" if kind == "bits8" else f"optimizer/{r}" for r in ranks
            },
        }[where]
    )
    with pytest.raises(UnreadablePart):
        ckptcore.plan(manifest, str(tmp_path / "out"), verb="consolidate")
    for verb in ("consolidate", "export"):
        excluded = [str(n) for n in names]
        planned = ckptcore.plan(manifest, str(tmp_path / "out"), verb=verb, exclude=excluded)
        assert sum(f.tensors for f in planned.plan.files) >= 8
