"""What trainers store about a training is read, and nothing in it fails a conversion."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.checking.examine import inspect
from ckptcore.conversion import registration
from ckptcore.conversion.registration import Announcement, facts, stored_facts

FIXTURES = Path(__file__).parents[2] / "fixtures"
Make = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Make:
    """Write a folder of safetensors with other files beside it."""

    def make(**texts: str | bytes) -> Path:
        place = tmp_path / "llama" / "checkpoint-20"
        place.mkdir(parents=True, exist_ok=True)
        save_file({"w": torch.ones(2)}, str(place / "model.safetensors"))
        for name, text in texts.items():
            data = text if isinstance(text, bytes) else text.encode()
            (place / name.replace("__", ".")).write_bytes(data)
        return place

    return make


# As transformers writes it: trainer_callback.py, TrainerState.save_to_json.
STATE: dict[str, Any] = {
    "best_metric": 1.25,
    "best_model_checkpoint": "out/checkpoint-10",
    "epoch": 0.5,
    "global_step": 20,
    "max_steps": 100,
    "num_input_tokens_seen": 4096,
    "log_history": [
        {"loss": 3.0, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": 0.25, "step": 10},
        {"eval_loss": 2.5, "eval_runtime": 1.0, "step": 10},
        {"loss": 2.0, "grad_norm": float("nan"), "learning_rate": 5e-5, "epoch": 0.5, "step": 20},
        {"loss": 9.0, "step": 30},
        "no entry",
    ],
}


def test_the_state_of_the_trainer(folder: Make) -> None:
    found = stored_facts(inspect(str(folder(trainer_state__json=json.dumps(STATE)))))
    assert (found.framework, found.epoch, found.tokens) == ("transformers", 0.5, 4096)
    values = {name: (m.value, m.nonfinite, m.step) for name, m in found.metrics.items()}
    assert values["loss"] == (2.0, None, 20)  # not that of step 30, which a later save left
    assert values["eval_loss"] == (2.5, None, 10)
    assert values["grad_norm"] == (None, "nan", 20)
    assert values["best_metric"] == (1.25, None, None)
    assert found.extra["max_steps"] == 100


def test_facts_of_a_source_hold_them(folder: Make) -> None:
    place = folder(trainer_state__json=json.dumps(STATE))
    known = facts(inspect(str(place)), str(place), training=True)
    [(origin, stored)] = known.training
    assert (origin, stored.tokens) == ("stored", 4096)
    assert facts(inspect(str(place)), str(place)).training == ()


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'{"log_history": {"a": 1}}',
        b"[" * 100_000,
        b'{"global_step": "x"}',
    ],
)
def test_a_broken_state_is_left_out(folder: Make, text: bytes) -> None:
    found = stored_facts(inspect(str(folder(trainer_state__json=text))))
    assert not found.metrics


def test_configs_beside_the_weights(folder: Make) -> None:
    hub = json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 8})
    assert not stored_facts(inspect(str(folder(config__json=hub))))
    olmo = json.dumps(
        {"trainer": {"max_duration": 10}, "data_loader": {"seed": 1}, "wandb": {"api_key": "k"}}
    )
    config = stored_facts(inspect(str(folder(config__json=olmo)))).config
    assert config["trainer"] == {"max_duration": 10}
    assert config["wandb"] == {"api_key": "..."}
    yaml = (
        "run_name: tiny\nmodel: &m {d: 1}\nlist: ["
        + ", ".join(["*m"] * 50)
        + "]\nbad: !!python/name:os.system\n"
    )
    odd = stored_facts(inspect(str(folder(config__yaml=yaml, config__json=hub))))
    assert odd.config == {"run_name": "tiny", "model": {"d": 1}, "list": [{"d": 1}] * 50, "bad": None}
    safe = "run_name: tiny\nwhen: 2026-01-02\nmodel: {d_model: 8}\n"
    found = stored_facts(inspect(str(folder(config__yaml=safe, config__json=hub))))
    assert found.config == {"run_name": "tiny", "when": "2026-01-02", "model": {"d_model": 8}}


HOSTILE = {
    "a bool that is none": "a: !!bool x",
    "an integer without digits": "a: !!int ''",
    "a time that is none": "a: !!timestamp foo",
    "base 60": "a: " + ":".join(["1"] * 100_000),
    "a float of base 60": "a: " + ":".join(["1"] * 100_000) + ".5",
    "a class": "a: !!python/object/apply:os.system [x]",
    "bytes that are none": "a: !!binary '='",
    "an ordered map that is none": "a: !!omap x",
    "deep": "a: " + "[" * 20_000,
    "an alias of itself": "a: &a [*a]",
    "half a pair": 'a: "\\ud800"',
    "a list as a key": "? [a]\n: b",
    "a huge integer": "a: " + "9" * 50_000,
    "a hexadecimal integer": "a: 0x" + "f" * 50_000,
    "UTF-16": "a: 1".encode("utf-16"),
}


@pytest.mark.grid
@pytest.mark.parametrize("file", ["config.yaml", "run_config.yaml"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_line_of_yaml_costs_no_conversion_its_row(
    name: str, file: str, folder: Make, tmp_path: Path
) -> None:
    """Its output is published by then."""
    place, text = folder(), HOSTILE[name]
    (place / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    catalog = f"sqlite:///{tmp_path}/catalog.db"
    ckptcore.convert(str(place), str(tmp_path / "out.safetensors"), catalog=catalog)
    with open_catalog(catalog) as rows:
        assert rows.at(str(tmp_path / "out.safetensors")) is not None
        (conversion,) = rows.conversions()
        assert conversion.state == "succeeded"


@pytest.mark.parametrize("error", [IndexError("planted"), RecursionError(), MemoryError(), OverflowError()])
def test_an_error_of_a_reader_of_facts_costs_no_conversion(
    error: Exception, folder: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    warned: list[tuple[Any, ...]] = []
    monkeypatch.setattr(registration._log, "warning", lambda *given: warned.append(given))
    monkeypatch.setattr(registration, "_FILES", (("trainer_state.json", broken),))
    monkeypatch.setattr(registration, "_OBJECTS", (("a state", broken),))
    assert not stored_facts(inspect(str(folder(trainer_state__json="{}"))))
    assert len(warned) == 2
    monkeypatch.setattr(registration, "read_facts", broken)
    assert not stored_facts(inspect(str(folder())))


def test_an_alias_bomb_is_bounded(folder: Make) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for below, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [" + ", ".join([f"*{below}"] * 9) + "]")
    found = stored_facts(inspect(str(folder(config__yaml="\n".join(lines)))))
    assert set(found.config) <= {"a", "b", "c", "d", "e"}
    assert len(json.dumps(found.config)) < 70_000


def test_lightning() -> None:
    found = stored_facts(inspect(str(FIXTURES / "torch" / "lightning_trainer_mp_sharded_2r" / "step4.ckpt")))
    assert found.framework == "lightning"
    assert found.epoch is not None


def test_megatron() -> None:
    found = stored_facts(inspect(str(FIXTURES / "megatron" / "legacy_llama_tp2pp2_0.15.3" / "ckpt")))
    assert found.framework == "megatron"
    assert found.config["num_layers"] == 4
    assert found.config["params_dtype"] == "bfloat16"


def test_an_announced_run_wins_over_the_folder(folder: Make) -> None:
    place = str(folder())
    manifest = inspect(place)
    known = facts(manifest, place)
    assert (known.run, known.step) == ("llama", 20)
    known = facts(manifest, place, announcement=Announcement("llama-8b-second", 7))
    assert (known.run, known.step) == ("llama-8b-second", 20)
