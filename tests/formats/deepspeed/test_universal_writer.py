"""Universal folders that are written: read back bit for bit, and equal to those of DeepSpeed's converter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
import torch.distributed.checkpoint as dcp

import ckptcore
from ckptcore.conversion.pipeline import convert
from ckptcore.errors import CkptError, UnsupportedDtype, UnsupportedFormat
from ckptcore.formats.deepspeed.universal_writer import collect_groups
from ckptcore.planning.request import Request

ARCHIVE = samples.FIXTURES / "deepspeed.tar.zst"
FORMS = ("deepspeed_universal", "deepspeed_universal_zero3")
# Where the converter of DeepSpeed left a folder beside the sample, and got it right.
OWN = ["z1_bf16_gadfp32_ws2", "z2_bf16_ws4", "z3_bf16_ws4"]


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest) -> Path:
    return samples.unpack(request.config.rootpath / ".pytest_cache" / "samples", ARCHIVE)


def write(source: Path, target: Path, to: str = FORMS[0], **options: Any) -> Path:
    convert(Request(str(source), str(target), to=to, **options), catalog_url=False)
    return target


def values(folder: Path) -> dict[str, Any]:
    manifest = ckptcore.open(str(folder))
    assert ckptcore.check(manifest, "bytes").ok
    return {t.fqn: samples.value(ckptcore.read(manifest, t.fqn)) for t in manifest.tensors}


def state(groups: list[dict[str, Any]] | None = None, **without: Any) -> dict[str, Any]:
    """A state dict as torch's `get_state_dict` has it."""
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "scale": (1,)}
    torch.manual_seed(5)
    model = {n: torch.randn(s) for n, s in shapes.items()}
    moments = {
        n: {"step": torch.tensor(7.0), "exp_avg": torch.randn(s), "exp_avg_sq": torch.rand(s)}
        for n, s in shapes.items()
    }
    groups = groups or [{"params": [*shapes], "lr": 0.1, "betas": (0.9, 0.99)}]
    full = {"model": {**model, "steps": torch.tensor(3)}, "optim": {"state": moments, "param_groups": groups}}
    return {**full, **without}


