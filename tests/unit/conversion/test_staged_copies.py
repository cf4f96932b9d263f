"""Test that a staged object which the store copies into place is the version that was proven."""

from __future__ import annotations

from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptcore
import ckptcore.store.s3  # it takes the limit when it is imported
from ckptcore.errors import DestinationExists, OutputMismatch

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of aiobotocore
README, STAGED = "bucket/models/out/README.md", "bucket/models/.out.ckptcore/files/README.md"


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is too large for one request."""
    monkeypatch.setattr("ckptcore.store.objects.MAX_REQUEST_BYTES", 1)


@pytest.fixture
def source(tmp_path: Path) -> str:
    save_file({"w": torch.arange(4.0)}, tmp_path / "model.safetensors")
    return str(tmp_path)


def convert(source: str, **given: object) -> ckptcore.Result:
    return ckptcore.convert(source, "s3://bucket/models/out", verb="export", catalog=False, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("conditions", ["known", "NotImplemented", "InvalidArgument"])
def test_a_staged_object_is_copied_as_it_was_proven(conditions: str, source: str, tmp_path: Path) -> None:
    with fault_s3.serving() as server:
        if conditions != "known":
            status = 501 if conditions == "NotImplemented" else 400
            server.fault("CopyObject", path="README", times=1, status=status, code=conditions)
        convert(source)
        assert server.count("CopyObject", path="out/README") == (1 if conditions == "known" else 2)
        found = server.below("bucket/")
        assert sorted(found) == ["models/out/README.md", "models/out/model.safetensors"]
        (tmp_path / "back.safetensors").write_bytes(found["models/out/model.safetensors"])
        assert torch.equal(load_file(tmp_path / "back.safetensors")["w"], torch.arange(4.0))


@pytest.mark.parametrize("matches", [True, False], ids=["conditions", "conditions ignored"])
def test_an_object_that_is_replaced_after_its_proof_is_not_published(
    source: str, matches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fault_s3.serving(matches=matches) as server:
        server.fault("CopyObject", path="out/README", action="", call=lambda: server.put(STAGED, b"other"))
        with pytest.raises(OutputMismatch, match="was changed since it was written"):
            convert(source)
        assert README not in server.objects
        server.calm()
        monkeypatch.undo()
        convert(source)
        assert sorted(server.below("bucket/")) == ["models/out/README.md", "models/out/model.safetensors"]
        assert server.objects[README].data != b"other"


@pytest.mark.parametrize("replaced", [False, True], ids=["new name", "overwrite"])
def test_what_appears_right_before_the_copy_stays(replaced: bool, source: str) -> None:
    with fault_s3.serving() as server:
        if replaced:
            convert(source)
        server.fault(
            "CopyObject", path="out/README", action="", call=lambda: server.put(README, b"another's")
        )
        with pytest.raises(DestinationExists, match=r"out/README\.md was written meanwhile"):
            convert(source, overwrite=replaced, overwrite_in_place=replaced)
        assert server.objects[README].data == b"another's"


def test_only_the_copy_itself_is_removed(source: str) -> None:
    """Another program writes the name after the copy, whose source was replaced meanwhile."""
    with fault_s3.serving() as server:

        def replace() -> None:
            server.put(STAGED, b"other")
            server.put(README, b"another's")

        def copying() -> None:
            server.fault("HeadObject", path="files/README", action="", call=replace)

        server.fault("CopyObject", path="out/README", action="", call=copying)
        with pytest.raises(OutputMismatch, match="was changed since it was written"):
            convert(source)
        assert server.objects[README].data == b"another's"
