"""Shards of torch's HuggingFaceStorageWriter: exact when whole, never silently smaller when not."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import warm
from paths import JOBS
from samples import FIXTURES, Tensors, differences, expected_tensors, read_safetensors, tensors_of

if TYPE_CHECKING:
    from driver import Cli, Outcome

JOB = JOBS / "hf_job.py"
SHARDED = FIXTURES / "torch" / "hf_sharded_4r"
BOTH = FIXTURES / "torch" / "hf_bugs_0d_4r"


def header(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """(tensors, offsets, data) of a shard."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    top = json.loads(raw[8 : 8 + length])
    metadata = top.pop("__metadata__", {})
    return top, json.loads(metadata.get("DCP_SHARDING_INFO", "{}")), raw[8 + length :]


def put(path: Path, tensors: dict[str, Any], info: Any, data: bytes, **metadata: str) -> None:
    """Write a shard; info: offsets, or a text as it is."""
    text = info if isinstance(info, str) else json.dumps(info)
    own = {"DCP_SHARDING_INFO": text, "DCP_VERSION": "1.0", "format": "pt"} | metadata
    body = json.dumps({"__metadata__": own, **tensors}).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + data)


def shard(rank: int, model: int = 1, of: int = 1) -> str:
    return f"shard-{rank:05d}-model-{model:05d}-of-{of:05d}.safetensors"


