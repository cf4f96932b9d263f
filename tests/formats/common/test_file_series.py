"""A part is never taken for the whole: every series and rank name, damaged in every way, by every verb."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from part_series import CONFIG, DAMAGES, HEADS, SERIES, WIDTH, N, Tensors, model, numbered, split, write
from safetensors.torch import load_file

import ckptcore
from ckptcore.cli.main import run
from ckptcore.conversion.pipeline import validate
from ckptcore.errors import Finding
from ckptcore.formats.common.rank_file_names import absent_parts, part_name

CELLS = [(s, d) for s in SERIES for d in DAMAGES]
# By default one damage for every other series, and each damage for one at least; all of them in a soak.
SHORT = [cell for n, cell in enumerate(CELLS) if n % (len(DAMAGES) + 1) == n // (len(DAMAGES) + 1) % 2][::2]
READ = (
    "five digits",
    "DeepSeek",
    "DeepSeek with an index",
    "Kimi",
    "from zero",
    "underscores",
    "diffusers",
    "variant",
    "bin",
    "bin with an index",
    "bin of a variant",
)


@pytest.fixture(autouse=True)
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path}/catalog.db")


def swept(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what a sweep makes of the steps below a root: name of the run -> standing."""
    where = ["--destination", str(root.parent / "swept" / "{run}" / "{name}"), "--verb", "consolidate"]
    assert run(["catalog", "root", "add", "runs", str(root), *where]) == 0
    capsys.readouterr()
    run(["sweep", "--min-age", "0s", "--output", "json"])
    items = json.loads(capsys.readouterr().out)["items"]
    return {Path(item["source"]).parent.name: item["standing"] for item in items}


def results(source: Path, tmp: Path) -> dict[str, int]:
    """Return the exit code of every verb."""
    return {
        "validate": run(["validate", str(source), "--level", "bytes"]),
        "consolidate": run(["consolidate", str(source), str(tmp / "whole.safetensors")]),
        "export": run(["export", str(source), str(tmp / "export"), "--config", "none"]),
        "reshard": run(["reshard", str(source), str(tmp / "mesh"), "--mesh", "dp=2", "--to", "dcp"]),
    }


def findings(folder: Path) -> tuple[Finding, ...]:
    return validate(ckptcore.open(str(folder)), "coverage").findings


def damaged(series: str, damage: str, runs: Path) -> Path:
    folder = runs / series / "step-10"
    folder.mkdir(parents=True)
    DAMAGES[damage](folder, SERIES[series](folder))
    return folder


@pytest.mark.alike(4)
@pytest.mark.parametrize(("series", "damage"), SHORT)
def test_a_damaged_series(series: str, damage: str, tmp_path: Path) -> None:
    assert 0 not in results(damaged(series, damage, tmp_path / "runs"), tmp_path).values()


@pytest.mark.soak
@pytest.mark.parametrize(("series", "damage"), [cell for cell in CELLS if cell not in SHORT])
def test_every_damaged_series(series: str, damage: str, tmp_path: Path) -> None:
    assert 0 not in results(damaged(series, damage, tmp_path / "runs"), tmp_path).values()


