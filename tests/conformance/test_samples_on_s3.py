"""Test that every sample gives the same bytes, findings and fingerprints on S3 as on a local disk.

Each checkpoint of a sample is converted from a local folder into one, which is the expectation, and then from
and to an S3 server in this process. Files are cut into parts of 64 KiB, so that most outputs have several.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fault_s3
import gaps
import pytest
from s3_samples import FORMS, PART, require_alike
from samples import SAMPLES, Sample

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # aiobotocore leaves its session to the exit
    pytest.mark.timeout(300),
]
_SLICE = 300_000  # bytes of the largest sample of the slice


@pytest.fixture(scope="module")
def server() -> Iterator[fault_s3.FaultyS3]:
    with pytest.MonkeyPatch.context() as patch, fault_s3.serving(min_part=PART) as running:
        patch.setattr("ckptcore.store.objects.part_plan.PART", PART)
        yield running


def smallest(samples: list[Sample]) -> list[Sample]:
    """Return the smallest simple sample of each archive, and of each folder of samples that is not packed."""
    best: dict[Path, Sample] = {}
    for sample in sorted((s for s in samples if s.is_simple and _nbytes(s) < _SLICE), key=_nbytes):
        best.setdefault(sample.root.parent, sample)
    return list(best.values())


def _nbytes(sample: Sample) -> int:
    return sum(p.stat().st_size for p in (sample.root / "ckpt").rglob("*") if p.is_file())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every sample in every form to `make soak`, and a slice to `make test`.

    The slice is the smallest sample of each origin, in one form, where it has less than 300 KB.
    """
    if "forms" not in metafunc.fixturenames:
        return
    found = metafunc.config.stash[SAMPLES]
    rows = [
        pytest.param(sample, [list(FORMS)[n % len(FORMS)]], id=sample.name)
        for n, sample in enumerate(smallest(found))
    ]
    rows += [
        pytest.param(
            sample,
            list(FORMS),
            id=f"{sample.name}-all",
            # Each worker has a server of its own: one for all would give every sample to one worker.
            marks=(pytest.mark.soak, pytest.mark.xdist_group(f"samples_on_s3_{n % 8}")),
        )
        for n, sample in enumerate(found)
    ]
    metafunc.parametrize(("each", "forms"), rows)


@pytest.mark.alike(5)
def test_every_way_gives_the_same(
    each: Sample, forms: list[str], server: fault_s3.FaultyS3, tmp_path: Path
) -> None:
    server.objects.clear()
    made = require_alike(each, tmp_path, forms)
    assert made or any(gaps.lookup(t, each.name) for t in (gaps.REFUSED_DCP, gaps.REFUSED_OTHER))
    assert server.uploads == {}
    assert not [name for name in server.objects if ".ckptcore" in name]
