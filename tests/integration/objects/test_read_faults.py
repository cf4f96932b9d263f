"""Reading from S3 under faults: the right result, or a clear error; never a wrong one."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_s3 import CHECKSUMS, FaultyS3, serving
from paths import FIXTURES
from safetensors.torch import save_file

import ckptcore
from ckptcore.errors import AlteredInTransit, CkptError, SourceChanged, SourceUnreadable
from ckptcore.planning.request import Settings
from ckptcore.store import open_source_store
from ckptcore.store.ahead import ExpectedReads
from ckptcore.store.objects import small_reads
from ckptcore.store.objects.blocks import plan_blocks
from ckptcore.store.objects.retry import DEADLINE_VARIABLE

DCP = FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt"
SHARDED = FIXTURES / "torch" / "hf_sharded_4r" / "ckpt"
EVER = 10**9
FAULTS: dict[str, dict[str, object]] = {
    "status": {"status": 500, "code": "InternalError"},
    "throttle": {},
    "swap": {"action": ""},
    **{action: {"action": action} for action in ("reset", "cut", "cut-reset", "flip", "stall", "late")},
    "expired": {"status": 403, "code": "ExpiredToken", "times": EVER},
    "skewed clock": {"status": 403, "code": "RequestTimeTooSkewed", "times": EVER},
    "denied": {"status": 403, "code": "AccessDenied", "times": EVER},
    "gone": {"status": 404, "code": "NoSuchKey", "times": EVER},
}
SOAKED = ("late", "skewed clock", "denied", "gone")  # answers that others in this list resemble
FINAL = ("swap", "flip", "expired", "skewed clock", "denied", "gone")  # repeating the request does not help
MOMENTS = 1  # random moments of each fault; `make soak` takes 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs of a test, and nothing kept of earlier reads."""
    monkeypatch.setenv("FSSPEC_S3", '{"config_kwargs": {"read_timeout": 1.0}}')
    monkeypatch.setenv(DEADLINE_VARIABLE, "3")
    monkeypatch.setattr("ckptcore.store.objects.retry._LONGEST_WAIT_S", 0.05)
    _reload_fsspec()
    monkeypatch.setattr(small_reads, "SHARED", small_reads.SmallReads())
    monkeypatch.setattr("ckptcore.store.objects.reader.SHARED", small_reads.SHARED)


@pytest.fixture(autouse=True, scope="module")
def as_before() -> Iterator[None]:
    yield
    os.environ.pop("FSSPEC_S3", None)
    _reload_fsspec()


def read_server(*, keeps: str | None = None, matches: bool = True) -> AbstractContextManager[FaultyS3]:
    """Run a server whose ETags prove nothing."""
    return serving(keeps=keeps, matches=matches, parts=True)


def _reload_fsspec() -> None:
    from fsspec.config import conf, set_conf_env

    conf.pop("s3", None)
    set_conf_env(conf)


def upload(server: FaultyS3, folder: Path, name: str = "src") -> str:
    for file in folder.rglob("*"):
        if file.is_file():
            server.put(f"b/{name}/{file.relative_to(folder)}", file.read_bytes())
    return f"s3://b/{name}"


def made(source: str, target: Path, **options: object) -> tuple[dict[str, bytes], ckptcore.Result]:
    result = ckptcore.convert(source, str(target), catalog=False, **options)
    files = [target] if target.is_file() else sorted(f for f in target.rglob("*") if f.is_file())
    return {f.name: f.read_bytes() for f in files if f.name != "README.md"}, result


@cache
def local(folder: Path) -> dict[str, bytes]:
    """What a conversion of the local folder gives."""
    with tempfile.TemporaryDirectory() as target:
        return made(str(folder), Path(target) / "local.safetensors")[0]


@cache
def answers(folder: Path) -> int:
    """Return how many bodies a conversion reads."""
    with read_server(keeps="crc64nvme") as server, tempfile.TemporaryDirectory() as target:
        forget_pages()
        made(upload(server, folder), Path(target) / "calm.safetensors")
        return server.count("GetObject")