def saved(folder: Path, content: dict[str, Any]) -> Path:
    dcp.save(content, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("name", [*OWN, "z2_fp32_rr_ws4"])  # the last: DeepSpeed's own is wrong
def test_a_deepspeed_save_reads_back_bit_for_bit(corpus: Path, tmp_path: Path, name: str) -> None:
    source = corpus / name / "ckpt"
    out = write(source, tmp_path / "out")
    assert values(out) == values(source)
    first, second = (ckptcore.open(str(p)) for p in (source, out))
    objects = {b.key: b.tree for b in second.blobs}
    for blob in first.blobs:
        if blob.key != "optimizer.zero_stage":
            assert objects[blob.key] == blob.tree, blob.key


@pytest.mark.alike(1)
@pytest.mark.parametrize("name", OWN)
def test_every_file_equals_that_of_deepspeeds_converter(corpus: Path, tmp_path: Path, name: str) -> None:
    """Of stage 3, its files are flat tensors: the elements are compared."""
    ours = write(corpus / name / "ckpt", tmp_path / "out")
    theirs = corpus / f"{name}_universal" / "ckpt"
    compared = 0
    for path in sorted(theirs.glob("zero/*/*.pt")):
        if not (path.parent / "exp_avg.pt").exists():  # a copy of a frozen parameter, a buffer or a tied name
            continue
        found, wanted = (torch.load(p, weights_only=True) for p in (ours / path.relative_to(theirs), path))
        if isinstance(wanted, dict):
            assert found.keys() == wanted.keys()
            assert found["cat_dim"] == wanted["cat_dim"]
            assert found["param"].shape == wanted["param"].shape
            wanted = wanted["param"]
        found = found["param"] if isinstance(found, dict) else found
        assert torch.equal(found.flatten(), wanted.flatten()), path
        compared += 1
    assert compared > 50


@pytest.mark.parametrize("form", FORMS)
def test_a_dcp_checkpoint_is_written_and_read_back(tmp_path: Path, form: str) -> None:
    content = state(rng=torch.arange(9), lr_scheduler={"last_epoch": 7, "base_lrs": [0.1]}, global_step=7)
    out = write(saved(tmp_path / "dcp", content), tmp_path / "out", form)
    manifest = ckptcore.open(str(out))
    for name, states in content["optim"]["state"].items():
        assert torch.equal(ckptcore.read(manifest, f"module.{name}"), content["model"][name])
        for key, value in states.items():
            assert torch.equal(ckptcore.read(manifest, f"optimizer.state.{name}.{key}"), value)
    assert torch.equal(ckptcore.read(manifest, "rng"), content["rng"])
    file = "zero_pp_rank_0_mp_rank_00" if form == FORMS[1] else "mp_rank_00"
    loaded = torch.load(out / f"{file}_model_states.pt", weights_only=False)
    assert loaded["global_steps"] == 7
    assert loaded["lr_scheduler"] == content["lr_scheduler"]
    assert {n: tuple(s) for n, s in loaded["param_shapes"][0].items()} == {
        "a.weight": (5, 3),
        "a.bias": (5,),
        "scale": (1,),
    }
    assert loaded["module"]["steps"] == 3
    states = torch.load(out / "zero" / "optimizer_state.pt", weights_only=False)
    inner = states["optimizer_state_dict"] if form == FORMS[1] else states
    assert inner["param_groups"][0]["lr"] == 0.1
    assert inner["param_groups"][0]["betas"] == (0.9, 0.99)
    part = torch.load(out / "zero" / "a.weight" / "exp_avg.pt", weights_only=False)
    assert part.shape == (15,) if form == FORMS[1] else part["param"].shape == (5, 3)
    assert (out / "latest_universal").read_text() == "."


def test_a_step_that_is_a_number_becomes_a_tensor(tmp_path: Path) -> None:
    content = state([{"params": ["a.weight", "a.bias", "scale"], "lr": 0.1, "step": 4}])
    for states in content["optim"]["state"].values():
        del states["step"]
    out = write(saved(tmp_path / "dcp", content), tmp_path / "out")
    step = torch.load(out / "zero" / "scale" / "step.pt", weights_only=False)
    assert (step.dtype, step.shape, step.item()) == (torch.float32, (), 4.0)
    assert write(out, tmp_path / "again").is_dir()


def _several(content: dict[str, Any]) -> None:
    content["optim"]["param_groups"] = [
        {"params": ["a.weight", "scale"], "lr": 0.1},
        {"params": ["a.bias"], "lr": 0.2},
    ]


def _no_second_moment(content: dict[str, Any]) -> None:
    del content["optim"]["state"]["a.bias"]["exp_avg_sq"]


def _no_state(content: dict[str, Any]) -> None:
    del content["optim"]["state"]["a.bias"]


def _no_optimizer(content: dict[str, Any]) -> None:
    del content["optim"]


def _no_step(content: dict[str, Any]) -> None:
    del content["optim"]["state"]["scale"]["step"]


def _no_weight(content: dict[str, Any]) -> None:
    del content["model"]["scale"]


def _low_precision(content: dict[str, Any]) -> None:
    content["model"]["scale"] = content["model"]["scale"].bfloat16()


def _uneven(content: dict[str, Any]) -> None:
    content["optim"]["state"]["scale"]["max_exp_avg_sq"] = torch.rand(1)


def _all_more(content: dict[str, Any]) -> None:
    for states in content["optim"]["state"].values():
        states["max_exp_avg_sq"] = states["exp_avg_sq"].clone()


def _two_optimizers(content: dict[str, Any]) -> None:
    content["optim2"] = {"param_groups": [{"params": ["x"], "lr": 1.0}]}


def _megatron(content: dict[str, Any]) -> None:
    states = content["optim"]["state"]
    keys = {k: {n: s[k] for n, s in states.items()} for k in ("exp_avg", "exp_avg_sq")}
    content["optim"] = {"state": {**keys, "param": content["model"] | {}}}


def _folder_name(content: dict[str, Any]) -> None:
    for part in (content["model"], content["optim"]["state"]):
        part["../scale"] = part.pop("scale")
    content["optim"]["param_groups"][0]["params"][-1] = "../scale"


def _long_run(content: dict[str, Any]) -> None:
    _counted(content, dict.fromkeys(content["optim"]["state"], 2**24 + 1))


def _uneven_counts(content: dict[str, Any]) -> None:
    _counted(content, {n: 4 + (n == "scale") for n in content["optim"]["state"]})


def _counted(content: dict[str, Any], steps: dict[str, int]) -> None:
    for name, step in steps.items():
        content["optim"]["state"][name]["step"] = step


@pytest.mark.parametrize(
    ("form", "change", "named"),
    [
        (FORMS[0], _long_run, "step count of 16777217"),
        (FORMS[1], _uneven_counts, "step counts from 4 to 5"),
        (FORMS[1], _several, "first (they differ in lr)"),
        (FORMS[1], _all_more, "max_exp_avg_sq"),
        (FORMS[0], _no_second_moment, "a.bias, and not exp_avg_sq"),
        (FORMS[0], _no_state, "parameter group 0 has a.bias"),
        (FORMS[0], _no_optimizer, "no optimizer state"),
        (FORMS[0], _no_step, "step count of scale"),
        (FORMS[0], _no_weight, "state of scale"),
        (FORMS[0], _low_precision, "bfloat16"),
        (FORMS[0], _uneven, "scale has the states"),
        (FORMS[0], _two_optimizers, "2 optimizers"),
        (FORMS[0], _megatron, "Megatron-Core"),
        (FORMS[0], _folder_name, "../scale"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_deepspeed_would_not_load_is_refused(tmp_path: Path, form: str, change: Any, named: str) -> None:
    content = state()
    change(content)
    source = saved(tmp_path / "dcp", content)
    with pytest.raises(CkptError) as caught:
        write(source, tmp_path / "out", form)
    assert named in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


def test_several_groups_are_written_for_stages_up_to_2(tmp_path: Path) -> None:
    content = state()
    _several(content)
    out = write(saved(tmp_path / "dcp", content), tmp_path / "out")
    groups = torch.load(out / "zero" / "optimizer_state.pt", weights_only=False)["param_groups"]
    assert [(g["lr"], g["params"]) for g in groups] == [(0.1, ["a.weight", "scale"]), (0.2, ["a.bias"])]


def test_low_precision_weights_are_cast_on_request(tmp_path: Path) -> None:
    content = state()
    _low_precision(content)
    source = saved(tmp_path / "dcp", content)
    with pytest.raises(UnsupportedDtype, match="bfloat16"):
        write(source, tmp_path / "no")
    out = write(source, tmp_path / "out", dtype="fp32")
    found = ckptcore.read(ckptcore.open(str(out)), "module.scale")
    assert torch.equal(found, content["model"]["scale"].float())


@pytest.mark.parametrize("name", ["autotp2_z1_fp32", "pipe2_z1_ws2", "moe_ep2_z2_ws2"])
def test_saves_of_model_parallel_ranks_are_refused(corpus: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedFormat, match="universal folder") as caught:
        write(corpus / name / "ckpt", tmp_path / "out")
    assert caught.value.hint


def test_stored_weights_and_masters_by_either_choice(corpus: Path, tmp_path: Path) -> None:
    source = corpus / "z2_bf16_ws4" / "ckpt"
    one, other = (write(source, tmp_path / w, weights=w) for w in ("master", "module"))
    # The tied name has no master of its own, and is the model's copy: as stored, or the owner's master.
    first, second = ({k: v for k, v in values(p).items() if "lm_head" not in k} for p in (one, other))
    assert first == second


def test_an_export_has_no_optimizer(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(CkptError, match="only the model"):
        write(corpus / "z1_fp32_ws2" / "ckpt", tmp_path / "out", verb="export", config="none")


def test_groups_of_every_form_are_the_same() -> None:
    names = {"a": "a", "b": "b"}
    options = {"lr": 0.1, "betas": (0.9, 0.99)}
    forms: list[dict[str, Any]] = [
        {"optimizer.param_groups": [{**options, "params": ["a", "b"]}]},
        {"optim.param_groups.0": {**options, "params": ["a", "b"]}},
        {"optim.param_groups.0.lr": 0.1, "optim.param_groups.0.betas": (0.9, 0.99)}
        | {"optim.param_groups.0.params": ["a", "b"]},
        {f"optim.param_groups.{n}.{k}": v for n in names for k, v in options.items()},
    ]
    found = [collect_groups(form, names.get) for form in forms]
    assert all(len(groups) == 1 for groups in found)
    assert all(dict(groups[0].options) == options for groups in found)
    assert all(groups[0].parameters == ("a", "b") for groups in found)


def test_a_missing_file_of_a_written_folder_is_found(tmp_path: Path) -> None:
    out = write(saved(tmp_path / "dcp", state()), tmp_path / "out", FORMS[1])
    shutil.rmtree(out / "zero" / "a.bias")
    report = ckptcore.check(ckptcore.open(str(out)), "coverage")
    assert {f.code for f in report.findings if f.severity == "error"} >= {"missing-file"}