def require_nothing_swept(
    cells: list[tuple[str, str]], tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for series, damage in cells:
        damaged(series, damage, tmp / "runs")
    standings = swept(tmp / "runs", capsys)
    assert len(standings) > len(cells) // 2
    assert not {series for series, standing in standings.items() if standing == "made"}
    assert not [path for path in (tmp / "swept").rglob("*") if path.is_file()]


def test_a_sweep_of_damaged_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_nothing_swept(SHORT, tmp_path, capsys)


@pytest.mark.soak
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_sweep_of_damaged_series(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_nothing_swept([cell for cell in CELLS if cell[1] == damage], tmp_path, capsys)


@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "series", [pytest.param(s, marks=[pytest.mark.soak] if s in dict(SHORT) else []) for s in SERIES]
)
def test_a_part_named_alone(series: str, tmp_path: Path) -> None:
    folder = tmp_path / "step-10"
    folder.mkdir()
    parts = SERIES[series](folder)
    for path in (parts[0], parts[-1]):
        assert run(["validate", str(folder / path)]) != 0, path
    assert run(["consolidate", str(folder / parts[1]), str(tmp_path / "one.safetensors")]) != 0


def test_complete_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for series in READ:
        folder = tmp_path / "runs" / series / "step-10"
        folder.mkdir(parents=True)
        SERIES[series](folder)
    assert swept(tmp_path / "runs", capsys) == dict.fromkeys(READ, "made")
    expected = model()
    for series in READ:
        tensors = load_file(tmp_path / "swept" / series / "step-10" / "model.safetensors")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("lost", [None, 0, 1, 3])
def test_parts_that_a_config_proves(lost: int | None, tmp_path: Path) -> None:
    """torchtune wrote whole tensors in files that nothing counts, beside the model's config."""
    folder = tmp_path / "epoch"
    folder.mkdir()
    parts = SERIES["torchtune"](folder)
    torch.save({"epochs_run": 1}, folder / "recipe_state.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if lost is not None:
        (folder / parts[lost]).unlink()
    assert {run(["validate", str(folder)]) == 0} == {lost is None}
    out = tmp_path / "out.safetensors"
    assert (run(["consolidate", str(folder), str(out)]) == 0) == (lost is None) == out.exists()
    if lost is None:
        assert all(torch.equal(value, model()[name]) for name, value in load_file(out).items())


@pytest.mark.parametrize("series", ["Kimi", "DeepSeek with an index"])
def test_what_is_there_on_request(series: str, tmp_path: Path) -> None:
    """`--allow-incomplete` takes the parts that exist, and warns about the others."""
    folder = damaged(series, "last missing", tmp_path / "runs")
    out = tmp_path / "some.safetensors"
    assert run(["consolidate", str(folder), str(out), "--allow-incomplete"]) == 0
    assert 0 < len(load_file(out)) < len(model())
    found = ckptcore.open(str(folder), allow_incomplete=True).findings
    assert {(f.code, f.severity) for f in found} >= {("missing-part", "warning")}


SOLE_FILES = (
    "model-00001-of-00001.safetensors",
    "model-1-of-1.safetensors",
    "pytorch_model-00001-of-00001.bin",
    "model_world_size_1_rank_0.pt",
    "model-7b.safetensors",
    "epoch-3.pt",
    "step-1000.pt",
    "v2.pt",
    "pytorch_model_1.bin",
    "ep3.pt",
    "checkpoint-500.pth",
)


def test_one_file_that_is_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in SOLE_FILES:
        folder = tmp_path / "runs" / name.replace(".", "-") / "step-10"
        folder.mkdir(parents=True)
        write(folder / name, model())
        for source in (folder, folder / name):
            assert not [f for f in findings(source) if f.severity != "info"], source
    assert set(swept(tmp_path / "runs", capsys).values()) == {"made"}


@pytest.mark.parametrize(
    ("layers", "lost", "warns"),
    [
        (range(N), "", False),
        (range(1, N), "", True),
        ((0, 2, 3), "", True),
        (range(N), "3.mlp.down_proj", True),
        (range(N), "0.self_attn.q_proj", True),
        (range(N), "2.self_attn.q_proj", False),
        ((3,), "", True),
    ],
)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_file_that_lacks_layers(
    layers: Sequence[int], lost: str, warns: bool, suffix: str, tmp_path: Path
) -> None:
    """No name says that it is a part: the numbers of its layers do. A model of any shape is not refused."""
    kept = ("model.embed", "model.norm", "lm_head", *(f"model.layers.{n}." for n in layers))
    tensors = {n: t for n, t in model().items() if n.startswith(kept) and not (lost and lost in n)}
    write(tmp_path / f"weights_000.{suffix}", tensors)
    for source in (tmp_path, tmp_path / f"weights_000.{suffix}"):
        assert [f.code for f in findings(source) if f.severity != "info"] == ["unproven-whole"] * warns


def cut_by(order: Sequence[str], at: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a model before a name, in an order of names."""
    return {name: model()[name] for name in order[: order.index(at)]}


STORED = list(model())
# Cuts between two tensors: in the order of modules, and in that of names, where the head is first.
ENDS_LOST = {
    "norm and head": cut_by(STORED, "model.layers.2.self_attn.q_proj.weight"),
    "all behind the layers": cut_by(STORED, "model.norm.weight"),
    "norm, by name": cut_by(sorted(STORED), "model.layers.2.input_layernorm.weight"),
    "embedding": {n: t for n, t in model().items() if n != "model.embed_tokens.weight"},
    "layers": {n: t for n, t in model().items() if ".layers." not in n},
    "layers, but the end of the last": dict(list(model().items())[-4:]),
    "all but the head": {"lm_head.weight": torch.ones(2, 2)},
}


VERBS = {
    "validate": ("--level", "bytes"),
    "consolidate": ("{}/whole.safetensors", "--overwrite"),
    "export": ("{}/export", "--config", "none", "--overwrite"),
    "reshard": ("{}/mesh", "--mesh", "dp=2", "--to", "dcp", "--overwrite"),
}


@pytest.mark.parametrize("lost", ENDS_LOST)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_file_that_lacks_an_end(lost: str, suffix: str, tmp_path: Path) -> None:
    """Nothing states that it is a part, and nothing in it shows that it is not."""
    path = tmp_path / write(tmp_path / f"weights.{suffix}", ENDS_LOST[lost])
    for source in (tmp_path, path):
        assert [f.code for f in findings(source) if f.severity != "info"] == ["unproven-whole"]


@pytest.mark.parametrize(
    ("lost", "suffix"),
    [
        pytest.param(lost, suffix, marks=[] if (n, suffix) == (0, "safetensors") else pytest.mark.soak)
        for n, lost in enumerate(ENDS_LOST)
        for suffix in ("safetensors", "pt")
    ],
)
def test_every_verb_says_that_an_end_may_be_lost(
    lost: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "runs" / "cut" / "step-10"
    step.mkdir(parents=True)
    path = step / write(step / f"weights.{suffix}", ENDS_LOST[lost])
    for source in (step, path):
        for verb, arguments in VERBS.items():
            capsys.readouterr()
            assert run([verb, str(source), *(a.format(tmp_path) for a in arguments), "--output", "json"]) == 0
            answer = json.loads(capsys.readouterr().out)
            raised = {f["code"] for f in answer.get("findings", answer.get("warnings"))}
            assert "unproven-whole" in raised, (verb, source)
    assert swept(tmp_path / "runs", capsys) == {"cut": "made"}
    run(["sweep", "--min-age", "0s", "--output", "json"])
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert "unproven-whole" in {f["code"] for f in item["findings"]}


@pytest.mark.parametrize(
    ("layers", "config", "code"),
    [
        (N, CONFIG, None),
        (N - 1, CONFIG, "unproven-parts"),
        (N - 1, {"n_layer": N}, "unproven-parts"),
        (N - 1, {"text_config": {"num_layers": N}, "vision_config": {"depth": N - 1}}, None),
    ],
)
def test_the_layers_that_a_config_states(
    layers: int, config: dict[str, object], code: str | None, tmp_path: Path
) -> None:
    """The last layers are not there, and what is behind them is: a config decides."""
    path = tmp_path / write(tmp_path / "model.safetensors", model(layers))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, path):
        assert [f.code for f in findings(source) if f.severity != "info"] == [code] * (code is not None)
        assert (run(["validate", str(source)]) == 0) is (code is None)
        assert run(["validate", str(source), "--allow-incomplete"]) == 0


@pytest.mark.parametrize("name", ["model-00001-of-00001.bin", "torchtune_model_0.pt", "model.pt"])
@pytest.mark.parametrize("beside", ["config.json", "params.json", None])
def test_the_last_layer_of_torchtune(name: str, beside: str | None, tmp_path: Path) -> None:
    """Its own names, in one file of one: what is beside the file states the layers, or nothing does."""
    form = {"config.json": CONFIG, "params.json": {"n_layers": N}, None: {}}[beside]
    inside = ("attn.q_proj.weight", "attn.output_proj.weight", "mlp.w1.weight")
    for layers, proven in ((N, []), (N - 1, ["unproven-parts"])):
        names = ["tok_embeddings.weight", "norm.scale", "output.weight"]
        for n in range(layers):
            names += [f"layers.{n}.{k}" for k in (*inside, "sa_norm.scale", "mlp_norm.scale")]
        folder = tmp_path / str(layers)
        folder.mkdir()
        path = folder / write(folder / name, {n: torch.ones(2) for n in names})
        if beside is not None:
            (folder / beside).write_text(json.dumps(form))
        codes = proven if beside is not None else ["unproven-whole"]
        for source in (folder, path):
            assert [f.code for f in findings(source) if f.severity != "info"] == codes


def test_an_end_that_a_config_states(tmp_path: Path) -> None:
    path = tmp_path / write(
        tmp_path / "model.safetensors", {n: t for n, t in model().items() if n != "lm_head.weight"}
    )
    for config, codes in (
        (None, []),
        ({**CONFIG, "tie_word_embeddings": True}, []),
        (CONFIG, ["unproven-whole"]),
    ):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        assert [f.code for f in findings(path) if f.severity != "info"] == codes


# Modules in their order in the file; "*" has two layers.
FAMILIES = {
    "embed_out neox.embed_in neox.final_layer_norm neox.layers.*": (".safetensors", {}, True),  # by name
    "embed_out neox.embed_in neox.final_layer_norm neox.h.*": (".safetensors", {"n_layers": 2}, False),
    "neox.embed_in neox.layers.* neox.final_layer_norm embed_out": (".pt", {}, False),
    "bert.embeddings.LayerNorm bert.encoder.layer.*": (".pt", {}, True),
    "bert.embeddings.LayerNorm bert.layer.*": (".pt", {"num_hidden_layers": 2}, False),
    "bert.embeddings.LayerNorm bert.encoder.layer.* bert.pooler.dense": (".pt", {}, False),
    "shared encoder.block.* encoder.final_layer_norm decoder.block.*": (".safetensors", {}, True),
    "shared encoder.block.* encoder.norm decoder.block.* decoder.norm": (".safetensors", {}, False),
    "wte wpe h.*": (".safetensors", {}, True),
    "wte wpe h.* ln_f": (".safetensors", {}, False),
    "visual.patch visual.blocks.* visual.ln_post projector.norm llm.layers.*": (".pt", {}, True),
}


@pytest.mark.parametrize("modules", FAMILIES)
def test_the_ends_of_other_families(modules: str, tmp_path: Path) -> None:
    suffix, config, warns = FAMILIES[modules]
    tensors = {}
    for module in modules.split():
        parts = [f"{n}.{k}" for n in range(2) for k in ("qkv", "dense", "fc_in", "fc_out")]
        for part in parts if "*" in module else [""]:
            tensors[module.replace("*", part) + ".weight"] = torch.ones(2)
    write(tmp_path / f"weights{suffix}", tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [f.code for f in findings(tmp_path) if f.severity != "info"] == ["unproven-whole"] * warns


def test_layers_that_are_no_blocks(tmp_path: Path) -> None:
    """Modules without weights have numbers, too, and an adapter has the layers that it adapts."""
    write(
        tmp_path / "a.pt", {f"layers.{n}.{k}": torch.ones(2) for n in (0, 2, 4) for k in ("weight", "bias")}
    )
    pairs = [f"layers.{n}.{k}_proj.lora_{half}.weight" for n in (8, 9) for k in "qkvo" for half in "AB"]
    write(tmp_path / "b.pt", {name: torch.ones(2, 2) for name in pairs})
    assert not [f for f in findings(tmp_path / "a.pt") if f.severity != "info"]
    # What an adapter alone cannot show is the rows of its parts.
    (warning,) = [f for f in findings(tmp_path / "b.pt") if f.severity != "info"]
    assert warning.message.startswith("nothing states the rows of layers.8.q_proj")


PARTS_ALONE = (
    "model-00001.of.00003.safetensors",
    "consolidated.00.safetensors",
    "chunk0.pt",
    "chunk_00.safetensors",
    "slice-0.safetensors",
    "node0.pt",
    "worker_0.bin",
)


@pytest.mark.parametrize("name", PARTS_ALONE)
def test_a_part_is_known_by_its_name(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, model())
    for source in (tmp_path, tmp_path / name):
        assert [f.code for f in findings(source) if f.severity == "error"], source


@pytest.mark.parametrize("cut", ["half", "rank"])
def test_half_of_an_adapter_is_a_part(cut: str, tmp_path: Path) -> None:
    first, second = "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"
    pair = {first: torch.ones(4, 8), second: torch.ones(8, 4)}
    write(tmp_path / "adapter_model.safetensors", pair)
    assert not [f for f in findings(tmp_path) if f.severity == "error"]
    pair[second] = torch.ones(8, 2)
    write(tmp_path / "adapter_model.safetensors", {first: pair[first]} if cut == "half" else pair)
    assert [f.code for f in findings(tmp_path) if f.severity == "error"] == ["unproven-parts"]


Q = "base_model.model.model.layers.0.self_attn.q_proj"
RANKED: dict[str, object] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("rows", "form", "config", "code"),
    [
        (WIDTH, RANKED, CONFIG, None),
        (WIDTH, RANKED, None, "unproven-whole"),
        (WIDTH // 2, RANKED, CONFIG, "unproven-parts"),
        (WIDTH // 2, RANKED, None, "unproven-whole"),
        (WIDTH, {**RANKED, "r": 8}, CONFIG, "unproven-parts"),
        (WIDTH, {**RANKED, "r": 8, "rank_pattern": {"q_proj": 4}}, CONFIG, None),
    ],
)
def test_rows_of_an_adapter(
    rows: int, form: dict[str, object], config: dict[str, object] | None, code: str | None, tmp_path: Path
) -> None:
    """One rank's rows of lora_B are a pair, too: adapter_config.json or the base's config decides."""
    pair = {f"{Q}.lora_A.weight": torch.ones(4, WIDTH), f"{Q}.lora_B.weight": torch.ones(rows, 4)}
    write(tmp_path / "adapter_model.safetensors", pair)
    for path, content in (("adapter_config.json", form), ("config.json", config)):
        if content is not None:
            (tmp_path / path).write_text(json.dumps(content))
    assert [f.code for f in findings(tmp_path) if f.severity != "info"] == [code] * (code is not None)
    assert (run(["validate", str(tmp_path)]) == 0) is (code != "unproven-parts")


def test_an_adapter_beside_its_base(tmp_path: Path) -> None:
    """A live model has names of its adapters."""
    pair = {
        f"{Q}.lora_A.default.weight": torch.ones(4, WIDTH),
        f"{Q}.base_layer.weight": torch.ones(WIDTH, WIDTH),
    }
    for rows, codes in ((WIDTH, []), (WIDTH // 2, ["unproven-parts"])):
        write(tmp_path / "model.safetensors", {**pair, f"{Q}.lora_B.default.weight": torch.ones(rows, 4)})
        assert [f.code for f in findings(tmp_path) if f.severity != "info"] == codes


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_an_index_of_fewer_files_than_their_names_count(suffix: str, tmp_path: Path) -> None:
    name = f"model-00001-of-00003.{suffix}"
    write(tmp_path / name, model())
    rows = {"weight_map": dict.fromkeys(model(), name)}
    (tmp_path / f"model.{suffix}.index.json").write_text(json.dumps(rows))
    assert [f.code for f in findings(tmp_path) if f.severity != "info"] == ["unproven-whole"]


# Files of four that an index does not list -> (config beside them, what the unlisted ones become, finding).
# A copy repeats the names of a listed file, as a save in other files does; a head is of another model.
UNLISTED: tuple[tuple[Sequence[int], dict[str, Any] | None, str, list[str]], ...] = (
    ((), None, "beside", []),
    ((3,), None, "beside", ["unproven-parts"]),
    ((0,), None, "beside", ["unproven-parts"]),
    ((1,), None, "beside", ["unproven-parts"]),
    ((2, 3), None, "beside", ["unproven-parts"]),
    ((3,), CONFIG, "beside", ["unproven-parts"]),
    ((3,), None, "removed", ["unproven-whole"]),
    ((1,), None, "removed", ["unproven-whole"]),
    ((2, 3), CONFIG, "removed", ["unproven-parts"]),
    ((3,), CONFIG, "removed", ["unproven-whole"]),
    ((3,), None, "copies of others", ["unproven-whole"]),
    ((), None, "copies of others", []),
    ((), None, "a head", []),
    ((), CONFIG, "more layers", []),
    ((), None, "more layers", ["unproven-parts"]),
    ((), None, "unreadable", []),
    ((), None, "other names", []),
)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize(("lost", "config", "become", "codes"), UNLISTED)
@pytest.mark.grid
def test_an_index_of_a_part(
    lost: Sequence[int],
    config: dict[str, Any] | None,
    become: str,
    codes: list[str],
    suffix: str,
    tmp_path: Path,
) -> None:
    """No name counts the files: those that no index lists, a config and the layers say that it is a part."""
    rows = {}
    parts = split(model(), N)
    for n, part in enumerate(parts):
        name = write(tmp_path / f"weights_{'abcd'[n]}.{suffix}", part)
        rows |= dict.fromkeys(part, name) if n not in lost else {}
        if n in lost and become != "beside":
            (tmp_path / name).unlink()
    extra = tmp_path / f"extra.{suffix}"
    if become == "copies of others":
        write(extra, parts[1])
    elif become == "a head":
        write(extra, {"v_head.weight": torch.ones(2)})
    elif become == "more layers":
        write(extra, {"model.layers.4.self_attn.q_proj.weight": torch.ones(2)})
    elif become == "other names":
        write(extra, meta_names(model()) | {"norm.weight": torch.ones(2)})
    elif become == "unreadable":
        extra.write_bytes(b"\x08")
    name = {"safetensors": "model.safetensors.index.json", "bin": "pytorch_model.bin.index.json"}[suffix]
    (tmp_path / name).write_text(json.dumps({"weight_map": rows}))
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    raised = [f for f in findings(tmp_path) if f.code != "stray-file"]
    assert [f.code for f in raised] == codes
    assert (run(["validate", str(tmp_path)]) == 0) is ("unproven-parts" not in codes)
    assert run(["validate", str(tmp_path), "--allow-incomplete"]) == 0


def test_a_file_that_others_continue(tmp_path: Path) -> None:
    """`model.safetensors` is read, and the rest of the model is in files of other names beside it."""
    (tmp_path / "config.json").write_text("{}")
    first, last = split(model(), 2)
    write(tmp_path / "model.safetensors", first)
    write(tmp_path / "rest.safetensors", last)
    assert "unproven-parts" in {f.code for f in findings(tmp_path)}
    write(tmp_path / "model.safetensors", model())
    assert [f.code for f in findings(tmp_path)] == ["stray-file"]


def test_torch_files_beside_safetensors(tmp_path: Path) -> None:
    """A projector or a value head is named; what a trainer keeps, and the model's torch form, are not."""
    write(tmp_path / "model.safetensors", model())
    for path in ("optimizer.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin"):
        write(tmp_path / path, model())
    assert {f.code for f in findings(tmp_path) if f.severity != "info"} <= {"unread-state"}
    write(tmp_path / "mm_projector.bin", {"w": torch.ones(2)})
    stray = [f.file for f in findings(tmp_path) if f.code == "stray-file"]
    assert stray == ["mm_projector.bin"]


def rows(tensors: Tensors) -> Tensors:
    """Return a rank's rows of each tensor, as FSDP2 keeps them."""
    return {name: t.chunk(2)[1].clone() for name, t in tensors.items()}


def tensor_parallel(tensors: Tensors) -> Tensors:
    """Return a tensor-parallel rank's part of each tensor, as Megatron and vLLM cut them."""
    dims = {"o_proj": 1, "down_proj": 1, "norm": None}
    return {
        name: t if dim is None else t.chunk(2, dim)[1].clone()
        for name, t in tensors.items()
        for dim in [next((d for word, d in dims.items() if word in name), 0)]
    }


def packed(tensors: Tensors) -> Tensors:
    """Return weights of which a byte holds two: a column is half of one."""
    return {n: t[:, ::2].to(torch.uint8) if "_proj" in n else t for n, t in tensors.items()}


def meta_names(tensors: Tensors) -> Tensors:
    renames = {"model.": "", "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo"}
    for old, new in (renames | {"mlp.down_proj": "feed_forward.w2"}).items():
        tensors = {name.replace(old, new): t for name, t in tensors.items()}
    return tensors


def gpt2_names(tensors: Tensors) -> Tensors:
    renames = {"model.embed_tokens": "wte", "model.layers": "h", "self_attn.o_proj": "attn.c_proj"}
    for old, new in (renames | {"model.norm": "ln_f"}).items():
        tensors = {name.replace(old, new): t for name, t in tensors.items()}
    return tensors


def narrow_heads(tensors: Tensors) -> Tensors:
    """Return a complete model whose heads have half as many elements as the model is wide."""
    dims = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    return {
        name: t if dim is None else t.chunk(2, dim)[0].clone()
        for name, t in tensors.items()
        for dim in [next((d for part, d in dims.items() if part in name), None)]
    }


@pytest.mark.parametrize("path", ["model.safetensors", "model.pt"])
@pytest.mark.parametrize(
    ("cut", "config", "code"),
    [
        (rows, {}, "missing-file"),
        (lambda t: rows(meta_names(t)), {}, "missing-file"),
        (rows, CONFIG, "missing-file"),
        (tensor_parallel, CONFIG, "missing-file"),
        (packed, CONFIG, None),
        (dict, CONFIG, None),
        (lambda t: t | {"model.embed_tokens.weight": torch.ones(16, 16)}, CONFIG, None),
        (lambda t: {"flat_param": torch.ones(9)}, {}, "unproven-whole"),
        (tensor_parallel, {}, "unproven-whole"),
        (lambda t: meta_names(tensor_parallel(t)), {}, "unproven-whole"),
        (lambda t: gpt2_names(tensor_parallel(t)), {}, "unproven-whole"),
        (lambda t: t | {"lm_head.weight": t["lm_head.weight"].chunk(2)[0].clone()}, {}, "unproven-whole"),
        (narrow_heads, {}, "unproven-whole"),
        (packed, {}, None),
        (narrow_heads, CONFIG | {"head_dim": WIDTH // HEADS // 2}, None),
        (dict, {}, None),
    ],
    ids=[
        *("rows", "Meta's rows", "rows, a config", "columns", "packed", "complete", "wide embedding", "flat"),
        *("columns alone", "Meta's columns", "columns of GPT-2", "rows of the head", "narrow heads"),
        *("packed alone", "narrow heads, a config", "nothing cut"),
    ],
)
@pytest.mark.grid
def test_a_ranks_slices_under_any_name(
    cut: Callable[[Tensors], Tensors], config: dict[str, Any], code: str | None, path: str, tmp_path: Path
) -> None:
    """What is left of a renamed file is its shapes: each adds to the width of the model, or is cut."""
    write(tmp_path / path, cut(model()))
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    codes = {f.code for f in findings(tmp_path) if f.severity != "info"}
    assert codes == ({code} if code else set())
    if code == "missing-file":
        manifest = ckptcore.open(str(tmp_path), allow_incomplete=True)
        assert {f.code for f in manifest.findings} == {"missing-part"}


RECORDS: dict[str, dict[str, Any]] = {
    "Megatron's arguments": {"args": Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)},
    "DeepSpeed's size": {"mp_world_size": 2},
}


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_of_ranks_in_a_file_of_any_name(record: str, tmp_path: Path) -> None:
    write(tmp_path / "weights.pt", {"model": model(), **RECORDS[record]})
    assert "missing-file" in {f.code for f in findings(tmp_path)}
    one = {key: 1 if type(value) is int else value for key, value in RECORDS[record].items()}
    if one != RECORDS[record]:
        write(tmp_path / "weights.pt", {"model": model(), **one})
        assert not [f for f in findings(tmp_path) if f.severity == "error"]


def test_params_beside_a_renamed_rank(tmp_path: Path) -> None:
    """The columns of Meta's weights, and the heads that params.json states, say how many ranks there were."""
    form = {"dim": WIDTH, "n_layers": N, "n_heads": HEADS}
    (tmp_path / "params.json").write_text(json.dumps(form))
    for tensors, code in ((tensor_parallel(model()), "missing-file"), (model(), None)):
        renamed = {n.replace("self_attn.q_proj", "attention.wq"): t for n, t in meta_names(tensors).items()}
        write(tmp_path / "weights.pth", renamed)
        assert {f.code for f in findings(tmp_path) if f.severity != "info"} == ({code} if code else set())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("lost", [0, N - 1])
def test_files_that_are_counted_anew(lost: int, suffix: str, tmp_path: Path) -> None:
    """The first or the last is lost, and the names of the others count the others."""
    parts = [part for n, part in enumerate(split(model(), N)) if n != lost]
    for n, part in enumerate(parts, 1):
        write(tmp_path / f"model-0000{n}-of-0000{N - 1}.{suffix}", part)
    for config in (None, CONFIG):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        assert {f.code for f in findings(tmp_path) if f.severity != "info"} == {"unproven-whole"}


def test_a_rank_of_torch_checkpointing_without_its_metadata(tmp_path: Path) -> None:
    """Its tensors have no boxes; the state of torchtitan beside it says what they are."""
    write(tmp_path / "model_0.safetensors", {"w": torch.ones(2)})
    (tmp_path / "train_state_0.json").write_text(json.dumps({"step": 7}))
    assert run(["consolidate", str(tmp_path), str(tmp_path / "out")]) != 0


def test_one_rank_that_was_all_of_them(tmp_path: Path) -> None:
    """A config, params.json or the content states that there was one rank only."""
    for name, beside in (("model-rank-0-part-0.safetensors", {"config.json": CONFIG}),):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        for path, form in beside.items():
            (folder / path).write_text(json.dumps(form))
        write(folder / name, model())
        assert run(["validate", str(folder)]) == 0, name
    folder = tmp_path / "meta"
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({"dim": 8, "n_layers": 1, "n_heads": 2}))
    tensors = {"layers.0.attention.wq.weight": torch.ones(8, 8), "norm.weight": torch.ones(8)}
    write(folder / "consolidated.00.pth", tensors)
    assert run(["validate", str(folder)]) == 0
    write(folder / "mp_rank_00_model_states.pt", {"module": model(), "mp_world_size": 1, "dp_world_size": 8})
    assert run(["validate", str(folder / "mp_rank_00_model_states.pt")]) == 0


@pytest.mark.parametrize(
    ("ranks", "config", "layers", "code"),
    [
        (None, None, N, "unproven-whole"),
        (1, None, N, None),
        (8, None, N, "unproven-whole"),
        (8, CONFIG, N, None),
        (8, CONFIG, N - 1, "missing-file"),
    ],
)
def test_rank_0_of_composer(
    ranks: int | None, config: dict[str, object] | None, layers: int, code: str | None, tmp_path: Path
) -> None:
    """It is the complete save unless its own record states another: unsharded, rank 0 alone saves."""
    state: dict[str, object] = {"model": {f"model.{n}": t for n, t in model(layers).items()}}
    if ranks is not None:
        state["metadata"] = {"world_size": ranks, "device": "gpu"}
    if config is not None:
        state["integrations"] = {"huggingface": {"model": {"config": {"content": config}}}}
    write(tmp_path / "ep0-ba10-rank0.pt", {"state": state, "rng": []})
    for source in (tmp_path, tmp_path / "ep0-ba10-rank0.pt"):
        found = [f for f in findings(source) if f.severity != "info"]
        assert {f.code for f in found} == ({code} if code else set()), source
        assert (run(["validate", str(source)]) == 0) is (code != "missing-file")


@pytest.mark.usefixtures("asked_here")
def test_nothing_states_the_number(tmp_path: Path) -> None:
    """A missing last part could not be seen: the error says so, and `export` with a config decides."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    write(folder / "rank0.safetensors", model())
    assert {f.code for f in findings(folder) if f.severity == "error"} == {"unproven-parts"}
    assert run(["consolidate", str(folder), str(tmp_path / "o.safetensors")]) == 26
    assert run(["validate", str(folder), "--allow-incomplete"]) == 0
    assert run(["export", str(folder), str(tmp_path / "e"), "--config", "none"]) == 26
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert run(["export", str(folder), str(tmp_path / "e"), "--config", str(tmp_path)]) == 0
    for part in range(2, 5):  # parts of whole tensors, of which the last is lost
        folder = tmp_path / str(part)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        tensors = {n: t for n, t in model().items() if "norm.weight" not in n}
        write(folder / "hf_model_0001_0.pt", tensors)
        assert {f.code for f in findings(folder) if f.severity == "error"} == {"unproven-parts"}


def test_an_index_that_lists_what_no_file_holds(tmp_path: Path) -> None:
    numbered("part_{n}_of_{count}.safetensors", "weights.safetensors.index.json")(tmp_path)
    path = tmp_path / f"part_2_of_{N}.safetensors"
    tensors = load_file(path)
    write(path, dict(list(tensors.items())[1:]))
    found = findings(tmp_path)
    assert {f.code for f in found if f.severity == "error"} == {"hole"}


def test_two_indexes(tmp_path: Path) -> None:
    """Variants are two sets of values under the same names: never merged; the standard name goes first."""
    numbered("a-{n}-of-{count}.safetensors", "a.safetensors.index.json")(tmp_path)
    numbered("a.fp16-{n}-of-{count}.safetensors", "a.safetensors.index.fp16.json")(tmp_path)
    assert run(["inspect", str(tmp_path)]) == 12
    numbered("model-{n}-of-{count}.safetensors", "model.safetensors.index.json")(tmp_path)
    assert run(["validate", str(tmp_path)]) == 0


def test_a_name_that_counts_very_many(tmp_path: Path) -> None:
    """No list of all names is made."""
    folder = tmp_path / "step-10"
    folder.mkdir()
    write(folder / f"model-1-of-{10**12}.safetensors", {"w": torch.ones(2)})
    found = findings(folder)
    assert sum(f.code == "missing-file" for f in found) == 100
    part = part_name(f"model-1-of-{10**12}.safetensors")
    assert part is not None
    assert absent_parts([part], 1) == ([f"model-2-of-{10**12}.safetensors"], 10**12 - 1)
