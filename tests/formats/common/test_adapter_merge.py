"""A LoRA adapter merged into its base: the bits of peft's own merge where its products are exact."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_s3 import Stored, serving
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.checking.export_proof import VALUES
from ckptcore.cli.main import run
from ckptcore.errors import CkptError, NameMismatch, SourceChanged, UnsupportedDtype, UsageError
from ckptcore.planning.request import Settings
from ckptcore.utils.average_url import adapted_url

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers", minversion="5.0")
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

State = dict[str, torch.Tensor]
LLAMA = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
# Name -> type of model, its sizes, and fields of the adapter's config.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", LLAMA, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "patterns": (
        "llama",
        LLAMA,
        {
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"k_proj": 2, r".*layers\.1.*up_proj": 8},
            "alpha_pattern": {"q_proj": 16, r".*layers\.1.*up_proj": 2},
        },
    ),
    "root of the rank": ("llama", LLAMA, {"target_modules": ["o_proj"], "r": 16, "use_rslora": True}),
    "embedding": ("llama", LLAMA, {"target_modules": ["embed_tokens", "q_proj"]}),
    "complete modules": ("llama", LLAMA, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "in, out": ("gpt2", GPT2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
}


def quarters(shape: torch.Size, seed: int) -> torch.Tensor:
    """Draw numbers of few bits: products and sums of them are exact in float32."""
    drawn = torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(seed))
    return drawn.float() / 4


def drawn(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def saved(
    case: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    values: Callable[[torch.Size, int], torch.Tensor] = quarters,
) -> State:
    """Save a base and an adapter as their libraries do, and return what peft makes of the two."""
    kind, sizes, fields = CASES[case]
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[kind](**sizes))
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(values(parameter.shape, seed))
    model.to(dtype).save_pretrained(folder / "base")
    tuned = peft.get_peft_model(model, peft.LoraConfig(**LORA | fields))
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(tuned.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(values(parameter.shape, 1000 + seed))
    tuned.save_pretrained(folder / "adapter", save_embedding_layers=False)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    made = peft.PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    made.save_pretrained(folder / "theirs")
    theirs: State = load_file(folder / "theirs" / "model.safetensors")
    return theirs


def save_pair(folder: Path) -> None:
    """Save a matrix, and an adapter of it whose rank is not small beside it."""
    torch.manual_seed(1)
    base = {"up.weight": torch.randn(24, 2048)}
    pair = {
        "base_model.model.up.lora_A.weight": torch.randn(32, 2048),
        "base_model.model.up.lora_B.weight": torch.randn(24, 32),
    }
    for name, tensors in (("base/model", base), ("adapter/adapter_model", pair)):
        (folder / name).parent.mkdir()
        save_file(tensors, folder / f"{name}.safetensors")
    form = {"peft_type": "LORA", "r": 32, "lora_alpha": 32, "target_modules": ["up"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(form))


def merged(folder: Path, target: str = "out", **options: Any) -> ckptcore.Result:
    places = {"sources": [folder / "base"], "destination": folder / target, "adapter": folder / "adapter"}
    return ckptcore.merge(**places, catalog=False, **options)


def require_bits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.alike(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bits_are_those_of_pefts_merge(
    case: str, dtype: torch.dtype, asked_here: None, tmp_path: Path
) -> None:
    theirs = saved(case, tmp_path, dtype)
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert sum(not torch.equal(theirs[name], base[name]) for name in base) >= 2
    merged(tmp_path, verb="export")
    require_bits(load_file(tmp_path / "out" / "model.safetensors"), theirs)
    assert (tmp_path / "out" / "config.json").exists()


def test_bits_depend_on_neither_memory_nor_workers(tmp_path: Path) -> None:
    """Of any values: they are the stated sum, and within rounding of what peft's matrix product gives."""
    theirs = saved("linear", tmp_path, values=drawn)
    merged(tmp_path, "one.safetensors", settings=Settings(memory=1 << 30, workers=1))
    merged(tmp_path, "four.safetensors", settings=Settings(memory=1 << 20, workers=4))
    found = load_file(tmp_path / "one.safetensors")
    require_bits(load_file(tmp_path / "four.safetensors"), found)
    name = "model.layers.1.mlp.down_proj.weight"
    base, adapter = load_file(tmp_path / "base" / "model.safetensors"), tmp_path / "adapter"
    parts = load_file(adapter / "adapter_model.safetensors")
    above = f"base_model.model.{name.removesuffix('.weight')}"
    first, second = (parts[f"{above}.lora_{matrix}.weight"] for matrix in "AB")
    update = second[:, :1] * first[:1]
    for part in range(1, 4):
        update = update + second[:, part : part + 1] * first[part : part + 1]
    assert torch.equal(found[name], base[name] + update * 2.0)
    for each, tensor in theirs.items():
        torch.testing.assert_close(found[each], tensor, rtol=1e-6, atol=1e-5)


