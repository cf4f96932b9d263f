"""Verifying exports: what is wrong with one is found, by the check that asks for it, and by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.catalog.types import ConversionDetail, ConversionRow
from ckptcore.checking.export_proof import Check, ExportProof
from ckptcore.cli import main
from ckptcore.comparison.export_logits import LogitsWanted, check_logits
from ckptcore.errors import BudgetTooSmall, SourceUnreadable, UsageError

transformers: Any = pytest.importorskip("transformers")

from tiny_llama import tiny_llama  # noqa: E402

pytestmark = pytest.mark.usefixtures("asked_here")
Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ckpt/``: model, with tied embeddings, and optimizer state; ``config/``; ``hf/``: its export;
    ``right/``: what transformers saves."""
    folder = tmp_path_factory.mktemp("llama")
    model = tiny_llama(rope_theta=500000.0)
    dcp.save({"model": model.state_dict(), "optim": {"step": torch.tensor(3)}}, checkpoint_id=folder / "ckpt")
    model.config.save_pretrained(folder / "config")
    model.save_pretrained(folder / "right")
    source, config = str(folder / "ckpt"), str(folder / "config")
    ckptcore.convert(source, str(folder / "hf"), verb="export", config=config, catalog=False)
    return folder


@pytest.fixture
def export(llama: Path, tmp_path: Path) -> Path:
    """A copy of the export, to be damaged, and beside it one of the source that its card names."""
    shutil.copytree(llama / "ckpt", tmp_path / "copy/ckpt")
    return Path(shutil.copytree(llama / "hf", tmp_path / "copy/hf"))