def forget_pages() -> None:
    small_reads.SHARED._pieces.clear()
    small_reads.SHARED._starts.clear()


def now_in(server: FaultyS3, folder: Path) -> dict[str, bytes]:
    """Return what a conversion of the server's objects gives, as they are now."""
    for name, there in server.objects.items():
        file = folder / name.removeprefix("b/src/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(there.data)
    return made(str(folder), folder.with_suffix(".safetensors"))[0]


def judged(
    fault: str,
    folder: Path,
    keeps: str | None,
    moments: int,
    tmp_path: Path,
    seed: int,
    *,
    times: tuple[int, ...] = (1, 1, 2),
    matches: bool = True,
) -> dict[str, int]:
    """Convert under a fault at random moments; return how often each outcome was seen.

    After an error the same process converts once more: nothing altered may be kept.
    """
    right = local(folder)
    answers(folder)  # with a server of its own
    draw, outcomes = random.Random(seed), {"right": 0, "error": 0, "unproven": 0, "unhit": 0}
    with read_server(keeps=keeps, matches=matches) as server:
        server.stall_s = 1.3
        url = upload(server, folder)
        for moment in range(moments):
            forget_pages()
            server.calm()
            target = tmp_path / f"{moment}.safetensors"
            victim = draw.choice(sorted(server.objects))
            swapped = bytearray(server.objects[victim].data)
            before = bytes(swapped)
            swapped[draw.randrange(len(swapped))] ^= 8
            rule = server.fault(
                "GetObject",
                **{
                    "skip": draw.randrange(answers(folder)),
                    "times": draw.choice(times),
                    "at": draw.random(),
                    **FAULTS[fault],
                },
            )
            if fault == "swap":
                rule.call = lambda victim=victim, data=bytes(swapped): server.put(victim, data)
            try:
                got, result = made(url, target)
            except CkptError as error:
                outcomes["error"] += 1
                outcomes[error.code] = outcomes.get(error.code, 0) + 1
                server.calm()
                server.put(victim, before)
                rerun, _ = made(url, tmp_path / f"{moment}-again.safetensors")
                assert list(rerun.values()) == list(right.values()), f"{fault}: wrong in the next run"
            else:
                outcomes["unhit"] += rule.times > 0
                if list(got.values()) == list(right.values()):
                    outcomes["right"] += 1
                elif fault == "swap":
                    # Replaced before the plan took its stamps: then all of the new version, or it is wrong.
                    assert list(got.values()) == list(now_in(server, tmp_path / f"now{moment}").values())
                    outcomes["right"] += 1
                else:
                    # Nothing can know: neither format nor store has a checksum.
                    assert fault == "flip", f"wrong result after {fault}"
                    assert keeps is None, f"wrong result although the store keeps {keeps}"
                    assert sum(r.unverified for r in result.files) > 0
                    outcomes["unproven"] += 1
            server.put(victim, before)
    clear = {
        "error",
        "right",
        "unproven",
        "unhit",
        "source-changed",
        "source-unreadable",
        "altered-in-transit",
        "storage-trouble",
        "malformed",
        "damaged",
    }
    assert outcomes.keys() <= clear
    return outcomes


# A checksum of the store matters to what nothing else can tell.
@pytest.mark.grid
@pytest.mark.parametrize(
    ("fault", "keeps"), [*((f, None) for f in FAULTS if f not in SOAKED), ("flip", "crc64nvme")]
)
@pytest.mark.parametrize("folder", [DCP, SHARDED], ids=["dcp", "safetensors"])
def test_right_or_an_error(fault: str, keeps: str | None, folder: Path, tmp_path: Path) -> None:
    found = judged(fault, folder, keeps, MOMENTS, tmp_path, seed=17)
    if fault not in FINAL:
        assert found["right"] == MOMENTS


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("keeps", [None, *CHECKSUMS])
@pytest.mark.parametrize("folder", [DCP, SHARDED], ids=["dcp", "safetensors"])
def test_right_or_an_error_many_times(fault: str, keeps: str | None, folder: Path, tmp_path: Path) -> None:
    times = (1, 2) if fault in ("stall", "late") else (1, 2, EVER)
    print(fault, keeps, judged(fault, folder, keeps, 20, tmp_path, seed=1700, times=times))


@pytest.mark.soak
@pytest.mark.parametrize("folder", [DCP, SHARDED], ids=["dcp", "safetensors"])
def test_a_source_replaced_on_a_store_that_ignores_if_match(folder: Path, tmp_path: Path) -> None:
    print(judged("swap", folder, None, 20, tmp_path, seed=1700, matches=False))


@pytest.mark.parametrize("keeps", [None, "crc32", "sha256"])
def test_a_flip_in_tensor_bytes_of_safetensors(keeps: str | None, tmp_path: Path) -> None:
    """With a checksum of the store it is made once more, and right; without one it is unproven."""
    right = local(SHARDED)
    with read_server(keeps=keeps) as server:
        url = upload(server, SHARDED)
        _, calm = made(url, tmp_path / "calm.safetensors")
        unproven = sum(r.unverified for r in calm.files)
        assert (unproven == 0) == (keeps is not None)
        server.calm()
        # The last byte of a body is of an element: pages of headers are kept from the run before.
        server.fault("GetObject", action="flip", at=1.0, path=r"safetensors$")
        if keeps is None:
            got, result = made(url, tmp_path / "flipped.safetensors")
            assert got["flipped.safetensors"] != right["local.safetensors"]
            assert sum(r.unverified for r in result.files) > 0
            return
        got, _ = made(url, tmp_path / "flipped.safetensors")
        assert got["flipped.safetensors"] == right["local.safetensors"]


def test_the_note_on_ranges_that_no_run_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has a checksum of every file: that it has none would be wrong."""
    monkeypatch.setattr("ckptcore.execution.expected_reads.MOST_ROWS", 0)
    with read_server(keeps="crc64nvme") as server:
        url = upload(server, SHARDED)
        _, result = made(url, tmp_path / "out.safetensors")
        (note,) = [w for w in result.warnings if w.code == "unproven"]
        assert note.message.startswith(f"{sum(r.unverified for r in result.files)} source records were not")
        assert "past the 0 ranges" in note.message
        assert "`ckptcore diff SRC DST`" in note.hint
        assert ckptcore.diff(url, str(tmp_path / "out.safetensors")).equal  # the step that the note names


def test_a_flip_in_a_record_with_a_checksum_is_mended(tmp_path: Path) -> None:
    right = local(DCP)
    with read_server() as server:
        url = upload(server, DCP)
        server.fault("GetObject", action="flip", path=r"distcp$", times=2)
        got, _ = made(url, tmp_path / "got.safetensors")
        assert got["got.safetensors"] == right["local.safetensors"]
        assert server.count("GetObject", path="distcp$") > 4  # one for each file, and once more


_MEMORY = 2 << 20  # records are read in pieces, which are used before the last one shows that one is altered
# What reads tensors: of (source on S3, equal local checkpoint, folder) a value that says what was read.
VERBS: dict[str, Callable[[str, str, Path], object]] = {
    "convert": lambda url, _, folder: made(url, folder / "x", settings=Settings(memory=_MEMORY))[0],
    "fingerprint": lambda url, _, __: (
        ckptcore.fingerprint(ckptcore.open(url), settings=Settings(memory=_MEMORY)).fingerprint
    ),
    "diff": lambda url, same, _: ckptcore.diff(url, same, settings=Settings(memory=_MEMORY)).equal,
    "validate": lambda url, _, __: [
        f.code for f in ckptcore.check(ckptcore.open(url), level="values").findings if f.severity == "error"
    ],
    "read": lambda url, _, __: {
        t.fqn: ckptcore.read(ckptcore.open(url), t.fqn).tolist() for t in ckptcore.open(url).tensors
    },
}


_BARE = ("convert", "validate")  # these compare a file without checksums of its own with the store's


@pytest.mark.parametrize(
    ("verb", "bare"), [*((verb, False) for verb in VERBS), *((verb, True) for verb in _BARE)]
)
def test_one_altered_answer_does_not_end_a_command(verb: str, bare: bool, tmp_path: Path) -> None:
    """What was made of it is made once more, because the next read is right."""
    tensors = {"w": torch.arange(700_000, dtype=torch.float32), "v": torch.ones(70_000)}
    source = tmp_path / ("model.safetensors" if bare else "model.pt")
    save_file(tensors, source) if bare else torch.save(tensors, source)
    want = VERBS[verb](str(source), str(source), tmp_path / "local")
    with read_server(keeps="crc32" if bare else None) as server:
        server.put(f"b/src/{source.name}", source.read_bytes())
        url = f"s3://b/src/{source.name}"
        VERBS[verb](url, str(source), tmp_path / "calm")
        bodies = server.count("GetObject")
        for skip in range(bodies):
            for _ in range(20):  # reads ahead are joined as they come: a run may have a request less
                forget_pages()
                server.calm()
                rule = server.fault("GetObject", action="flip", skip=skip, at=0.6)
                assert VERBS[verb](url, str(source), tmp_path / f"out{skip}") == want
                shutil.rmtree(tmp_path / f"out{skip}", ignore_errors=True)
                if rule.times == 0:
                    break
            assert rule.times == 0


def test_one_altered_answer_on_the_way_to_a_bucket(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.arange(n, n + 300_000, dtype=torch.float32) for n in range(3)}
    torch.save(tensors, tmp_path / "model.pt")
    right = made(str(tmp_path / "model.pt"), tmp_path / "local.safetensors")[0]["local.safetensors"]
    with read_server() as server:
        server.put("b/src/model.pt", (tmp_path / "model.pt").read_bytes())
        server.fault("GetObject", action="flip", skip=1, at=0.6, path="model.pt$")
        ckptcore.convert(
            "s3://b/src/model.pt",
            "s3://b/out/x.safetensors",
            settings=Settings(memory=6 << 20),
            catalog=False,
        )
        assert server.objects["b/out/x.safetensors"].data == right


@pytest.mark.parametrize("memory", [64 << 20, 1 << 20], ids=["complete records", "records in pieces"])
def test_flips_in_a_record_every_time(memory: int, tmp_path: Path) -> None:
    """A record that comes differently each time is not called damaged: another copy would not help."""
    torch.save({"w": torch.arange(700_000, dtype=torch.float32)}, tmp_path / "model.pt")
    with read_server() as server:
        server.put("b/src/model.pt", (tmp_path / "model.pt").read_bytes())
        manifest = ckptcore.open("s3://b/src/model.pt")
        draw = random.Random(1)
        rule = server.fault("GetObject", action="flip", times=EVER)
        rule.call = lambda: setattr(rule, "at", draw.uniform(0.3, 0.7))
        with pytest.raises(AlteredInTransit) as caught:
            made("s3://b/src/model.pt", tmp_path / "got.safetensors", settings=Settings(memory=memory))
        assert caught.value.exit_code == 29
        assert not (tmp_path / "got.safetensors").exists()
        assert manifest.nbytes == 2_800_000


def test_damage_in_the_store_is_damage(tmp_path: Path) -> None:
    """What is read twice and stays wrong is the store's."""
    with read_server(keeps="crc32") as server:
        url = upload(server, DCP)
        victim = next(n for n in server.objects if n.endswith(".distcp"))
        data = bytearray(server.objects[victim].data)
        data[len(data) // 2] ^= 1
        server.put(victim, bytes(data))
        with pytest.raises(CkptError) as caught:
            made(url, tmp_path / "got.safetensors")
        assert caught.value.exit_code == 1


@pytest.mark.parametrize("conditions", [True, False], ids=["if-match", "ignores if-match"])
def test_an_object_that_is_replaced_while_it_is_read(conditions: bool) -> None:
    with read_server(matches=conditions) as server:
        server.put("b/src/model.bin", bytes(100_000))
        store = open_source_store("s3://b/src")
        store.stamped()
        assert store.read("model.bin", 0, 8) == bytes(8)
        server.put("b/src/model.bin", bytes(99_999) + b"x")
        with pytest.raises(SourceChanged, match="replaced"):
            store.read("model.bin", 90_000, 10_000)


def test_a_source_replaced_between_header_and_data(tmp_path: Path) -> None:
    """Same names, sizes and headers, other elements: the manifest's version is not the one that is there."""
    with read_server() as server:
        url = upload(server, SHARDED)
        manifest = ckptcore.open(url)
        name = manifest.tensors[0].fqn
        for path in [n for n in server.objects if n.endswith(".safetensors")]:
            data = server.objects[path].data
            server.put(path, data[:-1] + bytes([data[-1] ^ 1]))
        forget_pages()  # or they have the elements that belong to the manifest
        with pytest.raises(SourceChanged):
            ckptcore.read(manifest, name)


def test_without_the_right_to_list(tmp_path: Path) -> None:
    """One object is read without a listing; a folder says which right is missing."""
    with read_server() as server:
        server.denied.append("ListObjectsV2")
        file = next(SHARDED.glob("*.safetensors"))
        server.put("b/src/model.safetensors", file.read_bytes())
        assert ckptcore.open("s3://b/src/model.safetensors").tensors
        with pytest.raises(SourceUnreadable, match="AccessDenied"):
            ckptcore.open("s3://b/src")
        assert server.count("HEAD") <= 2


def test_requests_of_a_conversion(tmp_path: Path) -> None:
    """One listing at a time, one request for each block, none for each chunk, nothing fetched twice."""
    with read_server(keeps="crc64nvme") as server:
        url = upload(server, DCP)
        made(url, tmp_path / "got.safetensors")
        assert server.count("HEAD") == 0
        assert server.count("ListObjectsV2") <= 5
        data = [n for n in server.objects if n.endswith(".distcp")]
        assert (
            server.count("GetObject", path=r"\.metadata$") <= 2
        )  # its ETag proves nothing, but its checksum does
        # One for the values that are no tensors, and one for all tensors.
        assert server.count("GetObject", path="distcp$") <= 2 * len(data)


def test_requests_of_large_files_by_plan() -> None:
    """A model of 416 MiB in 8 files: blocks of 16 MiB, and no more than two requests for each file beyond."""
    sizes = {f"__{n}_0.distcp": 52 << 20 for n in range(8)}
    rows = [(f, a, min(a + (1 << 20), n)) for a in range(0, 52 << 20, 1 << 20) for f, n in sizes.items()]
    paths = tuple(sizes)
    when = np.arange(len(rows), dtype=float)
    reads = ExpectedReads(
        paths,
        np.array([paths.index(f) for f, _, _ in rows]),
        np.array([a for _, a, _ in rows]),
        np.array([b for _, _, b in rows]),
        when,
        when + 1,
    )
    table = plan_blocks(reads, 512 << 20)  # half of the default budget
    assert len(table) <= 1.3 * -(-(416 << 20) // (16 << 20)) + 2 * len(sizes)


def test_errors_name_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEADLINE_VARIABLE, "0")
    with read_server() as server:
        server.put("b/src/model.bin", bytes(10))
        server.fault("GetObject", times=9)
        store = open_source_store("s3://me:hidden-password@b/src")
        with pytest.raises(CkptError) as caught:
            store.read("model.bin", 0, 8)
        text = repr(caught.value.as_dict())
        assert "hidden-password" not in text
        assert "test-secret" not in text