def test_a_tile_of_a_large_rank_fits_its_budget(tmp_path: Path) -> None:
    """A row is cut where its part of A would not fit; bits are the same."""
    save_pair(tmp_path)
    merged(tmp_path, "small.safetensors", settings=Settings(memory=1 << 20, workers=1))
    merged(tmp_path, "large.safetensors", settings=Settings(memory=1 << 30, workers=1))
    require_bits(load_file(tmp_path / "small.safetensors"), load_file(tmp_path / "large.safetensors"))
    # Reading the tensor cuts it in another way.
    url = adapted_url(str(tmp_path / "base"), str(tmp_path / "adapter"))
    assert ckptcore.diff(url, tmp_path / "small.safetensors").equal


def test_a_base_of_another_format_and_mesh(tmp_path: Path) -> None:
    theirs = saved("linear", tmp_path)
    flat = {f"model.{n}": t for n, t in load_file(tmp_path / "base" / "model.safetensors").items()}
    (tmp_path / "flat").mkdir()
    save_file(flat, tmp_path / "flat" / "model.safetensors")
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "rules.toml").write_text('[[rule]]\nfqn = "*"\n')
    ckptcore.convert(
        tmp_path / "flat",
        tmp_path / "base",
        verb="reshard",
        mesh="fsdp=3",
        sharding=(tmp_path / "rules.toml").read_text(),
        catalog=False,
    )
    merged(tmp_path, "out.safetensors")
    require_bits(
        load_file(tmp_path / "out.safetensors"), {f"model.{name}": tensor for name, tensor in theirs.items()}
    )


def test_both_on_an_object_store(tmp_path: Path) -> None:
    """Each tile reads all of A once more: blocks that were read ahead may be gone by then."""
    save_pair(tmp_path)
    merged(tmp_path, "here.safetensors")
    with serving() as server:
        for file in (path for name in ("base", "adapter") for path in (tmp_path / name).iterdir()):
            data = file.read_bytes()
            crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
            key = f"b/{file.relative_to(tmp_path)}"
            server.objects[key] = Stored(data, hashlib.md5(data).hexdigest(), crc32=crc)
        ckptcore.merge(
            ["s3://b/base"],
            tmp_path / "there.safetensors",
            adapter="s3://b/adapter",
            settings=Settings(memory=2 << 20, workers=2),
            catalog=False,
        )
    require_bits(load_file(tmp_path / "there.safetensors"), load_file(tmp_path / "here.safetensors"))


def test_an_export_is_verified_and_a_change_is_seen(asked_here: None, tmp_path: Path) -> None:
    saved("linear", tmp_path, torch.bfloat16)
    merged(tmp_path, "hub", verb="export")
    url = adapted_url(str(tmp_path / "base"), str(tmp_path / "adapter"))
    proof = ckptcore.verify_export(tmp_path / "hub", against=url, catalog=False)
    assert {check.name: check.verdict for check in proof.checks}[VALUES] == "ok"
    prepared = ckptcore.prepare(url, tmp_path / "later")
    changed_tensors(tmp_path / "adapter", lambda s: first_only(s, "lora_B.weight", lambda t: t + 1))
    with pytest.raises(SourceChanged):
        ckptcore.execute(prepared)
    proof = ckptcore.verify_export(tmp_path / "hub", against=url, catalog=False)
    assert {check.name: check.verdict for check in proof.checks}[VALUES] == "failed"


