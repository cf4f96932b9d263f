"""Test that outputs are uploaded by handles, published by completing, and right after any fault."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fault_s3
import pytest
import torch
from safetensors.torch import load, save_file

import ckptcore
from ckptcore.conversion import pipeline
from ckptcore.conversion.staging.open_staging import DestinationClaim
from ckptcore.conversion.staging.s3_staging import S3Staging
from ckptcore.errors import (
    AlteredInTransit,
    BudgetTooSmall,
    Busy,
    CkptError,
    DestinationExists,
    DestinationUnwritable,
    OutputMismatch,
    StorageTrouble,
    UsageError,
)
from ckptcore.planning.request import Settings
from ckptcore.store.objects.journal import UploadEntry
from ckptcore.store.objects.lease import Lease
from ckptcore.store.objects.uploads import Uploads
from ckptcore.utils.part_digest import hasher_like

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # aiobotocore leaves its session to the exit
    pytest.mark.timeout(120),
]
PART = 64 << 10
MEANS = Settings(memory=1 << 20, workers=2, fingerprint=True)
OUT = "bucket/models/out/"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "4")
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", PART)


@pytest.fixture
def server() -> Iterator[fault_s3.FaultyS3]:
    with fault_s3.serving(min_part=PART) as running:
        yield running


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of three parts."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(3)
    tensors = {f"layers.{n}.weight": torch.randn(60, 100) for n in range(7)}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def tensors(source: str) -> bytes:
    return (Path(source) / "model.safetensors").read_bytes()


def convert(source: str, **given: object) -> ckptcore.Result:
    return ckptcore.convert(source, "s3://bucket/models/out", verb="export", catalog=False, **given)  # type: ignore[arg-type]


def require_right(server: fault_s3.FaultyS3, tensors: bytes) -> None:
    """The output has the source's tensors, and nothing else is left."""
    found = server.below("bucket/")
    assert sorted(found) == ["models/out/README.md", "models/out/model.safetensors"]
    new, old = load(found["models/out/model.safetensors"]), load(tensors)
    assert new.keys() == old.keys()
    assert all(torch.equal(new[name].view(torch.uint8), old[name].view(torch.uint8)) for name in old)
    assert server.uploads == {}


def test_publishing_completes_uploads_without_copies(
    server: fault_s3.FaultyS3, source: str, tensors: bytes
) -> None:
    result = convert(source)
    require_right(server, tensors)
    assert server.count("PUT", "partNumber") == 3
    assert server.count("POST", "uploadId") == 1
    assert not [row for row in server.log if row[0] == "PUT" and row[1].startswith(OUT + ".")]
    receipt = result.files[0]
    assert receipt.digest is not None
    assert receipt.digest.startswith("blake3-parts-65536:")
    total = hasher_like(receipt.digest)
    total.update(server.below(OUT)["model.safetensors"])
    assert total.hexdigest() == receipt.digest
    assert result.warnings == () or all(w.code != "unproven" for w in result.warnings)
    with pytest.raises(DestinationExists):
        convert(source)


QUERIES, ACTIONS = ("partNumber", "uploads", "uploadId", ""), ("reset", "lost", "status", "error200", "flip")


# Every request and every fault twice or once by default; what S3 never does is skipped.
@pytest.mark.alike(4)
@pytest.mark.parametrize(
    ("action", "query"),
    [
        pytest.param(
            action, query, marks=() if (a + q) % 2 == 0 or action == "error200" else pytest.mark.soak
        )
        for a, action in enumerate(ACTIONS)
        for q, query in enumerate(QUERIES)
    ],
)
def test_faults_that_pass(
    server: fault_s3.FaultyS3, source: str, tensors: bytes, query: str, action: str
) -> None:
    method = "PUT" if query in ("partNumber", "") else "POST"
    if action in ("flip", "error200") and (method == "PUT") != (action == "flip"):
        pytest.skip("bodies flip in PUT; S3 answers 200 with an error to Complete")
    if (action, query) == ("error200", "uploads"):
        pytest.skip("S3 answers 200 with an error to Complete")
    server.fault(method, path="" if query else "model|README", query=query, action=action, times=2, skip=1)
    server.fault(method, path="" if query else "model|README", query=query, action=action)
    convert(source)
    require_right(server, tensors)


