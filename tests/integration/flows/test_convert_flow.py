"""Convert, in this process: the job done, a trouble that passes, a damage that does not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import observe
import pytest
from observe import ONE_FILE_EACH, TENSORS

from ckptcore.catalog import open_catalog
from ckptcore.checking.examine import inspect, validate
from ckptcore.errors import CkptError, DiskFull, StorageTrouble
from ckptcore.execution.receipts import Receipt
from ckptcore.utils.crc64 import crc64
from ckptcore.utils.part_digest import crc_digest
from tasks import write

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.xdist_group("prefect"),  # one server for all of them
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def convert() -> Any:
    """The flow; Prefect is imported when the server is up."""
    from flows.convert import convert

    return convert


def test_a_checkpoint_is_converted_and_registered(
    convert: Any, source: Path, tmp_path: Path, catalog: str
) -> None:
    target = tmp_path / "out"
    state = convert(str(source), str(target), catalog=catalog, **ONE_FILE_EACH, return_state=True)

    assert state.is_completed()
    assert observe.equal(observe.tensors(target), TENSORS)
    assert len(list(target.iterdir())) == len(TENSORS) + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.sqlite", "out", "run"]
    result = state.result()
    run = open_catalog(catalog).show(result.conversion).conversion
    assert (run.state, run.flow_run_id) == ("succeeded", str(state.state_details.flow_run_id))
    assert {"inspect", "validate", "plan", "write", "publish"} <= run.timings.keys()


def test_the_tasks_digest_the_files_of_the_source_together(
    convert: Any, source: Path, tmp_path: Path, catalog: str
) -> None:
    state = convert(str(source), str(tmp_path / "out"), catalog=catalog, **ONE_FILE_EACH, return_state=True)
    assert state.is_completed(), state.message
    recorded = open_catalog(catalog).at(str(source))
    assert recorded is not None
    for file in recorded[1]:
        assert file.digest == crc_digest(crc64((source / file.path).read_bytes()))
    # A byte that belongs to no tensor is another one, and nothing else shows it.
    (shard,) = source.glob("*.distcp")
    seen, data = shard.stat(), bytearray(shard.read_bytes())
    data[data.index(b"PK\x01\x02") + 5] ^= 1  # the system that wrote an entry, in the list of a zip's entries
    shard.write_bytes(data)
    assert validate(inspect(str(source)), "bytes").ok
    os.utime(shard, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    state = convert(str(source), str(tmp_path / "later"), catalog=catalog, **ONE_FILE_EACH, return_state=True)
    assert "is not what the catalog recorded" in state.message
    assert not (tmp_path / "later").exists()


def test_the_run_has_logs_and_artifacts(
    convert: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = observe.sent_logs(monkeypatch)
    state = convert(str(source), str(tmp_path / "out"), catalog=catalog, return_state=True)
    run = state.state_details.flow_run_id

    assert observe.name(run) == f"consolidate run/step-7 to {tmp_path.name}/out"
    found = observe.artifacts(run)
    # The next run must not replace them.
    assert all(run.hex[:12] in a.key for a in found.values())
    assert {key: a.type for key, a in found.items()} == {
        "checkpoint-validation": "table",
        "conversion-plan": "markdown",
        "conversion-progress": "progress",
        "conversion-result": "markdown",
        "conversion-destination": "markdown",
        "conversion-catalog": "markdown",
    }
    assert found["conversion-progress"].data == 100
    assert (tmp_path / "out").as_uri() in found["conversion-destination"].data
    assert f"{len(TENSORS)} tensors" in found["checkpoint-validation"].description
    # The log of the run has the lines of ckptcore and of the tasks.
    lines = [log["message"] for log in sent if log["flow_run_id"] == str(run)]
    assert any("published" in line for line in lines), lines
    assert any(line.startswith("wrote model.safetensors") for line in lines), (
        lines
    )  # logged in a thread of ckptcore


def test_transient_errors_are_retried(
    convert: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = failing(monkeypatch, lambda n: StorageTrouble("connection reset") if n == 2 else None)
    state = convert(str(source), str(tmp_path / "out"), catalog=catalog, **ONE_FILE_EACH, return_state=True)

    assert state.is_completed()
    assert len(calls) == len(TENSORS) + 2  # a batch each, and the index; one of them twice
    assert observe.equal(observe.tensors(tmp_path / "out"), TENSORS)


def test_permanent_errors_are_not_retried(
    convert: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = failing(monkeypatch, lambda n: DiskFull("7 bytes are missing") if n >= 2 else None)
    state = convert(
        str(source), str(tmp_path / "out"), catalog=catalog, workers=1, **ONE_FILE_EACH, return_state=True
    )

    assert state.is_failed()
    assert state.message.startswith("disk-full: 7 bytes are missing\nnext: ")
    assert len(calls) == 2
    assert not (tmp_path / "out").exists()
    (run,) = open_catalog(catalog).conversions()
    assert (run.state, run.error_code) == ("failed", "disk-full")


def test_a_damaged_source_stops_before_any_work(
    convert: Any, source: Path, tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sent = failing(monkeypatch, lambda n: None), observe.sent_logs(monkeypatch)
    (data,) = source.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-5000])
    state = convert(str(source), str(tmp_path / "out"), catalog=catalog, return_state=True)
    # `prefect deployment run --watch` shows logs until the state, and no message of a state.
    reasons = [log["message"] for log in sent if log["level"] == logging.ERROR]
    assert state.message in reasons

    assert state.is_failed()
    assert data.name in state.message
    rows = observe.artifacts(state.state_details.flow_run_id)["checkpoint-validation"].data
    assert '"truncated-file"' in rows
    assert calls == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.sqlite", "run"]


@pytest.mark.parametrize(
    "options", [{"rename": ["a"]}, {"max_file_size": "many"}, {"memory": "1"}, {"include": ["nothing*"]}]
)
def test_invalid_arguments_fail_the_run(
    convert: Any, source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    state = convert(str(source), str(tmp_path / "out"), no_catalog=True, **options, return_state=True)
    assert state.is_failed()
    assert state.message.startswith("usage: ")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("options", [{"workers": 0}, {"device": "tpu"}, {"verb": "reshard"}])
def test_a_value_that_the_form_refuses_starts_nothing(
    convert: Any, source: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    state = convert(str(source), str(tmp_path / "out"), no_catalog=True, **options, return_state=True)
    assert state.is_failed()
    assert f"- {next(iter(options))}: " in state.message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_all_flows_do_the_same_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.consolidate import consolidate
    from flows.export import export

    monkeypatch.setenv("CKPTCORE_CATALOG_URL", f"sqlite:///{tmp_path / 'catalog.sqlite'}")
    state = consolidate(str(source), return_state=True)
    assert state.result().destination == f"{source}.consolidated"
    assert observe.equal(observe.tensors(Path(f"{source}.consolidated")), TENSORS)

    made = export(str(source), str(tmp_path / "hf"), model_prefix="model", dtype="bf16")
    assert made.loadable == "no"  # no config is known
    assert "not-loadable" in [w.code for w in made.warnings]
    found = observe.tensors(tmp_path / "hf")
    expected = {name.removeprefix("model."): tensor.bfloat16() for name, tensor in TENSORS.items()}
    assert observe.equal(found, expected)


def failing(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[int], CkptError | None]
) -> list[tuple[Receipt, ...] | None]:
    """Make the core's write fail in its n-th call, if ``error(n)`` says so; what the calls gave."""
    real, calls = write.execute, []

    def execute(*arguments: Any, **more: Any) -> tuple[Receipt, ...]:
        calls.append(None)
        trouble = error(len(calls))
        if trouble is not None:
            raise trouble
        return real(*arguments, **more)

    monkeypatch.setattr(write, "execute", execute)
    return calls