def test_the_command_line_records_both_parents(
    asked_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved("linear", tmp_path)
    url = f"sqlite:///{tmp_path}/catalog.sqlite"
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", url)
    base, adapter, out = (str(tmp_path / name) for name in ("base", "adapter", "out"))
    assert run(["merge", base, out, "--adapter", adapter, "--verb", "export"]) == 0
    with open_catalog(url) as catalog:
        ancestors = catalog.lineage(out, down=False).ancestors
        assert sorted(step.source.uri for step in ancestors if step.depth == 2) == sorted([adapter, base])
    capsys.readouterr()
    assert run(["verify-export", out, "--output", "json"]) == 0
    assert {c["verdict"] for c in json.loads(capsys.readouterr().out)["checks"]} == {"ok"}
    assert run(["merge", base, base, out, "--adapter", adapter]) == UsageError.exit_code


def changed_form(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def changed_tensors(folder: Path, change: Callable[[State], State]) -> None:
    (path,) = folder.glob("*.safetensors")
    save_file(
        {n: t.contiguous() for n, t in change(load_file(path)).items()}, path, metadata={"format": "pt"}
    )


def first_only(tensors: State, end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
    name = min(n for n in tensors if n.endswith(end))
    return {**tensors, name: change(tensors[name])}


Q = "q_proj.weight"
REFUSED: dict[str, tuple[Callable[[Path], None], type[CkptError], str]] = {
    "no config": (lambda f: (f / "adapter/adapter_config.json").unlink(), UsageError, "adapter_config"),
    "another kind": (lambda f: changed_form(f / "adapter", peft_type="LOHA"), (UsageError), "LOHA"),
    "magnitudes": (lambda f: changed_form(f / "adapter", use_dora=True), UsageError, "use_dora"),
    "a rank": (lambda f: changed_form(f / "adapter", r=8), NameMismatch, "rank 4"),
    "half of a pair": (
        lambda f: changed_tensors(
            f / "adapter", lambda s: {n: t for n, t in s.items() if "layers.0" not in n or "lora_A" not in n}
        ),
        NameMismatch,
        "lora_A",
    ),
    "a base without a weight": (
        lambda f: changed_tensors(
            f / "base", lambda s: {n: t for n, t in s.items() if not n.endswith("1.self_attn." + Q)}
        ),
        NameMismatch,
        "layers.1.self_attn.q_proj",
    ),
    "a base of another size": (
        lambda f: changed_tensors(f / "base", lambda s: first_only(s, Q, lambda t: t[:, :16])),
        NameMismatch,
        "layers.0.self_attn.q_proj",
    ),
    "a base of float8": (
        lambda f: changed_tensors(f / "base", lambda s: first_only(s, Q, lambda t: t.to(torch.float8_e5m2))),
        UnsupportedDtype,
        "q_proj",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    change, error, name = REFUSED[case]
    saved("linear", tmp_path)
    change(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(error, match=name):
        merged(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("options", [{"weights": (1,)}, {"decay": 0.5}, {"sources": ["a", "b"]}])
def test_an_adapter_has_one_base_and_no_weights(options: dict[str, Any], tmp_path: Path) -> None:
    places = {"sources": ["a"], "destination": tmp_path / "out", "adapter": "c"}
    with pytest.raises(UsageError, match="one base"):
        ckptcore.merge(**places | options, catalog=False)


def test_an_average_of_a_base_and_an_adapter_names_the_option(tmp_path: Path) -> None:
    save_pair(tmp_path)
    with pytest.raises(NameMismatch) as refusal:
        ckptcore.merge([tmp_path / "base", tmp_path / "adapter"], tmp_path / "out", catalog=False)
    assert "--adapter" in refusal.value.hint