def test_a_flip_that_the_store_does_not_see_is_unproven(source: str) -> None:
    with fault_s3.serving(checks=False, keeps=None, min_part=PART) as server:
        result = convert(source)
        assert [w.code for w in result.warnings].count("unproven") == 1
        assert server.uploads == {}


def test_complete_that_fails_for_good_is_resumed(
    server: fault_s3.FaultyS3, source: str, tensors: bytes
) -> None:
    server.fault("POST", query="uploadId", action="status", times=1000)
    with pytest.raises(StorageTrouble):
        convert(source)
    assert not server.below(OUT)
    assert len(server.uploads) == 1
    server.calm()
    convert(source)
    require_right(server, tensors)
    assert server.count("PUT", "partNumber") == 0
    assert server.count("GET", "uploadId") >= 1


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_run_that_stops_while_it_uploads_sends_no_part_twice(
    server: fault_s3.FaultyS3, source: str, tensors: bytes, at: int
) -> None:
    server.fault(
        "PUT", query="partNumber", skip=at, times=1000, action="status", status=403, code="AccessDenied"
    )
    with pytest.raises(CkptError):
        convert(source)
    assert not server.below(OUT)
    requests = -1
    while requests != len(server.log):  # one that was on its way when the run ended may still arrive
        requests = len(server.log)
        time.sleep(0.2)
    sent = {n for upload in server.uploads.values() for n in upload.parts}
    server.calm()
    convert(source)
    require_right(server, tensors)
    rest = [q for m, _, q, *_ in server.log if m == "PUT" and "partNumber" in q]
    assert len(rest) == 3 - len(sent)


@pytest.mark.parametrize(
    ("operation", "path"),
    [
        ("PutObject", r"request\.json$"),
        ("PutObject", r"receipts/"),
        ("PutObject", r"out/README"),
        ("UploadPart", ""),
        ("CompleteMultipartUpload", ""),
        ("ListObjectsV2", ""),
    ],
)
def test_one_layer_repeats_requests(
    server: fault_s3.FaultyS3, source: str, operation: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the error counts is what the store saw: no library repeats a request beside it."""
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "0.5")
    server.fault(operation, path=path, times=10**9)
    with pytest.raises(StorageTrouble) as caught:
        convert(source, settings=Settings(memory=1 << 20, workers=1))
    # Parts are on their way side by side; the error is of one of them.
    seen = Counter(row[1:3] for row in server.log if row[4] == operation and row[3] == 503)
    assert caught.value.values["attempts"] in seen.values()


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "PutObject"])
def test_an_error_is_not_kept_waiting_by_uploads_that_are_begun_ahead(
    server: fault_s3.FaultyS3, source: str, tensors: bytes, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan cannot be saved, while the store throttles what begins the upload."""
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "500")
    begun = threading.Event()
    server.fault(operation, path="(uploads/|safetensors$)", times=10**9, call=begun.set)
    denied = {"status": 403, "code": "AccessDenied", "call": lambda: begun.wait(10)}
    server.fault("PutObject", path="plan/", times=10**9, **denied)
    started = time.monotonic()
    with pytest.raises(DestinationUnwritable, match="AccessDenied"):
        convert(source)
    assert begun.is_set()
    assert time.monotonic() - started < 120
    before = len(server.log)
    time.sleep(0.5)
    assert len(server.log) == before  # nothing is sent without a lease
    server.calm()
    convert(source)
    require_right(server, tensors)
    assert not server.uploads