def change(export: Path, how: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Writes the weights again."""
    tensors = load_file(export / "model.safetensors")
    how(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, export / "model.safetensors", {"format": "pt"})


def verdicts(proof: ExportProof) -> dict[str, str]:
    return {check.name: check.verdict for check in proof.checks}


def check(proof: ExportProof, name: str) -> Check:
    return next(c for c in proof.checks if c.name == name)


def names(proof: ExportProof, check_name: str) -> list[str]:
    return [p.name for p in check(proof, check_name).problems]


def test_a_right_export_passes_with_the_source_of_its_card(llama: Path) -> None:
    proof = ckptcore.verify_export(str(llama / "hf"))
    assert verdicts(proof) == dict.fromkeys(("elements", "names", "config", "fingerprints", "finite"), "ok")
    assert (proof.verdict, proof.found_by, proof.source) == ("ok", "the model card", str(llama / "ckpt"))
    left_out = dict(check(proof, "elements").values)["left_out"]
    assert left_out["tied to model.embed_tokens.weight: stored once, equality is checked"] == 1
    assert proof.fingerprint == ckptcore.fingerprint(str(llama / "hf")).fingerprint


def test_two_tensors_of_one_shape_swapped(llama: Path, export: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE], tensors[UP] = tensors[UP], tensors[GATE]

    change(export, swap)
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"))
    assert verdicts(proof) == dict.fromkeys(verdicts(proof), "ok") | {"fingerprints": "failed"}
    assert sorted(names(proof, "fingerprints")) == [GATE, UP]


def test_one_flipped_bit(llama: Path, export: Path) -> None:
    data = bytearray((export / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (export / "model.safetensors").write_bytes(data)
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"))
    (problem,) = check(proof, "fingerprints").problems
    last = list(ckptcore.open(str(export)).tensors)[-1]
    assert problem.name == last.fqn
    assert "1 of 32 elements" in problem.what or "1 of " in problem.what
    assert str([n - 1 for n in last.shape]) in problem.what


def test_a_nan_that_the_source_has_not(llama: Path, export: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q][3, 4], tensors[Q][5, 6] = float("nan"), float("-inf")

    change(export, spoil)
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"))
    (problem,) = check(proof, "finite").problems
    assert (problem.name, problem.what) == (Q, "1 NaN and 1 Inf, the source has 0 and 0")


def test_a_tensor_that_is_not_there(llama: Path, export: Path) -> None:
    change(export, lambda tensors: tensors.pop(K))
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"))
    assert verdicts(proof)["elements"] == verdicts(proof)["names"] == "failed"
    assert names(proof, "elements") == names(proof, "names") == [K]
    assert K in check(proof, "elements").summary


def test_a_tensor_that_comes_from_nowhere(llama: Path, export: Path) -> None:
    change(export, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"))
    assert names(proof, "elements") == ["model.extra.weight"]
    assert proof.fingerprint is None  # not every tensor was compared


@pytest.mark.parametrize("cut", [40, 20_000])
def test_a_truncated_file(llama: Path, export: Path, cut: int) -> None:
    file = export / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"))
    assert verdicts(proof) == {
        "elements": "failed",
        "names": "not-done",
        "config": "not-done",
        "fingerprints": "not-done",
        "finite": "not-done",
    }
    stop = len(file.read_bytes())
    manifest = ckptcore.open(str(llama / "hf"))
    cut_off = [
        t.fqn
        for row, t in enumerate(manifest.tensors)
        for c in manifest.chunks_of(row)
        if manifest.items[c.item].start + manifest.items[c.item].length > stop
    ]
    assert f"{cut_off[0]} is cut off" in check(proof, "elements").summary


def test_a_file_of_several_that_is_gone(llama: Path, tmp_path: Path) -> None:
    options = {"verb": "export", "config": str(llama / "config"), "max_file_size": 8192}
    ckptcore.convert(str(llama / "ckpt"), str(tmp_path / "hf"), **options)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())["weight_map"]
    gone = index[Q]
    (tmp_path / "hf" / gone).unlink()
    proof = ckptcore.verify_export(str(tmp_path / "hf"))
    found = names(proof, "elements")
    assert {gone, *(n for n, file in index.items() if file == gone)} == set(found)
    assert verdicts(proof)["fingerprints"] == "ok"  # of all others


def test_an_index_that_is_gone(llama: Path, tmp_path: Path) -> None:
    """All values are there, and transformers opens none of them."""
    options = {"verb": "export", "config": str(llama / "config"), "max_file_size": 8192}
    ckptcore.convert(str(llama / "ckpt"), str(tmp_path / "hf"), **options)
    assert ckptcore.verify_export(str(tmp_path / "hf")).verdict == "ok"
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    proof = ckptcore.verify_export(str(tmp_path / "hf"))
    assert (proof.verdict, names(proof, "elements")) == ("failed", ["model.safetensors.index.json"])
    with pytest.raises(OSError, match="no file named"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")


def test_a_permuted_projection_is_far_from_a_related_folder(
    llama: Path, export: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    base = {n: t + 0.001 * torch.randn_like(t) for n, t in load_file(llama / "hf/model.safetensors").items()}
    del base[K]
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base/model.safetensors")
    near = str(tmp_path / "base")
    proof = ckptcore.verify_export(str(export), near=near)
    assert verdicts(proof)["near"] == "ok"
    assert dict(check(proof, "near").values)["only_in_export"] == [K]

    def permute(tensors: dict[str, torch.Tensor]) -> None:  # the rows of rotary halves, as for another layout
        tensors[Q] = tensors[Q].view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)

    change(export, permute)
    proof = ckptcore.verify_export(str(export), near=near)
    assert names(proof, "near") == [Q]
    (lowest, *_) = dict(check(proof, "near").values)["lowest"]
    assert lowest["name"] == Q
    assert lowest["cosine"] < 0.4


def test_near_is_what_the_threshold_says(llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = {n: t + 0.02 * torch.randn_like(t) for n, t in load_file(llama / "hf/model.safetensors").items()}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base/model.safetensors")
    loose = ckptcore.verify_export(str(llama / "hf"), near=str(tmp_path / "base"), near_threshold=0.1)
    tight = ckptcore.verify_export(str(llama / "hf"), near=str(tmp_path / "base"), near_threshold=0.999)
    assert verdicts(loose)["near"] == "ok"
    assert {Q, K, GATE, UP} <= set(names(tight, "near"))
    mine, theirs = load_file(llama / "hf/model.safetensors")[Q], base[Q]
    cosine = torch.nn.functional.cosine_similarity(mine.double().flatten(), theirs.double().flatten(), dim=0)
    found = {row["name"]: row["cosine"] for row in dict(check(loose, "near").values)["lowest"]}
    assert found[Q] == pytest.approx(float(cosine), abs=1e-12)


def test_logits_show_what_no_shape_does(llama: Path, export: Path) -> None:
    config = json.loads((export / "config.json").read_text())
    rope = config.get("rope_parameters") or config
    assert rope["rope_theta"] == 500000.0
    rope["rope_theta"] = 10000.0
    (export / "config.json").write_text(json.dumps(config))
    proof = ckptcore.verify_export(str(export), reference=str(llama / "right"))
    assert verdicts(proof) == {
        "elements": "ok",
        "names": "ok",
        "config": "failed",
        "fingerprints": "ok",
        "finite": "ok",
        "reference": "ok",
        "logits": "failed",
    }
    found = dict(check(proof, "logits").values)
    assert found["max_abs_difference"] > 0
    assert not found["bit_equal"]
    assert "rope" in check(proof, "logits").summary
    assert "10000.0" in check(proof, "logits").summary


def test_logits_of_a_right_export_are_equal_bit_for_bit(llama: Path) -> None:
    proof = ckptcore.verify_export(str(llama / "hf"), reference=str(llama / "right"))
    found = dict(check(proof, "logits").values)
    assert (proof.verdict, found["bit_equal"], found["max_abs_difference"]) == ("ok", True, 0.0)
    assert found["shape"] == [2, 32, 96]


def test_logits_come_from_a_process_of_their_own(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = check_logits(str(llama / "hf"), LogitsWanted(str(llama / "right")))
    assert (found.verdict, dict(found.values)["bit_equal"]) == ("ok", True)


def test_logits_alone_say_that_it_opens(export: Path) -> None:
    change(export, lambda tensors: tensors.pop(K))
    proof = ckptcore.verify_export(str(export), logits=True)
    assert names(proof, "logits") == [K]  # transformers would start it at random


def test_models_that_do_not_fit_are_not_opened(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptcore.comparison.export_logits.available_memory", lambda: 1 << 20)
    with pytest.raises(BudgetTooSmall, match=r"takes 1\.0 GiB, 1\.0 MiB are free") as caught:
        ckptcore.verify_export(str(llama / "hf"), logits=True)
    assert "any_memory=True" in caught.value.hint


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_casts_are_compared_after_the_cast(llama: Path, tmp_path: Path, dtype: str) -> None:
    state = ckpt_state(llama)
    state["model.norm.weight"][:2] = torch.tensor([1e6, float("nan")])  # more than float16 holds
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt")
    ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "hf"), verb="export", dtype=dtype)
    proof = ckptcore.verify_export(str(tmp_path / "hf"))
    assert verdicts(proof)["fingerprints"] == "ok"
    assert names(proof, "finite") == (["model.norm.weight"] if dtype == "fp16" else [])
    change(tmp_path / "hf", lambda tensors: tensors[Q].view(-1)[:1].mul_(1.5))
    proof = ckptcore.verify_export(str(tmp_path / "hf"))
    assert names(proof, "fingerprints") == [Q]
    assert "after the cast from float32" in check(proof, "fingerprints").summary
    proof = ckptcore.verify_export(str(tmp_path / "hf"), dtype="fp32")
    assert len(names(proof, "fingerprints")) == len(state)  # another dtype than what is said


def ckpt_state(llama: Path) -> dict[str, torch.Tensor]:
    manifest = ckptcore.open(str(llama / "ckpt"))
    kept = [t.fqn for t in manifest.tensors if t.fqn.startswith("model.") and "lm_head" not in t.fqn]
    return {n.removeprefix("model."): ckptcore.read(manifest, n) for n in kept}


def test_ties_that_do_not_hold_in_the_source(llama: Path, tmp_path: Path, export: Path) -> None:
    state = ckpt_state(llama)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][2, 3] += 1
    dcp.save({"model": state}, checkpoint_id=tmp_path / "ckpt")
    proof = ckptcore.verify_export(str(export), against=str(tmp_path / "ckpt"))
    assert names(proof, "fingerprints") == ["lm_head.weight, which is tied to model.embed_tokens.weight"]


def test_ties_are_found_without_a_card(llama: Path, export: Path) -> None:
    (export / "README.md").unlink()
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"))
    assert proof.verdict == "ok"


def test_a_check_without_evidence_is_not_done(llama: Path, export: Path) -> None:
    (export / "README.md").unlink()
    proof = ckptcore.verify_export(str(export))
    assert verdicts(proof) == {
        "elements": "not-done",
        "names": "ok",
        "config": "ok",
        "fingerprints": "not-done",
        "finite": "not-done",
    }
    assert (proof.verdict, proof.exit_code) == ("unproven", 26)
    (export / "config.json").unlink()
    proof = ckptcore.verify_export(str(export), against=str(llama / "ckpt"), tie=[TIE])
    assert verdicts(proof)["names"] == "not-done"
    assert verdicts(proof)["elements"] == "ok"


TIE = ("lm_head.weight", "model.embed_tokens.weight")


def test_a_source_that_is_another_one_now(llama: Path, export: Path, tmp_path: Path) -> None:
    card = (export / "README.md").read_text()
    state = {"model": {"w": torch.ones(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "ckpt")
    (export / "README.md").write_text(card.replace("../ckpt", str(tmp_path / "ckpt")))
    proof = ckptcore.verify_export(str(export))
    assert "another checkpoint now" in check(proof, "elements").summary
    (export / "README.md").write_text(card.replace("../ckpt", str(tmp_path / "gone")))
    proof = ckptcore.verify_export(str(export))
    assert verdicts(proof)["fingerprints"] == "not-done"
    with pytest.raises(SourceUnreadable):
        ckptcore.verify_export(str(export), against=str(tmp_path / "gone"))


def test_a_damaged_source_is_not_the_exports_fault(llama: Path, export: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama / "ckpt", tmp_path / "ckpt"))
    (file,) = source.glob("*.distcp")
    data = bytearray(file.read_bytes())
    manifest = ckptcore.open(str(source))
    item = manifest.items[int(manifest.chunks.item[int(manifest.chunks.first[manifest.index[f"model.{Q}"]])])]
    data[item.start + item.length // 2] ^= 0xFF
    file.write_bytes(data)
    proof = ckptcore.verify_export(str(export), against=str(source))
    assert verdicts(proof)["fingerprints"] == "not-done"
    assert proof.verdict == "unproven"
    assert Q in check(proof, "fingerprints").summary


def test_the_command_line(llama: Path, export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*given: str) -> tuple[int, Mapping[str, Any]]:
        code = main.run(["verify-export", str(export), "--no-catalog", *given, "--output", "json"])
        return code, json.loads(capsys.readouterr().out)

    code, found = run("--against", str(llama / "ckpt"))
    assert (code, found["verdict"]) == (0, "ok")
    assert [c["check"] for c in found["checks"]] == ["elements", "names", "config", "fingerprints", "finite"]
    change(export, lambda tensors: tensors[Q].neg_())
    code, found = run("--against", str(llama / "ckpt"))
    assert (code, found["verdict"]) == (1, "failed")
    assert [p["name"] for c in found["checks"] for p in c["problems"]] == [Q]
    assert main.run(["verify-export", str(export), "--no-catalog", "--against", str(llama / "ckpt")]) == 1
    assert Q in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"include": ["nothing*"]}, "matches nothing"),
        ({"near_threshold": float("nan")}, "cosine"),
        ({"logits": True, "logits_tolerance": float("nan")}, "tolerance"),
        ({"logits": True, "logits_dtype": "int8"}, "cannot open models as int8"),
    ],
)
def test_arguments_that_say_nothing(llama: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        ckptcore.verify_export(str(llama / "hf"), against=str(llama / "ckpt"), **options)


def test_the_recorded_request_is_read_from_any_folder(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on the command line, whose options have defaults that nobody named."""
    catalog = str(tmp_path / "catalog.sqlite")
    monkeypatch.chdir(tmp_path)
    for name in ("ckpt", "config"):
        shutil.copytree(llama / name, name)
    forms: dict[str, dict[str, Any]] = {
        "named": {"rename": {"model.": "net."}},
        "config": {"config": "config"},
    }
    for name, options in forms.items():
        ckptcore.convert("ckpt", f"{name}-out", verb="export", catalog=catalog, **options)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in forms:
        main.run(["verify-export", f"{tmp_path}/{name}-out", "--catalog", catalog, "--output", "json"])
        answer = json.loads(capsys.readouterr().out)
        verdicts_of = {check["check"]: check["verdict"] for check in answer["checks"]}
        assert (verdicts_of["elements"], verdicts_of["fingerprints"]) == ("ok", "ok"), name


@pytest.mark.parametrize("verb", ["consolidate", "reshard"])
def test_what_another_verb_wrote_is_no_export(llama: Path, tmp_path: Path, verb: str) -> None:
    catalog, out = str(tmp_path / "catalog.sqlite"), str(tmp_path / "out")
    options: dict[str, Any] = {"to": "dcp", "mesh": "dp=2"} if verb == "reshard" else {}
    made = ckptcore.convert(llama / "ckpt", out, verb=verb, catalog=catalog, **options)
    with pytest.raises(UsageError, match=f"as an export: {verb} wrote it") as caught:
        ckptcore.verify_export(out, catalog=catalog)
    assert caught.value.hint == f"compare it with its source: ckptcore diff {llama / 'ckpt'} {out}"
    with open_catalog(catalog) as opened:
        detail = opened.show(str(made.conversion))
    assert isinstance(detail, ConversionDetail)
    assert detail.conversion.export_verdict is None
    assert ckptcore.verify_export(out, against=llama / "ckpt", catalog=False).source


def test_the_catalog_knows_how_it_was_made_and_keeps_the_verdict(llama: Path, tmp_path: Path) -> None:
    catalog, hf = str(tmp_path / "catalog.sqlite"), tmp_path / "hf"
    options: dict[str, Any] = {"rename": [("model.", "net.")], "exclude": ["*lm_head*"], "dtype": "bf16"}
    made = ckptcore.convert(str(llama / "ckpt"), str(hf), verb="export", catalog=catalog, **options)
    proof = ckptcore.verify_export(str(hf), catalog=catalog)
    assert (proof.found_by, proof.conversion) == ("the catalog", made.conversion)
    # Names are not held against a config that is not there.
    assert verdicts(proof) == {"elements": "ok", "names": "not-done", "fingerprints": "ok", "finite": "ok"}
    alone = ckptcore.verify_export(str(hf))  # the card names the source, but not how it was made
    assert verdicts(alone)["elements"] == "failed"

    def row() -> ConversionRow:
        with open_catalog(catalog) as opened:
            detail = opened.show(str(made.conversion))
        assert isinstance(detail, ConversionDetail)
        return detail.conversion

    assert row().export_verdict == "unproven"
    file = hf / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    last = ckptcore.open(str(hf)).tensors[-1].fqn
    proof = ckptcore.verify_export(str(hf), catalog=catalog)
    assert names(proof, "fingerprints") == [last]
    assert row().export_verdict == "failed"
    assert last in row().export_checks["fingerprints"]["summary"]
    file.write_bytes(data[:-7])  # what cannot be opened is no other checkpoint: its files are damaged
    assert ckptcore.verify_export(str(hf), catalog=catalog).conversion == made.conversion
    assert row().export_checks["elements"]["verdict"] == "failed"


@pytest.mark.parametrize("verified", [False, True])
def test_a_source_that_is_gone_leaves_what_the_catalog_recorded(
    llama: Path, tmp_path: Path, verified: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    catalog, hf = str(tmp_path / "catalog.sqlite"), tmp_path / "hf"
    source = Path(shutil.copytree(llama / "ckpt", tmp_path / "ckpt"))
    options = {"config": str(llama / "config"), "max_file_size": 8192, "catalog": catalog}
    made = ckptcore.convert(str(source), str(hf), verb="export", **options)
    if verified:
        assert ckptcore.verify_export(str(hf), catalog=catalog).verdict == "ok"
    shutil.rmtree(source)
    (hf / "README.md").write_text("a card of its own")
    proof = ckptcore.verify_export(str(hf), catalog=catalog)
    assert (proof.verdict, proof.exit_code, proof.conversion) == ("unproven", 26, made.conversion)
    assert verdicts(proof) == {
        "elements": "not-done",
        "names": "ok",
        "config": "ok",
        "fingerprints": "not-done",
        "finite": "not-done",
    }
    found = check(proof, "fingerprints")
    count = len(list(hf.glob("*.safetensors")))
    assert dict(found.values) | {"recorded_at": None, "recorded_fingerprint": None} == {
        "files_unchanged": count,
        "files_without_digest": 0,
        "changed_beside": ["README.md"],
        "recorded_fingerprint": None,
        "recorded_verdict": "ok" if verified else None,
        "recorded_at": None,
    }
    assert f"{count} files of tensors are what was written" in found.summary
    assert str(source) in found.summary
    with open_catalog(catalog) as opened:  # what was proven is not taken back
        row = opened.show(str(made.conversion))
    assert isinstance(row, ConversionDetail)
    assert row.conversion.export_verdict == ("ok" if verified else "unproven")
    file = sorted(hf.glob("*.safetensors"))[1]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main.run(["verify-export", str(hf), "--catalog", catalog, "--output", "json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [(c["check"], p["name"]) for c in answer["checks"] for p in c["problems"]] == [
        ("fingerprints", file.name)
    ]


def test_the_catalog_says_nothing_of_another_checkpoint(llama: Path, tmp_path: Path) -> None:
    catalog, hf = str(tmp_path / "catalog.sqlite"), tmp_path / "hf"
    ckptcore.convert(str(llama / "ckpt"), str(hf), verb="export", catalog=catalog)
    change(hf, lambda tensors: tensors.pop(K))
    proof = ckptcore.verify_export(str(hf), catalog=catalog)
    assert (proof.found_by, proof.conversion) == ("the model card", None)
    assert names(proof, "elements") == [K]


@pytest.mark.parametrize("below", ["", "model"])
def test_rows_that_pad_a_vocabulary_are_accounted_for(tmp_path: Path, below: str) -> None:
    """A part of a tensor is left out, and the rest of it goes on."""
    import trainer_names

    config, hub = trainer_names.hub_model("llama")
    state = trainer_names.megatron(config, dict(hub), "stacked")
    named = {n: t.contiguous() for n, t in state.items()}
    dcp.save({below: named} if below else named, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"verb": "export", "config": str(tmp_path / "config.json")}
    ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "hf"), **options)
    proof = ckptcore.verify_export(str(tmp_path / "hf"))
    assert proof.verdict == "ok", proof
    assert dict(check(proof, "elements").values)["left_out"] == {"rows that pad the vocabulary": 2}

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[GATE], tensors[UP] = tensors[UP], tensors[GATE]

    change(tmp_path / "hf", swap)
    assert sorted(names(ckptcore.verify_export(str(tmp_path / "hf")), "fingerprints")) == [GATE, UP]


@pytest.mark.parametrize("how", ["itself", "link", "file", "hardlinks"])
def test_an_export_proves_nothing_of_itself(export: Path, tmp_path: Path, how: str) -> None:
    against = {"itself": export, "file": export / "model.safetensors"}.get(how, tmp_path / how)
    if how == "link":
        against.symlink_to(export)
    elif how == "hardlinks":
        against.mkdir()
        for file in export.iterdir():
            (against / file.name).hardlink_to(file)
    with pytest.raises(UsageError, match="they are the same files"):
        ckptcore.verify_export(str(export), against=str(against))


def test_a_tie_that_the_config_alone_makes(tmp_path: Path, llama: Path) -> None:
    """transformers would take one of the two tensors, and leave the other aside."""
    weights = load_file(llama / "right/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    dcp.save(weights, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    form = json.loads((llama / "config/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(form | {"tie_word_embeddings": False}))
    options = {"verb": "export", "config": str(tmp_path / "config.json")}
    ckptcore.convert(str(tmp_path / "ckpt"), str(tmp_path / "hf"), **options)
    assert ckptcore.verify_export(str(tmp_path / "hf")).verdict == "ok"
    (tmp_path / "hf/config.json").write_text(json.dumps(form))
    proof = ckptcore.verify_export(str(tmp_path / "hf"))
    assert names(proof, "fingerprints") == [
        "lm_head.weight, which config.json ties to model.embed_tokens.weight"
    ]


def test_weights_that_a_loader_would_take_instead(llama: Path, tmp_path: Path) -> None:
    options = {"verb": "export", "config": str(llama / "config"), "max_file_size": 8192}
    ckptcore.convert(str(llama / "ckpt"), str(tmp_path / "hf"), **options)
    shutil.copy(llama / "hf/model.safetensors", tmp_path / "hf")  # transformers reads this one, and no index
    change(tmp_path / "hf", lambda tensors: tensors[Q].zero_())
    proof = ckptcore.verify_export(str(tmp_path / "hf"))
    assert names(proof, "elements") == ["model.safetensors"]


def set_fields(config: Path, **fields: Any) -> None:
    form = json.loads(config.read_text()) | fields
    config.write_text(json.dumps({k: v for k, v in form.items() if v is not ...}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}, "rope_type"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_attention_heads": 2, "head_dim": 16}, "num_attention_heads"),
        ({"rope_theta": 1e4}, "rope_theta"),  # beside the right one: transformers 4 reads it
    ],
)
def test_a_field_that_no_tensor_shows(llama: Path, export: Path, fields: dict[str, Any], named: str) -> None:
    """By default, with the right config beside the source."""
    source = export.parent / "ckpt"
    shutil.copy(llama / "config/config.json", source)
    proof = ckptcore.verify_export(str(export), against=str(source))
    assert verdicts(proof)["config"] == proof.verdict == "ok"
    assert dict(check(proof, "config").values)["unconfirmed"] == []
    set_fields(export / "config.json", **fields)
    proof = ckptcore.verify_export(str(export), against=str(source))
    assert verdicts(proof)["config"] == "failed"
    assert any(named in name for name in names(proof, "config"))


