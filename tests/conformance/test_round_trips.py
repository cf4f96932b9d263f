"""Test that a checkpoint that was cut for a mesh, and then for another, is unchanged.

Every sample is written in every format for every mesh, and from there back in its own format for another
mesh. `ckptcore.diff` must find no difference, except for tensors that a plan excludes by a rule, and for
those that `gaps.SAID_OTHERWISE` lists for a format. Samples that cannot be cut are refused as wrong use, with
numbers.
"""

from __future__ import annotations

import random
from pathlib import Path

import gaps
import pytest
from damage_rows import subjects
from damage_sites import Tree
from meshes import MESHES, SETTINGS, WRITERS, Step, Writer, cut, impossible, restated, unlike
from samples import SAMPLES, Sample, seed_of, tree_digest

import ckptcore
from ckptcore.errors import CkptError, UnsupportedDtype, UnsupportedFormat, UsageError

HANDFUL = 24
# What was wrong once: (sample, writer, mesh, mesh).
KNOWN = (
    # A stage without parameters has an optimizer of groups alone.
    ("lightning_trainer_mp_sharded_2r", "torch_ranks", "fsdp=2,tp=2,pp=2", "fsdp=3"),
    # The one file of a rank that is alone holds the Trainer's keys.
    ("lightning_trainer_mp_sharded_2r", "torch_ranks", "fsdp=1", "fsdp=2,tp=2,pp=2"),
)
# How a checkpoint of each format comes back; all others as DCP.
BACK = {w.to: name for name, w in WRITERS.items() if name != "dcp-safetensors"}


def sources(samples: list[Sample]) -> list[tuple[Sample, Tree]]:
    """The samples that are read, as their user would name them."""
    own = [s for s in samples if not gaps.lookup(gaps.REFUSED_OTHER, s.name)]
    return [(s, tree) for s in own for tree in subjects(s)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tree" in metafunc.fixturenames:
        found = sources(metafunc.config.stash[SAMPLES])
        metafunc.parametrize("tree", [t for _, t in found], ids=[f"{s.name}-{t.root.name}" for s, t in found])


def test_a_handful(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Random pairs of a sample and a format, for random meshes."""
    rng = random.Random(seed := seed_of(request))
    print(f"--seed {seed}")
    trees = [t for _, t in sources(request.config.stash[SAMPLES])]
    went = 0
    for number in range(HANDFUL):
        tree, name = rng.choice(trees), rng.choice(list(WRITERS))
        went += round_trip(tree, name, rng.choice(MESHES), rng.choice(MESHES), tmp_path / str(number))
    assert went > HANDFUL // 4, f"{went} of {HANDFUL} were written"


@pytest.mark.parametrize("case", KNOWN, ids=lambda c: "-".join(c[:3]))
def test_known(case: tuple[str, str, str, str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sample, name, there, back = case
    (tree,) = [t for s, t in sources(request.config.stash[SAMPLES]) if s.name == sample]
    assert round_trip(tree, name, there, back, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WRITERS)
def test_every_mesh(name: str, tree: Tree, tmp_path: Path) -> None:
    went = [round_trip(tree, name, m, MESHES[-1 - n], tmp_path / m) for n, m in enumerate(MESHES)]
    if True not in went:
        source = ckptcore.open(str(tree.root / (tree.name or "")))
        writer, lacks = WRITERS[name], {t.dtype for t in source.tensors} & {*WRITERS[name].lacks}
        assert writer.own or lacks or (source.blobs and not writer.objects), "not written for any mesh"


def round_trip(tree: Tree, name: str, there: str, back: str, folder: Path) -> bool:
    """Return whether format and mesh are possible; fail if the checkpoint comes back changed."""
    source = tree.root / (tree.name or "")
    writer = WRITERS[name]
    about = f"{source} as {name} for {there}, back for {back}"
    before = tree_digest(source)
    manifest = ckptcore.open(str(source))
    step = tried(source, folder / "there", writer, there, about)
    if isinstance(step, CkptError):
        assert impossible(step, writer, manifest), f"{about}: {step.message}"
        return False
    assert tree_digest(source) == before, about
    home = WRITERS[BACK.get(manifest.format, "dcp")]
    if home.own and not writer.own:  # a checkpoint without what its kind has beside comes back as DCP
        home = WRITERS["dcp"]
    returned = tried(step.folder, folder / "back", home, back, about)
    if isinstance(returned, CkptError):
        assert impossible(returned, home, manifest), f"{about}: {returned.message}"
        returned = cut(step.folder, folder / "back", home, "fsdp=3")  # for which every checkpoint can be cut
    found = ckptcore.diff(manifest, str(returned.folder), settings=SETTINGS)
    gone = step.dropped | returned.dropped
    wrong = [row for row in unlike(found, gone) if not restated(row, writer.to, home.to)]
    assert not wrong, f"{about}: {len(wrong)}: {wrong[:5]}"
    return True


def tried(source: Path, target: Path, writer: Writer, mesh: str, about: str) -> Step | CkptError:
    """Return the output, or the error."""
    try:
        return cut(source, target, writer, mesh)
    except (UsageError, UnsupportedDtype, UnsupportedFormat) as error:
        return error
    except BaseException as error:
        error.add_note(about)
        raise