def test_an_error_is_not_kept_waiting_by_the_lease(
    server: fault_s3.FaultyS3, source: str, tensors: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "500")
    lost = {"call": lambda: server.fault("*", path="lease", times=10**9), "status": 403}
    server.fault("PutObject", path="plan/", times=10**9, code="AccessDenied", **lost)
    started = time.monotonic()
    with pytest.raises(DestinationUnwritable, match="AccessDenied"):
        convert(source)
    assert time.monotonic() - started < 120
    server.calm()
    convert(source)
    require_right(server, tensors)


def test_an_upload_that_a_lifecycle_rule_ended(
    server: fault_s3.FaultyS3, source: str, tensors: bytes
) -> None:
    prepared = ckptcore.prepare(source, "s3://bucket/models/out", verb="export")
    ckptcore.execute(prepared)
    server.uploads.clear()
    with pytest.raises(OutputMismatch, match="lifecycle"):
        ckptcore.publish(prepared)
    assert not server.below(OUT)
    convert(source)
    require_right(server, tensors)


def test_another_plan_aborts_the_uploads_of_the_first(
    server: fault_s3.FaultyS3, source: str, tensors: bytes
) -> None:
    ckptcore.execute(ckptcore.prepare(source, "s3://bucket/models/out", verb="export"))
    assert len(server.uploads) == 1
    first = next(iter(server.uploads))
    convert(source, max_file_size=80_000)
    assert first not in server.uploads
    assert server.uploads == {}
    assert len([n for n in server.below(OUT) if n.endswith(".safetensors")]) == 3


def test_an_object_that_appears_is_kept(server: fault_s3.FaultyS3, source: str) -> None:
    def appear() -> None:
        server.objects[OUT + "model.safetensors"] = fault_s3.Stored(b"precious", "x")

    server.fault("POST", query="uploadId", action="", call=appear)
    with pytest.raises(DestinationExists):
        convert(source)
    assert server.below(OUT)["model.safetensors"] == b"precious"


@pytest.mark.parametrize("habits", [{"creates": "put"}, {"equal_parts": True}])
def test_habits_of_other_stores(habits: dict[str, object], source: str, tensors: bytes) -> None:
    with fault_s3.serving(min_part=PART, **habits) as server:
        convert(source)
        require_right(server, tensors)


def test_without_create_only_requests_the_catalog_decides(
    source: str, tensors: bytes, tmp_path: Path
) -> None:
    catalog = str(tmp_path / "catalog.db")
    with fault_s3.serving(min_part=PART, creates=False) as server:
        with pytest.raises(DestinationUnwritable, match="ignores create-only requests") as caught:
            convert(source)
        assert "catalog=" in caught.value.hint
        assert not server.below("bucket/")
        ckptcore.convert(source, "s3://bucket/models/out", verb="export", catalog=catalog)
        require_right(server, tensors)


def test_an_entry_that_a_list_lacked_is_found(server: fault_s3.FaultyS3) -> None:
    """The list of the staging prefix says that nothing was begun, and some stores list late."""
    places = S3Staging("s3://bucket/models/out").places
    assert places is not None

    def begun() -> UploadEntry:
        uploads = Uploads(places.client, places.journal, places.key_of, "plan", none_begun=True)
        return uploads.begun(0, "model.safetensors", 100)[0]

    first = begun()
    assert begun() == first
    assert list(server.uploads) == [first.upload_id]
    places.journal.abort(first)


def test_what_was_seen_before_the_catalog_decided_does_not_count(source: str, tmp_path: Path) -> None:
    """Until then another run may have worked there, and its output is not replaced."""
    with fault_s3.serving(min_part=PART, creates=False) as server:
        leases: list[int] = []

        def appear() -> None:
            leases.append(1)
            if len(leases) == 3:  # created, created again, and written by the one that the catalog chose
                server.put("bucket/models/out/model.safetensors", b"another run's")

        server.fault("PutObject", path="lease", action="", times=9, call=appear)
        with pytest.raises(DestinationExists):
            ckptcore.convert(source, "s3://bucket/models/out", catalog=str(tmp_path / "catalog.db"))
        assert "CreateMultipartUpload" not in [name for *_, name in server.log]