def write(folder: Path, rows: dict[str, dict[str, tuple[list[int], list[int]]]]) -> Path:
    """A folder of shards: file -> tensor -> (offset, shape); float32 values that encode their place."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in rows.items():
        entries, info, data = {}, {}, b""
        for fqn, (offset, shape) in tensors.items():
            count = 1
            for n in shape:
                count *= n
            piece = b"".join((len(data) + i).to_bytes(4, "little") for i in range(count))
            place = [len(data), len(data) + len(piece)]
            entries[fqn] = {"dtype": "F32", "shape": shape, "data_offsets": place}
            info[fqn] = {"saved_offsets": offset}
            data += piece
        put(folder / name, entries, info, data)
    return folder


def rows(parts: list[int], *, at: int = 0) -> list[tuple[list[int], list[int]]]:
    """(offset, shape) of parts that follow each other along the first dim."""
    found = []
    for n in parts:
        found.append(([at, 0], [n, 3]))
        at += n
    return found


def codes(done: Outcome, severity: str = "error") -> set[str]:
    return {f["code"] for f in done.json["findings"] if f["severity"] == severity}


def validated(cli: Cli, folder: Path, *flags: str) -> Outcome:
    return cli("validate", folder, "--level", "bytes", "--output", "json", *flags)


def shapes(cli: Cli, folder: Path) -> dict[str, list[int]]:
    return {t["fqn"]: t["shape"] for t in cli("inspect", folder, "--output", "json").json["tensors"]}


# --- whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["ckpt", "ckpt/sharded"])
def test_the_shards_are_read(folder: str, cli: Cli, tmp_path: Path) -> None:
    """Also below consolidated files in which torch has lost the values of 0-d tensors."""
    done = cli("consolidate", BOTH / folder, tmp_path / "out", "--output", "json")
    assert done.code == 0, done
    truth = expected_tensors(BOTH / "expected.safetensors")
    found = read_safetensors(tmp_path / "out")
    assert sorted(found) == sorted(truth)
    assert not differences(truth, found)


def test_consolidated_files_that_differ_are_findings(cli: Cli) -> None:
    done = validated(cli, BOTH / "ckpt")
    differing = {f["fqn"] for f in done.json["findings"] if f["code"] == "consolidated-differs"}
    assert (done.code, differing) == (0, {"zero_d", "plain0d"})
    assert not codes(validated(cli, BOTH / "ckpt" / "sharded"), "warning")


@pytest.mark.parametrize(
    "ranks", [4, pytest.param(3, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak)]
)
def test_files_written_by_torch_today(
    ranks: int, cli: Cli, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In any shape, bit for bit."""
    given = request.config.getoption("--seed")
    seed = int(given) if given is not None else random.SystemRandom().randrange(1 << 30)
    print(f"fresh shards of --seed {seed}, {ranks} ranks")
    job = subprocess.run(
        [*warm.python(), str(JOB), str(seed), str(tmp_path), "--ranks", str(ranks), "--cases", "5"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    for job_json in sorted(tmp_path.glob("*/job.json")):
        about = f"--seed {seed}: {job_json.parent.name} {job_json.read_text()[:2000]}"
        source = job_json.parent / "ckpt"
        checked = validated(cli, source)
        # Where every tensor happens to be cut evenly, nothing proves that the last rank is there; a rank that
        # holds nothing of a model file writes none, which looks like one whose file was lost.
        written = len(list(source.glob("shard-*.safetensors")))
        expected = ranks * json.loads(job_json.read_text())["files"]
        doubtful = {"unproven-shape", *(["missing-file"] if written < expected else [])}
        errors = codes(checked, "error")
        flags = ["--allow-incomplete"] if errors and errors <= doubtful else []
        assert flags or checked.code == 0, f"{about}\n{checked}"
        done = cli("consolidate", source, job_json.parent / "out", "--output", "json", *flags)
        assert done.code == 0, f"{about}\n{done}"
        truth = tensors_of(load(job_json.parent / "truth.pt"))
        found = read_safetensors(job_json.parent / "out")
        assert sorted(found) == sorted(truth), about
        assert not differences(truth, found), about


def load(path: Path) -> Any:
    import torch

    return torch.load(path)


# --- what is proven, what is not -------------------------------------------------------------


def test_an_uneven_tensor_proves_the_even_ones(cli: Cli, tmp_path: Path) -> None:
    """26, 26, 26, 25 rows are torch.chunk's for four ranks and for no other number."""
    uneven, even = rows([26, 26, 26, 25]), rows([4, 4, 4, 4])
    uneven_and_even = write(tmp_path / "a", {shard(r + 1): {"u": uneven[r], "e": even[r]} for r in range(4)})
    assert not codes(validated(cli, uneven_and_even), "warning")
    bare = write(tmp_path / "b", {shard(r + 1): {"e": even[r]} for r in range(4)})
    assert codes(validated(cli, bare), "error") == {"unproven-shape"}


def test_unproven_shards_are_read_on_request_only(cli: Cli, tmp_path: Path) -> None:
    """Without its last rank an even save looks like an even save of fewer ranks."""
    even = rows([4, 4, 4, 4])
    folder = write(tmp_path / "a", {shard(r + 1): {"e": even[r]} for r in range(3)})
    done = cli("consolidate", folder, tmp_path / "out", "--output", "json")
    assert (done.code, done.json["error"]["code"]) == (26, "unproven")
    assert done.json["error"]["findings"][0]["code"] == "unproven-shape"
    assert not (tmp_path / "out").exists()
    done = cli("consolidate", folder, tmp_path / "out", "--allow-incomplete", "--output", "json")
    assert (done.code, [w["code"] for w in done.json["warnings"]]) == (0, ["missing-part"])
    assert shapes(cli, folder) == {"e": [12, 3]}


def test_an_empty_part_ends_a_tensor(cli: Cli, tmp_path: Path) -> None:
    ends = [*rows([1, 1, 1]), ([3, 0], [0, 3])]
    folder = write(tmp_path / "a", {shard(r + 1): {"n": ends[r]} for r in range(4)})
    assert not codes(validated(cli, folder), "warning")
    (folder / shard(3)).unlink()
    assert "hole" in codes(validated(cli, folder))


def test_consolidated_files_prove_shapes(cli: Cli, tmp_path: Path) -> None:
    """Consolidated files give the size of a tensor; a missing last shard is then a hole."""
    even = rows([4, 4])
    root = tmp_path / "a"
    write(root / "sharded", {shard(r + 1): {"e": even[r]} for r in range(2)})
    from safetensors.numpy import save_file

    numpy = pytest.importorskip("numpy")
    save_file({"e": numpy.zeros((8, 3), numpy.float32)}, root / "model-00001-of-00001.safetensors")
    assert not codes(validated(cli, root), "warning")
    (root / "sharded" / shard(2)).unlink()
    done = validated(cli, root)
    assert (done.code, codes(done) >= {"hole"}) == (1, True), done
    save_file({"other": numpy.zeros(3)}, root / "model-00001-of-00001.safetensors")
    assert "hole" in codes(validated(cli, root))


def test_empty_and_replicated_tensors(cli: Cli, tmp_path: Path) -> None:
    folder = write(
        tmp_path / "a",
        {
            shard(1): {"e": ([0, 0], [0, 3]), "u": ([0, 0], [2, 3]), "scalar": ([], [])},
            shard(2): {"u": ([2, 0], [1, 3]), "r": ([0, 0], [5, 3])},
        },
    )
    assert validated(cli, folder).code == 0
    assert shapes(cli, folder) == {"e": [0, 3], "u": [3, 3], "scalar": [], "r": [5, 3]}


# --- damage ----------------------------------------------------------------------------------

Damage = Callable[[Path], None]


def gone(rank: int) -> Damage:
    return lambda folder: (folder / shard(rank)).unlink()


def edited(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Damage:
    """Change (tensors, offsets) of the second shard; a returned value replaces the offsets."""

    def damage(folder: Path) -> None:
        tensors, info, data = header(folder / shard(2))
        given = change(tensors, info)
        put(folder / shard(2), tensors, info if given is None else given, data)

    return damage


def moved(fqn: str, offset: list[int]) -> Damage:
    return edited(lambda tensors, info: info[fqn].update(saved_offsets=offset))


def stale(folder: Path) -> None:
    """Two more ranks of an older save of other parts."""
    old = rows([18] * 6)
    write(folder, {shard(r + 1): {"model.embed_tokens.weight": old[r]} for r in (4, 5)})
    for rank in (5, 6):
        path = folder / shard(rank)
        tensors, info, _ = header(path)
        entry = tensors["model.embed_tokens.weight"]
        entry |= {"dtype": "BF16", "shape": [18, 16], "data_offsets": [0, 18 * 32]}
        put(path, tensors, info, bytes(18 * 32))


def other_count(folder: Path) -> None:
    shutil.copy(folder / shard(1), folder / shard(1, 1, 3))


def other_dtype(folder: Path) -> None:
    edited(lambda tensors, info: tensors["small"].update(dtype="I32"))(folder)


def a_zip_in_front(folder: Path) -> None:
    path = folder / shard(1)
    path.write_bytes(b"PK\x03\x04" + bytes(600) + path.read_bytes())


def text(name: str) -> Damage:
    return edited(lambda tensors, info: name)


BROKEN: dict[str, tuple[Damage, set[str]]] = {
    "first gone": (gone(1), {"hole"}),
    "middle gone": (gone(2), {"hole"}),
    "last gone": (gone(4), {"hole"}),  # a tensor that is cut in two dims shows it
    "stale": (stale, {"overlap"}),
    "other count": (other_count, {"mixed-saves"}),
    "other dtype": (other_dtype, {"mixed-saves"}),
    "a zip in front": (a_zip_in_front, {"malformed-metadata"}),
    "moved over": (moved("model.norm.weight", [3]), {"overlap"}),
    "moved away": (moved("model.norm.weight", [5]), {"hole"}),
    "moved far": (moved("model.norm.weight", [1 << 49]), {"hole"}),
    "moved to no place": (moved("model.norm.weight", [1 << 60]), {"malformed-metadata"}),
    "moved below": (moved("model.norm.weight", [-1]), {"malformed-metadata"}),
    "moved in two dims": (moved("model.norm.weight", [4, 0]), {"malformed-metadata"}),
    "offset no number": (moved("small", [True]), {"malformed-metadata"}),
    "no JSON": (text("{"), {"malformed-metadata"}),
    "no object": (text("[]"), {"malformed-metadata"}),
    "deep": (text("[" * 100_000), {"malformed-metadata"}),
    "twice": (
        text('{"small": {"saved_offsets": [1]}, "small": {"saved_offsets": [0]}}'),
        {"malformed-metadata"},
    ),
    "no offsets of one": (
        edited(lambda tensors, info: {k: v for k, v in info.items() if k != "small"}),
        {"malformed-metadata"},
    ),
    "offsets of none": (
        edited(lambda tensors, info: info | {"more": {"saved_offsets": [0]}}),
        {"malformed-metadata"},
    ),
    "cut": (
        lambda folder: (folder / shard(3)).write_bytes((folder / shard(3)).read_bytes()[:-1]),
        {"malformed-metadata"},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_damage_is_found(name: str, cli: Cli, tmp_path: Path) -> None:
    damage, expected = BROKEN[name]
    folder = tmp_path / "ckpt"
    shutil.copytree(SHARDED / "ckpt", folder)
    damage(folder)
    done = validated(cli, folder)
    assert done.code == 1, done
    assert codes(done) & expected, done
    refused = cli("consolidate", folder, tmp_path / "out", "--output", "json")
    assert (refused.code, (tmp_path / "out").exists()) == (1, False), refused
    assert refused.json["error"]["hint"]


def test_a_missing_file_of_a_rank(cli: Cli, tmp_path: Path) -> None:
    """In two model files: only the first shows that the last rank's part of the second is missing."""
    even = rows([4, 4, 4, 4])
    files = {shard(r + 1, m, 2): {f"m{m}": even[r]} for r in range(4) for m in (1, 2)}
    folder = write(tmp_path / "a", files)
    assert codes(validated(cli, folder), "error") == {"unproven-shape"}
    assert validated(cli, folder, "--allow-incomplete").code == 0
    (folder / shard(4, 2, 2)).unlink()
    done = validated(cli, folder)
    assert (done.code, codes(done)) == (1, {"missing-file", "unproven-shape"}), done
    assert validated(cli, folder, "--allow-incomplete").code == 0
    for rank in (1, 2, 3):
        (folder / shard(rank, 2, 2)).unlink()
    assert codes(validated(cli, folder)) == {"missing-file", "unproven-shape"}


def test_one_shard_alone_is_refused(cli: Cli) -> None:
    done = cli("inspect", SHARDED / "ckpt" / shard(2), "--output", "json")
    assert done.code == 5
    assert "folder" in done.json["error"]["hint"]


def test_replicas_that_differ(cli: Cli, tmp_path: Path) -> None:
    """torch writes a replicated tensor once: two of them come from two saves, and must be equal."""
    folder = write(tmp_path / "a", {shard(r): {"w": ([0, 0], [2, 3])} for r in (1, 2)})
    assert validated(cli, folder).code == 0
    path = folder / shard(2)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    assert "replica-mismatch" in codes(validated(cli, folder))
    done = cli("consolidate", folder, tmp_path / "out", "--output", "json")
    assert (done.code, (tmp_path / "out").exists()) == (1, False)


def test_missing_numbers_are_findings(cli: Cli, tmp_path: Path) -> None:
    """A rank without elements writes no file: a gap is a warning, and removes the proof."""
    folder = tmp_path / "ckpt"
    shutil.copytree(SHARDED / "ckpt", folder)
    (folder / shard(4)).rename(folder / shard(999_999_999))
    done = validated(cli, folder)
    assert (codes(done, "error"), codes(done, "warning") >= {"missing-part"}) == ({"unproven-shape"}, True), (
        done
    )
    for path in folder.glob("*"):
        path.rename(folder / path.name.replace("of-00001", "of-999999999"))
    assert "missing-file" in codes(validated(cli, folder))


@pytest.mark.parametrize("number", [1, 3])
def test_a_model_file_that_neither_copy_has_is_missing(number: int, cli: Cli, tmp_path: Path) -> None:
    """The consolidated files prove nothing where one of their own numbers is missing."""
    folder = Path(shutil.copytree(BOTH / "ckpt", tmp_path / "ckpt"))
    for path in folder.rglob(f"*model-{number:05d}-of-00003.safetensors"):
        path.unlink()
    assert codes(validated(cli, folder)) == {"missing-file"}


def test_stray_files_are_findings(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(SHARDED / "ckpt", folder)
    shutil.copy(SHARDED / "expected.safetensors", folder / "other.safetensors")
    done = validated(cli, folder)
    assert (done.code, codes(done, "warning")) == (0, {"stray-file"})


def test_consolidated_files_that_cannot_be_read(cli: Cli, tmp_path: Path) -> None:
    """torch's consolidation of integers stops halfway: the shards are complete."""
    root = tmp_path / "ckpt"
    shutil.copytree(SHARDED / "ckpt", root / "sharded")
    (root / "model-00001-of-00001.safetensors").write_bytes(bytes(100))
    done = cli("consolidate", root, tmp_path / "out", "--output", "json")
    assert done.code == 0, done
    assert codes(validated(cli, root), "warning") == {"consolidated-differs"}
    truth: Tensors = expected_tensors(SHARDED / "expected.safetensors")
    assert not differences(truth, read_safetensors(tmp_path / "out"))


# --- whole files beside shards are copies ------------------------------------------------------


def both(root: Path, parts: list[int], *, offset: int = 0) -> tuple[Path, Path]:
    """(a shard, the consolidated file) of one save of a tensor, in equal parts or not, and a 0-d one."""
    from safetensors.numpy import save_file

    numpy = pytest.importorskip("numpy")
    pieces = rows(parts)
    write(root / "sharded", {shard(r + 1): {"a.w": pieces[r]} for r in range(len(parts))})
    payloads = [header(root / "sharded" / shard(r + 1))[2] for r in range(len(parts))]
    full = numpy.frombuffer(b"".join(payloads), numpy.float32).reshape(sum(parts), 3)
    save_file({"a.w": full}, root / "model-00001-of-00001.safetensors")
    return root / "sharded" / shard(2), root / "model-00001-of-00001.safetensors"


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("side", [0, 1])
def test_a_flipped_bit_in_one_of_two_copies(side: int, cli: Cli, tmp_path: Path) -> None:
    """In a shard or in the consolidated file: no evidence favours either, and neither passes."""
    files = both(tmp_path / "a", [5, 4])
    assert validated(cli, tmp_path / "a").code == 0
    assert cli("consolidate", tmp_path / "a", tmp_path / "whole").code == 0
    flip(files[side], -8)  # the second element from the end
    done = validated(cli, tmp_path / "a")
    assert (done.code, codes(done)) == (1, {"replica-mismatch"}), done
    [message] = [f["message"] for f in done.json["findings"] if f["code"] == "replica-mismatch"]
    assert all(part in message for part in ("sharded/" + shard(2), files[1].name, " 1 of ", "[8, 1]")), (
        message
    )
    assert validated(cli, tmp_path / "a").json["findings"] == done.json["findings"]
    assert cli("validate", tmp_path / "a", "--output", "json").code == 0  # no byte is read at level coverage
    for verb in (["consolidate"], ["export"], ["reshard", "--to", "dcp", "--mesh", "fsdp=2"]):
        args = [verb[0], tmp_path / "a", tmp_path / "out", *verb[1:], "--output", "json"]
        refused = cli(*args)
        assert (refused.code, (tmp_path / "out").exists()) == (1, False), refused
        assert refused.json["error"]["findings"][0]["code"] == "replica-mismatch"
        assert all(part in refused.json["error"]["message"] for part in (shard(2), files[1].name, "[8, 1]"))
    assert cli("consolidate", tmp_path / "a", tmp_path / "out", "--no-verify").code == 0
    shutil.move(files[1], tmp_path)  # as the hint says
    assert cli("consolidate", tmp_path / "a", tmp_path / "again", "--allow-incomplete").code == 0


@pytest.mark.parametrize("memory", ["1MiB", "64MiB"])
def test_copies_are_compared_in_every_cut(memory: str, cli: Cli, tmp_path: Path) -> None:
    """Parts along the second dim, larger than the budget's tiles; every place of a flip is found."""
    numpy = pytest.importorskip("numpy")
    from safetensors.numpy import save_file

    rng = numpy.random.default_rng(7)
    full = rng.integers(0, 1 << 16, (700, 900), numpy.uint16)
    root = tmp_path / "a"
    root.mkdir()
    for rank, (a, b) in enumerate([(0, 400), (400, 801), (801, 900)]):
        piece = numpy.ascontiguousarray(full[:, a:b])
        entry = {"dtype": "U16", "shape": list(piece.shape), "data_offsets": [0, piece.nbytes]}
        (root / "sharded").mkdir(exist_ok=True)
        put(
            root / "sharded" / shard(rank + 1),
            {"w": entry},
            {"w": {"saved_offsets": [0, a]}},
            piece.tobytes(),
        )
    path = root / "model-00001-of-00001.safetensors"
    for place in (None, (0, 0), (350, 799), (699, 899)):
        changed = full.copy()
        if place:
            changed[place] ^= 256
        save_file({"w": changed}, path)
        done = validated(cli, root)
        refused = cli(
            "consolidate",
            root,
            tmp_path / "out",
            "--overwrite",
            "--memory",
            memory,
            "--workers",
            2,
            "--output",
            "json",
        )
        if place is None:
            assert (done.code, refused.code) == (0, 0), (done, refused)
            continue
        [message] = [f["message"] for f in done.json["findings"] if f["code"] == "replica-mismatch"]
        assert str(list(place)) in message
        assert refused.code == 1
        assert str(list(place)) in refused.json["error"]["message"]


def test_copies_do_not_change_the_identity_of_a_checkpoint(tmp_path: Path) -> None:
    """Digests, stamps and files are those of the shards."""
    import ckptcore
    from ckptcore.operations.claims import source_digest

    both(tmp_path / "a", [5, 4])
    found = ckptcore.open(str(tmp_path / "a"))
    assert found.own is not None
    bare = found.without_copies()
    assert (len(found.chunks), len(bare.chunks), len(bare.files)) == (4, 2, 2)
    assert found.digest == bare.digest
    assert source_digest(found) == source_digest(bare)
    assert type(found).load(found.dump()).dump() == found.dump()
    known = ckptcore.open(str(BOTH / "ckpt"))
    assert known.digest == "25f32f5ac1842f0f96feddd7efee1f18c151fe8718dc02705980a3dc2a051747"
