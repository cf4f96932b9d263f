"""The default deployment exports with config and tokenizer of the source, or says that nothing loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import observe
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from paths import ROOT
from tiny_llama import tiny_llama

from ckptcore.catalog import CheckpointDetail, browse, open_catalog
from ckptcore.catalog.run_outputs import outputs_of_run

pytestmark = [
    pytest.mark.usefixtures("prefect_api", "asked_here"),
    pytest.mark.xdist_group("prefect"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TOKENIZER = {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": '{"model_max_length": 12}'}


def save(kind: str, folder: Path, model: Any) -> Path:
    """Save as a trainer does, and return what a webhook announces."""
    folder.mkdir(parents=True)
    if kind == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "step-7", no_dist=True)
        return folder / "step-7"
    form = {
        "pytorch-lightning_version": "2.5.0",
        "epoch": 0,
        "global_step": 7,
        "loops": {},
        "state_dict": {f"model.{name}": value for name, value in model.state_dict().items()},
    }
    torch.save(form, folder / "epoch=0-step=7.ckpt")
    return folder / "epoch=0-step=7.ckpt"


def deployed() -> dict[str, Any]:
    """Return the parameters that the shipped deployment `arrived` sets: the receiver adds only places."""
    file = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())
    (one,) = [each for each in file["deployments"] if each["name"] == "arrived"]
    return dict(one.get("parameters", {}))


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("lightning", True),
        ("dcp", False),
        pytest.param("lightning", False, marks=pytest.mark.soak),
        pytest.param("dcp", True, marks=pytest.mark.soak),
    ],
)
def test_an_export_by_default(
    kind: str, beside: bool, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.arrived import arrived

    model = tiny_llama()
    source, out = save(kind, tmp_path / "run", model), tmp_path / "out"
    if beside:
        model.config.save_pretrained(tmp_path / "run")
        for name, text in TOKENIZER.items():
            (tmp_path / "run" / name).write_text(text)
    lines = observe.sent_logs(monkeypatch)
    state = arrived(str(source), str(out), catalog=catalog, return_state=True, **deployed())
    assert state.is_completed(), state.message
    run = state.state_details.flow_run_id
    logged = "\n".join(str(line["message"]) for line in lines)
    result = observe.artifacts(run)["conversion-result"]
    with open_catalog(catalog) as opened, opened.reading() as conn:
        detail = opened.show(str(out))
        assert isinstance(detail, CheckpointDetail)
        (output,) = outputs_of_run(conn, str(run))
        views = conn.exec_driver_sql("SELECT uri, loadable FROM latest_exports").all()
        (listed,) = browse.checkpoints(conn, kind="derived").rows
    if not beside:
        assert not (out / "config.json").exists()
        assert detail.loadable == output["loadable"] == listed.loadable == "no"
        assert views == []
        assert "not-loadable: " in logged
        assert "nothing loads it" in result.description
        return
    assert [detail.loadable, output["loadable"], listed.loadable] == ["yes"] * 3
    assert [view[1] for view in views] == ["yes"]
    assert "not-loadable" not in logged
    assert "found-files: config.json" in logged
    assert "nothing loads it" not in result.description
    assert {name: (out / name).read_text() for name in TOKENIZER} == TOKENIZER
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    import transformers

    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