def test_of_two_runs_at_once_the_catalog_lets_one_write(source: str, tmp_path: Path) -> None:
    """Both find no lease; the second create replaces the first one's object, and the claim tells."""
    catalog = str(tmp_path / "catalog.db")
    with fault_s3.serving(creates=False) as server:
        places = [S3Staging("s3://bucket/out").places for _ in range(2)]
        first, second = [p.lease(DestinationClaim(catalog, "s3://bucket/out")) for p in places if p]
        server.fault("PutObject", path="lease", action="", call=first.take)
        with pytest.raises(Busy, match=r"process \d+ on .* is writing s3://bucket/out"):
            second.take()
        first.renew()
        first.require()
        holder = first.holder
        assert holder is not None
        assert json.loads(server.below("bucket/.out.ckptcore/")["lease.json"])["token"] == holder.token
        with pytest.raises(Busy):
            second.take()
        first.release()
        second.take()
        second.release()
        assert not server.objects


def test_a_lease_that_could_not_be_ended_keeps_nobody_away(
    server: fault_s3.FaultyS3, source: str, tensors: bytes
) -> None:
    """The process lives on, and knows that its earlier run has ended."""
    server.fault("*", skip=40, times=10**9)
    with pytest.raises(StorageTrouble):
        convert(source)
    server.calm()
    convert(source)
    require_right(server, tensors)


def test_the_next_run_uploads_an_altered_object(source: str, tensors: bytes) -> None:
    """The store compares nothing, and keeps a checksum of what it got."""
    with fault_s3.serving(min_part=PART, checks=False) as server:
        server.fault("UploadPart", action="flip", skip=1)
        with pytest.raises(OutputMismatch, match="altered on its way"):
            convert(source)
        assert not server.below(OUT)
        convert(source)
        require_right(server, tensors)


def test_a_small_object_that_arrived_altered_is_repeated(source: str, tensors: bytes) -> None:
    with fault_s3.serving(min_part=PART, checks=False, keeps=None) as server:
        for skip in (0, 4, 9):
            server.fault("PutObject", action="flip", skip=skip)
        convert(source)
        require_right(server, tensors)


@pytest.mark.parametrize(
    ("path", "skip"),
    [
        (r"out/README.md$", 0),
        (r"uploads/file", 1),  # with the id of its upload
        (r"publishing.json$", 0),
        *(
            pytest.param(path, 0, marks=pytest.mark.soak)
            for path in (r"files/README.md$", r"lease.json$", r"uploads/file", r"receipts/")
        ),
    ],
)
def test_a_small_object_that_always_arrives_altered_is_removed(
    source: str, tensors: bytes, path: str, skip: int
) -> None:
    """The store compares nothing: the next run must not take what it got for what was sent."""
    with fault_s3.serving(min_part=PART, checks=False) as server:
        server.fault("PutObject", path=path, action="flip", at=0.6, skip=skip, times=10**9)
        with pytest.raises(AlteredInTransit) as caught:
            convert(source)
        assert caught.value.hint
        assert not [name for name in server.below("bucket/") if re.search(path, name)]
        server.calm()
        convert(source)
        require_right(server, tensors)


