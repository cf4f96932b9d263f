"""Test that no damaged checkpoint is silently converted.

Every row of the damage table is applied to every sample that it fits. After each, `validate` and
`consolidate` must refuse with a stable code and a documented exit code, or give the right result: the bytes
of the undamaged sample. In every case there is no traceback, nothing is partly published, no code from the
checkpoint is executed, the source is unchanged, and time and memory are bounded.

`make test` applies every row to one of a few small samples with every kind of item; a third of the rows that
change data to a twentieth of the others instead, each row to other ones. The rest of the grid is a soak.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import damage
import gaps
import pytest
import soaks
from damage_files import swappable
from damaging import Damage, Folder, NotApplicable, flip, layout
from driver import Cli
from outcomes import LIMITS, codes_of, well_behaved
from samples import FIXTURES, SAMPLES, Sample, differences, flatten, read_torch, tensors_of, tree_digest

# Small samples that together hold every kind of item and of metadata: every damage is done to them.
CORE = frozenset(
    {"dcp_nested_2r", "dcp_safetensors_fmt_2r", "dcp_zstd_2r", "dcp_nocollectives_2r", "dcp_dims_4r"}
)
# Megatron-Core's own layer over DCP; of its releases the one whose metadata torch reads by itself and
# that has no digests of whole files, which notice everything.
MEGATRON = "api_torch_dist_0.16.1_sephint"
# Rows whose outcome does not depend on the tensors around them.
NARROW = re.compile(r"attack-|absurd-|flip-metadata-|view-|numbers-|zip-|item-is-|metadata-is-")
# (one of CORE?, narrow?) -> of how many samples that a row fits `make test` damages one.
STEPS = {(True, False): 6, (True, True): 8, (False, False): 20}


@dataclass(frozen=True, slots=True)
class Truth:
    """The result of an undamaged sample."""

    raw: bytes
    file: Path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" not in metafunc.fixturenames:
        return
    found: list[tuple[Path, Sample, Damage, str]] = []
    for victim in metafunc.config.stash[SAMPLES]:
        if victim.megatron and victim.name != MEGATRON:
            continue
        for folder in victim.dcp_folders:
            if gaps.lookup(gaps.REFUSED_DCP, victim.name, folder.name):
                continue
            name = f"{victim.name}/{folder.name}" if len(victim.dcp_folders) > 1 else victim.name
            found += [(folder, victim, row, f"{name}-{row.name}") for row in damage.damages(folder)]
    short = chosen([(victim, folder, row) for folder, victim, row, _ in found])
    cases = []
    for number, (folder, victim, row, name) in enumerate(found):
        marks = [pytest.mark.xdist_group(victim.name)]
        if number not in short:
            marks.append(pytest.mark.soak)
        cases.append(pytest.param(folder, victim, row, id=name, marks=marks))
    metafunc.parametrize(("folder", "victim", "row"), soaks.rows_to_collect(metafunc.config, cases))


def chosen(cases: list[tuple[Sample, Path, Damage]]) -> set[int]:
    """The numbers of the cases that `make test` does: of what one row does to several samples that are
    alike for it one of `STEPS`, another one for each row, and always one. A row that fits samples of `CORE`
    and others is done to the others when its name says so, for every third name."""
    alike: dict[tuple[str, bool, bool], list[int]] = {}
    short: dict[str, dict[bool, list[int]]] = {}
    for number, (victim, folder, row) in enumerate(cases):
        core, narrow = victim.name in CORE, bool(NARROW.match(row.name))
        if core or not (narrow or is_large(folder)):
            alike.setdefault((row.name, core, narrow), []).append(number)
    for (row_name, core, narrow), numbers in alike.items():
        step = min(STEPS[core, narrow], len(numbers))
        short.setdefault(row_name, {})[core] = numbers[crc32(row_name.encode()) % step :: step]
    return {
        number
        for row_name, of in short.items()
        for number in of.get(crc32(row_name.encode()) // 100 % 3 != 0, next(iter(of.values())))
    }


def is_large(folder: Path) -> bool:
    return sum(f.stat().st_size for f in folder.glob("*.distcp")) > 1_000_000


@pytest.fixture(scope="session")
def truths(cli: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Truth]:
    return {}


@pytest.fixture
def truth(
    folder: Path, truths: dict[Path, Truth], cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> Truth:
    """The undamaged sample's result; test_read proves that it is right."""
    if folder not in truths:
        file = tmp_path_factory.mktemp("truth") / "good.pt"
        done = cli("consolidate", folder, file, "--to", "torch_save")
        assert done.code == 0, done
        truths[folder] = Truth(file.read_bytes(), file)
    return truths[folder]