def test_the_config_beside_a_source_s_folder_is_compared(llama: Path, export: Path) -> None:
    source = shutil.copytree(llama / "ckpt", export.parent / "run/step3")
    shutil.copy(llama / "config/config.json", export.parent / "run")
    set_fields(export / "config.json", rms_norm_eps=1e-3)
    proof = ckptcore.verify_export(str(export), against=str(source))
    (problem,) = check(proof, "config").problems
    assert f"{export.parent}/run/config.json says rms_norm_eps = 1e-" in problem.what


def test_what_nothing_confirms_is_named(llama: Path) -> None:
    proof = ckptcore.verify_export(str(llama / "hf"), against=str(llama / "ckpt"), config="none")
    found = check(proof, "config")
    assert found.verdict == "ok"
    assert {"rms_norm_eps", "hidden_act", "rope_parameters.rope_theta"} <= set(
        dict(found.values)["unconfirmed"]
    )
    assert found.summary.startswith("no other config is known; nothing confirms ")


def test_the_reference_s_config_is_compared_in_every_field(llama: Path, export: Path) -> None:
    set_fields(export / "config.json", a_field_of_tomorrow=3)
    proof = ckptcore.verify_export(str(export), reference=str(llama / "right"), against=str(llama / "ckpt"))
    assert "a_field_of_tomorrow" in dict(check(proof, "config").values)["unconfirmed"]
    set_fields(export / "config.json", rms_norm_eps=2e-6)
    proof = ckptcore.verify_export(str(export), reference=str(llama / "right"), against=str(llama / "ckpt"))
    assert names(proof, "config") == ["rms_norm_eps"]