def test_a_budget_that_no_part_fits_is_refused_before_anything_is_sent(
    server: fault_s3.FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptcore.store.objects.part_plan.PART", 1 << 20)
    save_file({"weight": torch.ones(1 << 19)}, tmp_path / "model.safetensors")
    with pytest.raises(BudgetTooSmall, match="parts of 1048576 bytes"):
        convert(str(tmp_path), settings=Settings(memory=1 << 20, workers=1))
    assert not server.uploads


def test_a_second_run_learns_who_writes(server: fault_s3.FaultyS3, source: str, tensors: bytes) -> None:
    staging = S3Staging("s3://bucket/models/out")
    with staging.lock(make=True):
        with pytest.raises(Busy, match=r"process \d+ on .* is writing s3://bucket/models/out"):
            convert(source)
        with pytest.raises(Busy):
            ckptcore.prepare(source, "s3://bucket/models/out", verb="export", max_file_size=50_000)
    convert(source)
    require_right(server, tensors)


def test_a_holder_that_was_stopped_past_its_lease_changes_nothing(
    server: fault_s3.FaultyS3, source: str, tensors: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor has another plan: it aborts the uploads first, and the first one ends with an error."""
    slow = S3Staging("s3://bucket/models/out")
    assert slow.places is not None
    prepared = ckptcore.prepare(source, "s3://bucket/models/out", verb="export")
    ckptcore.execute(prepared)
    lease = slow.places.lease()
    lease.take()
    lease._stop.set()  # as if the machine was asleep
    monkeypatch.setattr("ckptcore.store.objects.lease._SKEW_S", -120.0)
    convert(source, max_file_size=80_000)
    monkeypatch.setattr(lease, "_clock", lambda: time.time() + 3600)  # it wakes an hour later
    with pytest.raises(Busy, match="longer than its lease"):
        lease.require()
    done = server.below("bucket/")
    with pytest.raises(CkptError):
        ckptcore.publish(prepared)
    assert server.below("bucket/").items() >= done.items()
    assert server.uploads == {}


def test_a_lease_that_ends_in_a_moment_is_renewed_before_a_change(server: fault_s3.FaultyS3) -> None:
    """Else a machine whose clock is fast takes it over while the change is on its way."""
    places = S3Staging("s3://bucket/models/out").places
    now = [1e9]
    lease = Lease(places.client, f"{places.staging}/lease.json", places.destination, clock=lambda: now[0])
    lease.take()
    lease._stop.set()  # the thread that renews it gets no turn
    assert lease.holder is not None
    now[0] = lease.holder.until - 1
    lease.require()
    stored = json.loads(server.below(f"bucket/{places.staging}/")["lease.json"])
    assert stored["until"] >= now[0] + lease._ttl_s / 4
    lease.release()


@pytest.mark.soak
def test_many_small_files(server: fault_s3.FaultyS3, tmp_path: Path) -> None:
    save_file({f"t{n}": torch.full((100,), n) for n in range(40)}, tmp_path / "model.safetensors")
    made = ckptcore.convert(
        str(tmp_path),
        "s3://bucket/models/out",
        verb="export",
        max_file_size=1000,
        settings=Settings(workers=4),
    )
    assert len(made.files) > 20
    assert server.uploads == {}
    assert ckptcore.check(ckptcore.open("s3://bucket/models/out"), "bytes").ok


def test_a_folder_is_replaced_in_place_only_on_request(
    server: fault_s3.FaultyS3, source: str, tensors: bytes
) -> None:
    convert(source, max_file_size=80_000)
    before = server.below("bucket/")
    with pytest.raises(DestinationExists, match="one object at a time") as caught:
        convert(source, overwrite=True)
    assert "overwrite_in_place=True" in caught.value.hint
    assert server.below("bucket/") == before
    states: list[list[str]] = []
    for method, path in (("POST", "out/model.safetensors$"), ("PUT", "out/README.md$"), ("DELETE", "out/")):
        server.fault(
            method, path=path, action="", times=99, call=lambda: states.append(list(server.below(OUT)))
        )
    convert(source, overwrite=True, overwrite_in_place=True)
    require_right(server, tensors)
    assert len(states) > 5
    # A reader with the old index finds all of the old files; otherwise it finds no index.
    old = {name.removeprefix("models/out/") for name in before if name.endswith(".safetensors")}
    for names in states:
        assert "model.safetensors.index.json" not in names or old == {n for n in names if n[-4:] == "sors"}


def test_one_file_is_replaced_at_once(server: fault_s3.FaultyS3, source: str) -> None:
    for n in range(2):
        made = ckptcore.convert(source, "s3://bucket/model.pt", overwrite=bool(n))
        assert made.files[0].nbytes == len(server.objects["bucket/model.pt"].data)
    assert server.uploads == {}
    assert ckptcore.check(ckptcore.open("s3://bucket/model.pt"), "bytes").ok


@pytest.mark.parametrize("what", ["DELETE", "list-uploads"])
def test_with_fewer_rights(server: fault_s3.FaultyS3, source: str, what: str) -> None:
    server.denied += ["DeleteObject" if what == "DELETE" else "ListMultipartUploads"]
    convert(source)
    assert sorted(server.below(OUT)) == ["README.md", "model.safetensors"]
    assert server.uploads == {}
    if what == "DELETE":
        server.calm()
        convert(source)  # it is published: only the staging prefix is removed
        assert not [name for name in server.below("bucket/") if ".ckptcore" in name]


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_parts_of_one_file_are_uploaded_in_any_order(
    server: fault_s3.FaultyS3, source: str, tensors: bytes, order: str
) -> None:
    """Digest and fingerprint are those of one worker; a part that is there is not sent twice."""
    alone = ckptcore.convert(source, "s3://bucket/alone", verb="export", settings=MEANS)
    server.log.clear()
    prepared = ckptcore.prepare(source, "s3://bucket/models/out", verb="export", settings=MEANS)
    cut = pipeline.parts(prepared.plan_uri, 0, 2 * PART, MEANS)
    assert [(p.begin, p.end) for p in cut] == [(0, 2 * PART), (2 * PART, prepared.files[0].nbytes)]
    with pytest.raises(UsageError, match="cut with tiles"):
        pipeline.execute_part(prepared.plan_uri, cut[1], replace(MEANS, memory=9 << 20))
    for part in cut[:: 1 if order == "forward" else -1]:
        pipeline.execute_part(prepared.plan_uri, part, MEANS)
    assert pipeline.execute_part(prepared.plan_uri, cut[0], MEANS).reused
    with pytest.raises(UsageError):
        pipeline.finish(prepared.plan_uri, MEANS)
    pipeline.join(prepared.plan_uri, 0)
    result = pipeline.finish(prepared.plan_uri, MEANS)
    pipeline.remove_staging(prepared.plan_uri)
    assert server.count("PUT", "partNumber") == 3
    assert (result.files[0].digest, result.fingerprint) == (alone.files[0].digest, alone.fingerprint)
    found = server.below("bucket/alone/")
    assert server.below(OUT)["model.safetensors"] == found["model.safetensors"]
    for name in found:
        del server.objects[f"bucket/alone/{name}"]
    require_right(server, tensors)


def test_parts_of_several_uploads_are_not_joined(server: fault_s3.FaultyS3, source: str) -> None:
    prepared = ckptcore.prepare(source, "s3://bucket/models/out", verb="export", settings=MEANS)
    first, second = pipeline.parts(prepared.plan_uri, 0, 2 * PART, MEANS)
    pipeline.execute_part(prepared.plan_uri, first, MEANS)
    server.uploads.clear()  # a lifecycle rule
    pipeline.execute_part(prepared.plan_uri, second, MEANS)
    with pytest.raises(OutputMismatch, match="several uploads"):
        pipeline.join(prepared.plan_uri, 0)
    for part in (first, second):
        pipeline.execute_part(prepared.plan_uri, part, MEANS)
    pipeline.join(prepared.plan_uri, 0)
    pipeline.finish(prepared.plan_uri, MEANS)


def test_files_with_checksums_behind_their_data_are_one_task(server: fault_s3.FaultyS3, source: str) -> None:
    prepared = ckptcore.prepare(source, "s3://bucket/out.pt", settings=MEANS)
    assert pipeline.parts(prepared.plan_uri, 0, PART, MEANS) == ()


def test_a_destination_that_cannot_be_reached_is_no_source(
    server: fault_s3.FaultyS3, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is read first, of all requests."""
    with monkeypatch.context() as without:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            without.delenv(name, raising=False)
        without.setenv("AWS_EC2_METADATA_DISABLED", "true")
        without.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        with pytest.raises(DestinationUnwritable, match="cannot reach the destination s3://bucket/o: ") as e:
            ckptcore.convert(source, "s3://bucket/o", catalog=False)
    assert "credentials" in str(e.value.hint)
