"""Unused rules: a typo in a file of rules is reported, and a rule for another model is accepted."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from topologies import hf, manifest_of, with_adam

import ckptcore
from ckptcore.cli.main import run
from ckptcore.planning.output_findings import unused_rules

SLIP = """
[[rule]]
fqn = "*.self_attn.q_prj.weight"
tp = "shard(0)"

[[rule]]
fqn = "model.layers.*.mlp.*"

[[rule]]
fqn = ["*.mlp.gate_proj.weight", "*.mlp.up_proj.weight"]
tp = "shard(0)"
"""


def messages(text: str, **shapes: tuple[int, ...]) -> list[str]:
    manifest = manifest_of(shapes or with_adam(hf()))
    found = unused_rules(manifest, text)
    assert all((f.code, f.severity) == ("unused-rule", "warning") for f in found)
    return [f.message for f in found]


def test_a_typo_and_a_rule_behind_another_are_reported() -> None:
    slip, behind = messages(SLIP)
    assert slip.startswith(
        "[[rule]] 1 of --sharding, *.self_attn.q_prj.weight, matches no parameter; similar names"
    )
    assert "model.layers.0.self_attn.q_proj.weight" in slip
    assert behind.startswith(
        "[[rule]] 3 of --sharding, *.mlp.gate_proj.weight, *.mlp.up_proj.weight, has no effect"
    )
    assert "an earlier rule matches its parameters, such as model.layers.0.mlp.gate_proj.weight" in behind


def test_used_rules_are_not_reported() -> None:
    assert messages('family = "hf"\n[[rule]]\nfqn = ["nothing.*", "*.q_proj.weight"]') == []
    assert (
        messages('[stages]\nlayers = "model.layers.{n}."\nfirst = ["*embed_tokens*"]\nlast = "lm_head.*"')
        == []
    )


def test_unused_stages_are_reported() -> None:
    text = '[stages]\nlayers = "modle.layers.{n}."\nfirst = "*embedding*"\nlast = ["*zzz*", "lm_head.*"]'
    layers, first = messages(text)
    assert layers.startswith(
        "[stages] layers of --sharding, modle.layers.{n}., matches no parameter; similar"
    )
    assert first.startswith("[stages] first of --sharding, *embedding*, matches no parameter")


def test_state_alone_is_no_use_of_a_rule() -> None:
    """Rules are for names of parameters; an optimizer's own follow them."""
    (found,) = messages('[[rule]]\nfqn = "*.exp_avg"')
    assert "matches no parameter" in found


def test_many_names_and_rules_cost_no_more_than_some() -> None:
    shapes = {f"{'x' * 190}{'abcdefgh'[n % 8]}.{'q' * (n % 97)}.w": (2,) for n in range(20_000)}
    rules = "".join(f'[[rule]]\nfqn = ["{"y" * 300}{n}*", "*{"x" * 180}{n}z"]\n' for n in range(60))
    began = time.process_time()
    assert len(messages(rules, **shapes)) == 20
    assert time.process_time() - began < 20


@pytest.mark.parametrize("verb", ["plan", "reshard"])
def test_commands_tell_it(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, rules = tmp_path / "source.safetensors", tmp_path / "rules.toml"
    save_file({"net.wq.weight": torch.arange(8.0).reshape(4, 2)}, source)
    rules.write_text('[[rule]]\nfqn = "net.wk.weight"\nfsdp = "shard(1)"\n')
    command = [
        verb,
        str(source),
        str(tmp_path / "out"),
        "--to",
        "dcp",
        "--mesh",
        "fsdp=2",
        "--sharding",
        str(rules),
    ]
    assert run([*command, *(["--no-catalog"] if verb == "reshard" else []), "--output", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["warnings"]
    assert found["code"] == "unused-rule"
    assert "net.wk.weight, matches no parameter; similar names: net.wq.weight" in found["message"]
    command[2] = str(tmp_path / "again")
    assert run([*command, *(["--no-catalog"] if verb == "reshard" else [])]) == 0
    assert "unused-rule" in capsys.readouterr().out
    plain = ckptcore.plan(str(source), str(tmp_path / "third"), verb="reshard", to="dcp", mesh="fsdp=2")
    assert not plain.warnings