def test_rows_that_no_logit_uses_are_compared_with_the_reference(llama: Path, export: Path) -> None:
    """A few token ids use a few rows of the embedding."""
    used = ckptcore.verify_export(str(llama / "hf"), reference=str(llama / "right"))
    assert "on 64 of 96 token ids" in check(used, "logits").summary
    assert dict(check(used, "logits").values)["tokens"] == 64
    assert check(used, "reference").summary == "20 tensors equal bit for bit"

    def change_unused(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"][:, 0].zero_()
        tensors["model.layers.0.mlp.up_proj.weight"][0].zero_()

    for folder in ("right", "hf"):  # a unit of the MLP that computes nothing, so that its gate has no effect
        shutil.copytree(llama / folder, export.parent / f"dead-{folder}")
        change(export.parent / f"dead-{folder}", change_unused)
    change(export.parent / "dead-hf", lambda tensors: tensors[GATE][0].neg_())
    proof = ckptcore.verify_export(
        str(export.parent / "dead-hf"), reference=str(export.parent / "dead-right")
    )
    assert verdicts(proof)["logits"] == "ok"
    assert names(proof, "reference") == [GATE]
    assert "32 of 1,536 elements differ" in check(proof, "reference").summary


def test_a_tolerance_lets_tensors_differ_and_names_them(llama: Path, export: Path) -> None:
    change(export, lambda tensors: tensors[Q].mul_(1 + 1e-6))
    proof = ckptcore.verify_export(str(export), reference=str(llama / "right"), logits_tolerance=1e-2)
    assert verdicts(proof)["reference"] == verdicts(proof)["logits"] == "ok"
    assert Q in check(proof, "reference").summary
    assert dict(check(proof, "reference").values)["differing"] == [Q]


def test_a_head_that_the_reference_alone_stores(llama: Path, tmp_path: Path) -> None:
    """It is tied, and equal: nothing differs. With another value it is not what the export has."""
    right = Path(shutil.copytree(llama / "right", tmp_path / "right"))
    change(
        right,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    proof = ckptcore.verify_export(str(llama / "hf"), reference=str(right))
    assert verdicts(proof)["reference"] == "ok"
    change(right, lambda tensors: tensors["lm_head.weight"][1].neg_())
    proof = ckptcore.verify_export(str(llama / "hf"), reference=str(right))
    assert names(proof, "reference") == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("kind", "cls", "small", "on"),
    [
        (
            "whisper",
            "WhisperForConditionalGeneration",
            {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8,
             "max_source_positions": 20, "max_target_positions": 30, "vocab_size": 99, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
            "on input_features and 56 of 99 token ids",
        ),
        (
            "wav2vec2",
            "Wav2Vec2ForCTC",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
             "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
             "vocab_size": 40},
            "on input_values",
        ),
        (
            "vit",
            "ViTForImageClassification",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
             "image_size": 16, "patch_size": 8},
            "on pixel_values",
        ),
        (
            "vilt",  # which chooses patches at random
            "ViltModel",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
             "image_size": 32, "patch_size": 8, "vocab_size": 99, "max_position_embeddings": 20,
             "max_image_length": 5},
            "on pixel_values and 36 of 99 token ids",
        ),
        (
            "clip",
            "CLIPModel",
            {"projection_dim": 8,
             "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                             "intermediate_size": 32, "vocab_size": 99, "max_position_embeddings": 20,
                             "eos_token_id": 98},
             "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                               "intermediate_size": 32, "image_size": 16, "patch_size": 8}},
            "on pixel_values and 34 of 99 token ids",
        ),
    ],
)  # fmt: skip
def test_models_run_on_inputs_of_their_own(
    tmp_path: Path, kind: str, cls: str, small: dict[str, Any], on: str
) -> None:
    torch.manual_seed(3)
    model = getattr(transformers, cls)(transformers.CONFIG_MAPPING[kind](**small))
    model.save_pretrained(tmp_path / "right")
    shutil.copytree(tmp_path / "right", tmp_path / "hf")
    proof = ckptcore.verify_export(str(tmp_path / "hf"), reference=str(tmp_path / "right"))
    assert verdicts(proof)["logits"] == verdicts(proof)["reference"] == "ok", proof.checks
    assert check(proof, "logits").summary.endswith(on)
    name = next(
        n for n in load_file(tmp_path / "hf/model.safetensors") if "q_proj.weight" in n or "query.weight" in n
    )
    change(tmp_path / "hf", lambda tensors: tensors[name].mul_(30))
    proof = ckptcore.verify_export(str(tmp_path / "hf"), reference=str(tmp_path / "right"))
    assert verdicts(proof)["logits"] == verdicts(proof)["reference"] == "failed"


def test_a_model_that_is_not_run_says_why(tmp_path: Path) -> None:
    small = {
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "prediction_length": 4,
        "context_length": 8,
    }
    model = transformers.TimeSeriesTransformerModel(transformers.TimeSeriesTransformerConfig(**small))
    model.save_pretrained(tmp_path / "hf")
    proof = ckptcore.verify_export(str(tmp_path / "hf"), logits=True)
    assert verdicts(proof)["logits"] == "not-done"
    assert "TimeSeriesTransformerModel was opened and not run: " in check(proof, "logits").summary