def test_damage(
    folder: Path,
    victim: Sample,
    row: Damage,
    truth: Truth,
    cli: Cli,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    source = tmp_path / "ckpt"
    shutil.copytree(folder, source)
    copy = Folder(source, tmp_path / "sentinel", other_folders(request.config, folder))
    excuse = excused(copy, row)
    try:
        row.make(copy)
    except NotApplicable as why:
        pytest.skip(f"not applicable: {why}")
    assert not copy.sentinel.exists(), "the damage itself ran the attack"
    before = snapshot(source)

    checked = cli("validate", source, "--level", "bytes", "--output", "json", **LIMITS)
    dst = tmp_path / "out" / "model.pt"
    dst.parent.mkdir()
    done = cli(
        "consolidate",
        source,
        dst,
        "--to",
        "torch_save",
        "--workers",
        "1",
        "--memory",
        "256MiB",
        "--output",
        "json",
        **LIMITS,
    )

    assert not copy.sentinel.exists(), "code from the checkpoint was executed"
    assert snapshot(source) == before, "the source was modified"
    for outcome in (checked, done):
        well_behaved(outcome)
    if done.code == 0:
        wrong = wrong_with(dst, truth, objects=not row.opaque)
        if row.opaque:  # values in an object that is missing as a whole, and is reported
            gone = [f["fqn"] for f in checked.json["findings"] if f["code"] == "refused-global"]
            wrong = [w for w in wrong if not any(w.startswith(f"{g}.") for g in gone)]
        if excuse and excuse.renames:
            wrong = wrong and other_values(dst, truth)
        elif excuse:
            assert wrong or row.harmless, f"harmless now: take {row.name} off UNDETECTABLE"
            return
        assert not wrong, f"a silent wrong result: {wrong[:5]}\n{done}\n{checked}"
        assert row.harmless or row.opaque, f"accepted: {done}"
    else:
        assert not dst.exists(), "published although it failed"
        assert not [p for p in dst.parent.iterdir() if not p.name.startswith(".")]
        assert checked.code != 0, f"refused, yet validated\n{done}\n{checked}"
        assert not excuse or row.harmless, f"refused now: take {row.name} off UNDETECTABLE\n{done}"
    codes = codes_of(checked) | codes_of(done)
    noticed = done.code != 0 or checked.code != 0 or row.opaque
    assert not (noticed and row.codes) or codes & row.codes, (
        f"said {sorted(codes)}, not one of {sorted(row.codes)}\n{checked}\n{done}"
    )


def other_folders(config: pytest.Config, folder: Path) -> tuple[Path, ...]:
    """Good checkpoints to take foreign files from; small ones first."""
    found = [s.dcp_folders for s in config.stash[SAMPLES] if s.name in CORE | {"dcp_stale_4r"}]
    return tuple(f[0] for f in found if f[0] != folder)


@dataclass(frozen=True, slots=True)
class Excuse:
    """Why a damage cannot be detected. renames: names may differ, values may not."""

    why: str
    renames: bool = False


def excused(copy: Folder, row: Damage) -> Excuse | None:
    """Return the excuse of this row for this folder, which is read before the damage; or None."""
    entry = next((b for b in gaps.blind(row.name) if b.when in CONDITIONS), None)
    if entry is None or not CONDITIONS[entry.when](copy):
        return None
    return Excuse(entry.why, entry.when == "names-only")


def equal_layout(copy: Folder) -> bool:
    one, two = swappable(copy)
    return layout(copy, one) == layout(copy, two)


def between_others(copy: Folder) -> bool:
    """Whether the biggest tensor is not all there is, and ends no file that holds others too.

    Megatron-Core stores every rank's plan of its save, which has the name once more.
    """
    if b"all_local_plans" in copy.meta.read_bytes():
        return False
    gone = copy.tensors()[0].key.fqn
    by_file: dict[Path, list[str]] = {}
    for place in copy.places():
        by_file.setdefault(place.file, []).append(place.key.fqn)
    shared = [names for names in by_file.values() if set(names) != {gone}]
    return bool(shared) and all(names[-1] != gone for names in shared)


CONDITIONS: dict[str, Callable[[Folder], bool]] = {
    "no-replicas": lambda copy: len(copy.metas) == 1,
    "between-others": between_others,
    "names-only": lambda copy: True,
    "equal-layout": equal_layout,
    "zip": lambda copy: copy.kind(copy.tensors()[0]) in {"zip", "zstd"},
    "no-crc": lambda copy: copy.kind(copy.tensors()[0]) == "safetensors",
}


def snapshot(source: Path) -> str:
    """The source as it is; pipes and endless files are compared by what they are."""
    endless = [p for p in source.iterdir() if p.is_fifo() or (p.is_symlink() and not p.is_file())]
    if not endless:
        return tree_digest(source)
    return repr(sorted((p.name, p.lstat().st_mode, p.lstat().st_size) for p in source.iterdir()))


def wrong_with(dst: Path, truth: Truth, *, objects: bool = True) -> list[str]:
    """What differs from the undamaged sample, tensor by tensor and object by object."""
    if dst.read_bytes() == truth.raw:
        return []
    ours, theirs = read_torch(dst), read_torch(truth.file)
    found, wanted = tensors_of(ours), tensors_of(theirs)
    out = [f"{name}: extra" for name in found.keys() - wanted.keys()]
    out += differences(wanted, found)
    if objects:
        mine, good = plain(ours), plain(theirs)
        out += [f"{k}: object differs" for k in good if mine.get(k) != good[k]]
    return out


def other_values(dst: Path, truth: Truth) -> list[str]:
    """What differs when names do not count.

    Nor does how often a value is there: of a replica that rank-local metadata calls something else,
    both names are kept.
    """
    ours, theirs = read_torch(dst), read_torch(truth.file)
    mine, good = set(tensors_of(ours).values()), set(tensors_of(theirs).values())
    out = [] if mine == good else ["the values of the tensors differ"]
    if set(plain(ours).values()) != set(plain(theirs).values()):
        out.append("the objects differ")
    return out


def plain(tree: dict[str, Any]) -> dict[str, str]:
    """The values that are not tensors, as text."""
    import torch

    leaves = flatten(tree, descend_tuples=False)
    return {k: repr(v) for k, v in leaves.items() if not isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("name", sorted(CORE))
@pytest.mark.parametrize("flips", [6, pytest.param(1500, marks=pytest.mark.soak)])
def test_flipped_anywhere(
    name: str, flips: int, cli: Cli, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """One random bit of one random file, again and again, half of them in the metadata."""
    folder = FIXTURES / "torch" / name / "ckpt"
    good = tmp_path / "good.pt"
    assert cli("consolidate", folder, good, "--to", "torch_save").code == 0
    truth = Truth(good.read_bytes(), good)
    given = request.config.getoption("--seed")
    seed = given if given is not None else random.SystemRandom().randrange(1 << 30)
    rng = random.Random(seed)
    print(f"--seed {seed}")
    data = [f for f in sorted(folder.iterdir()) if f.suffix == ".distcp" and f.stat().st_size]
    metas = [f for f in sorted(folder.iterdir()) if f.suffix != ".distcp"]
    for number in range(flips):
        file = rng.choice(metas if number % 2 else data)
        at, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        source = tmp_path / "ckpt"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(folder, source)
        flip(source / file.name, at, bit)
        about = f"--seed {seed}: bit {bit} of byte {at} of {name}/{file.name}"
        checked = cli("validate", source, "--level", "bytes", "--output", "json", **LIMITS)
        dst = tmp_path / "out" / "model.pt"
        done = cli("consolidate", source, dst, "--workers", "1", "--output", "json", **LIMITS)
        for outcome in (checked, done):
            well_behaved(outcome)
        if done.code:
            assert checked.code, f"{about}: refused, yet validated\n{done}\n{checked}"
            assert not dst.exists(), about
            continue
        wrong = wrong_with(dst, truth)
        if wrong and file in metas:
            wrong = other_values(dst, truth)  # as UNDETECTABLE says: a name is only a name
        dst.unlink()
        if wrong and file in data and "safetensors" in damage.facts(folder):
            assert "no-checksum" in codes_of(checked), about
            continue
        assert not wrong, f"{about}: silent: {wrong[:3]}\n{done}\n{checked}"


def test_table_is_complete() -> None:
    """Every excuse names a row of a table, and every row has a name of its own."""
    rows = {b for name in [*damage.TABLE, *damage.EVERYWHERE] for b in gaps.blind(name)}
    assert not set(gaps.UNDETECTABLE) - rows
    assert len(damage.EVERYWHERE) > 70
    assert len(damage.TABLE) > 200
