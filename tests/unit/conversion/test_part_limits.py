"""Test that a store's limit of parts is kept by larger, equal parts, or refused before anything is sent.

The limits of S3 (9,000 of 10,000 parts, 5 TiB) are lowered to 20 parts and 1 MiB: the arithmetic of a file of
300 GiB is in `test_part_plan`, and here files as far above their limits are really uploaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptcore
from ckptcore.conversion import pipeline
from ckptcore.errors import BudgetTooSmall, UsageError
from ckptcore.planning.request import Settings

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning"
)  # aiobotocore leaves its session to the exit
SMALLEST, MOST = 16 << 10, 20
LARGEST = 1 << 20
OUT = "s3://bucket/models/out"
MEANS = Settings(memory=1 << 20, workers=2)


@pytest.fixture(scope="module")
def server() -> Iterator[fault_s3.FaultyS3]:
    limits = {"PART": SMALLEST, "MOST_PARTS": MOST, "LARGEST": LARGEST, "_MIB": 1 << 10}
    with (
        pytest.MonkeyPatch.context() as patch,
        fault_s3.serving(min_part=SMALLEST, equal_parts=True) as running,
    ):
        for name, value in limits.items():
            patch.setattr(f"ckptcore.store.objects.part_plan.{name}", value)
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def save(folder: Path, *numbers: int) -> None:
    torch.manual_seed(7)
    save_file({f"w{n}": torch.randn(count) for n, count in enumerate(numbers)}, folder / "model.safetensors")


def sent(server: fault_s3.FaultyS3) -> list[int]:
    """Return the numbers of the parts that were sent."""
    found = [re.search(r"partNumber=(\d+)", row[2]) for row in server.log if row[0] == "PUT"]
    return sorted(int(match[1]) for match in found if match)


@pytest.mark.parametrize("how", ["one worker", "parts of several workers"])
def test_a_file_above_the_limit_gets_larger_equal_parts(
    how: str, server: fault_s3.FaultyS3, source: Path
) -> None:
    """900 KB would be 55 parts of 16 KiB; a store that refuses unequal parts takes it in 20."""
    save(source, 100_000, 5, 125_001)
    server.objects.clear()
    server.calm()
    if how == "one worker":
        made = ckptcore.convert(str(source), OUT, verb="export", catalog=False, settings=MEANS)
    else:
        prepared = ckptcore.prepare(str(source), OUT, verb="export", settings=MEANS)
        cut = pipeline.parts(prepared.plan_uri, 0, 3 * SMALLEST, MEANS)
        assert len(cut) > 4
        for part in reversed(cut):
            pipeline.execute_part(prepared.plan_uri, part, MEANS)
        pipeline.join(prepared.plan_uri, 0)
        made = pipeline.finish(prepared.plan_uri, MEANS)
        pipeline.remove_staging(prepared.plan_uri)
    data = server.below("bucket/models/out/")["model.safetensors"]
    part = 44 << 10  # the 20th of the file in full KiB
    assert (part - 1024) * MOST < len(data) <= part * MOST
    assert sent(server) == list(range(1, MOST + 1))
    assert (made.files[0].digest or "").startswith(f"blake3-parts-{part}:")
    (source / "back.safetensors").write_bytes(data)
    new, old = load_file(source / "back.safetensors"), load_file(source / "model.safetensors")
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name], old[name]) for name in old)
    assert server.uploads == {}


@pytest.mark.parametrize(
    ("numbers", "most", "error", "message"),
    [
        (270_000, MOST, UsageError, r"an object has at most 1048576 bytes .* \(got 1080\d\d\d\)"),
        (261_000, 1, BudgetTooSmall, r"uploaded in parts of 1044\d\d\d bytes"),
    ],
    ids=["no object is that large", "no memory for a part"],
)
def test_what_fits_no_plan_is_refused_before_anything_is_sent(
    numbers: int,
    most: int,
    error: type[Exception],
    message: str,
    server: fault_s3.FaultyS3,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ckptcore.store.objects.part_plan.MOST_PARTS", most)
    save(source, numbers)
    server.objects.clear()
    server.calm()
    with pytest.raises(error, match=message):
        ckptcore.convert(str(source), OUT, verb="export", catalog=False, settings=MEANS)
    assert not [row for row in server.log if row[0] == "POST"]
    assert sent(server) == []
    assert server.below("bucket/models/out/") == {}
