"""Test hostile values for every option of every verb: an answer in time, a documented code, and no damage.

Each call is a process of its own that may write only below the test's folder and has no network (`confined`).
It runs in a folder of real files: complete and truncated checkpoints, pipes, loops, a catalog. The short form
gives some parameters of every verb one hostile value each. The long forms give one to each parameter, many
times, and then many at once, to several verbs in a row.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import commandline as line
import confined
import pytest
import torch
from commandline import BOX, SECRET, Parameter, Verb, argv_of, built, fitting, guarded, hostile, verbs
from confined import ESCAPED
from driver import REPOSITORY, Cli, Outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckptcore.catalog import aliases, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.cli.main import run
from ckptcore.errors import error_classes

SECONDS = 10.0
CODES = {0} | {error.exit_code for error in error_classes()} - {70, 130}
CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_Picture = Mapping[str, tuple[int, bytes]]


@dataclass(frozen=True)
class World:
    """A test's folder. box: where commands run; the files that they may name are below it. fresh: its copy.

    canaries: files of another user, beside and above the box.
    """

    root: Path
    box: Path
    fresh: Path
    canaries: Path
    before: _Picture
    mine: _Picture

    def clean(self) -> None:
        """Restore the box."""
        if self.box.exists():
            shutil.rmtree(self.box)
        subprocess.run(["cp", "-a", str(self.fresh), str(self.box)], check=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world").resolve()
    box, canaries = root / "a" / "b" / "c" / "box", root / "canaries"
    for folder in (box, canaries / ".ssh", root / "temporary", root / "home"):
        folder.mkdir(parents=True)
    (canaries / ".ssh" / "id_ed25519").write_text("key")
    (canaries / "notes.txt").write_text("notes")
    for above in (root, root / "a", root / "a" / "b", root / "a" / "b" / "c"):
        (above / "keep.txt").write_text("keep")
    fill(box)
    fresh = root / "a" / "b" / "fresh"
    os.rename(box, fresh)
    made = World(root, box, fresh, canaries, {}, {})
    made.clean()
    return World(root, box, fresh, canaries, surroundings(made), picture(box))


def fill(box: Path) -> None:
    """Put real things into the folder that commands run in."""
    import torch.distributed.checkpoint as dcp

    tensors = {"w": torch.arange(64.0), "v": torch.ones(4, 4, dtype=torch.bfloat16)}
    for folder in ("whole", "torn", "empty", "holds-pipe", "runs/step-1", "odd\x1b[31m"):
        (box / folder).mkdir(parents=True)
    for folder in ("whole", "torn", "runs/step-1", "odd\x1b[31m"):
        save_file(tensors, box / folder / "model.safetensors")
    os.truncate(box / "torn" / "model.safetensors", 300)
    torch.save({**tensors, "step": 7, "note": "\x1b[2J"}, box / "one.pt")
    (box / "torn.pt").write_bytes((box / "one.pt").read_bytes()[:-200])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process saves, on purpose
        dcp.save(dict(tensors), checkpoint_id=box / "dcp", no_dist=True)
    shutil.copytree(box / "dcp", box / "torn-dcp")
    for shard in (box / "torn-dcp").glob("*.distcp"):
        os.truncate(shard, 100)
    (box / "empty.pt").touch()
    (box / "junk.bin").write_bytes(bytes(range(256)) * 8)
    (box / "not-sqlite").write_text("this is no database, and long enough for the header of one " * 3)
    (box / "rules.toml").write_text('[[rule]]\nfqn = "*"\ntp = "shard(0)"\n')
    with (box / "sparse.pt").open("wb") as file:
        file.truncate(1 << 40)
    for pipe in (box / "pipe", box / "holds-pipe" / "model.safetensors"):
        os.mkfifo(pipe)
    (box / "loop").symlink_to("loop")
    (box / "dangling").symlink_to("nothing/there")
    with zipfile.ZipFile(box / "pack.zip", "w") as pack:
        pack.write(box / "whole" / "model.safetensors", "model.safetensors")
    with socket.socket(socket.AF_UNIX) as listening, chdir(box):  # names of sockets are short
        listening.bind("socket")
    assert run(["plan", str(box / "whole"), str(box / "planned"), "--save", str(box / "plan")]) == 0
    with open_catalog(str(box / "catalog.sqlite")) as catalog:
        now = datetime.now(UTC)
        with catalog.writing() as conn:
            roots.add(conn, now, "root", str(box / "runs"), targets=[{"to": "safetensors"}])
        assert run(["catalog", "rebuild", str(box / "whole"), "--catalog", catalog.url]) == 0
        with catalog.writing() as conn:
            aliases.set_alias(conn, now, "best", str(box / "whole"))


def picture(folder: Path) -> _Picture:
    """Everything below a folder: kind and rights, and bytes or target."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in folder.rglob("*"):
        seen = path.lstat()
        data = b""
        if stat.S_ISREG(seen.st_mode):
            data = path.read_bytes() if seen.st_size < 1 << 20 else str(seen.st_size).encode()
        elif stat.S_ISLNK(seen.st_mode):
            data = os.fsencode(path.readlink())
        found[str(path.relative_to(folder))] = (seen.st_mode, data)
    return found


def surroundings(world: World) -> _Picture:
    """Everything in the test's folder except the box, and the files of the user who runs the commands."""
    return {
        name: seen
        for name, seen in picture(world.root).items()
        if not name.startswith(("a/b/c/box", "temporary", "home"))
    }


@pytest.fixture(scope="module")
def attack(world: World, cli: Cli) -> Callable[[Sequence[str]], Outcome]:
    """Return a function that runs a call in the box, and checks the rules of every call."""
    home = {
        "HOME": str(world.root / "home"),
        "TMPDIR": str(world.root / "temporary"),
        "CKPTCORE_CATALOG_URL": str(world.box / "catalog.sqlite"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": "AKIA",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_MAX_ATTEMPTS": "1",
    }

    def call(argv: Sequence[str]) -> Outcome:
        argv = built(argv, world.box, world.root)
        done = cli(*argv, catalog=True, seconds=SECONDS, cwd=world.box, within=world.root, env=home)
        check(done)
        assert surroundings(world) == world.before, f"something else was touched\n{done}"
        return done

    return call


def check(done: Outcome) -> None:
    """Check the rules of every answer."""
    assert done.code != ESCAPED, done
    assert done.code in CODES, done
    for text in (done.stdout, done.stderr):
        assert SECRET not in text, done
        assert "Traceback" not in text, done
        found = CONTROL.search(text)
        assert not found, f"{found!r} in what is written\n{done}"
    outputs = {value for option, value in pairwise(done.argv) if option == "--output"}
    if outputs == {"json"} and "--help" not in done.argv:
        try:  # one document, or one a line of what takes long
            json.loads(done.stdout or "null")
        except ValueError:
            for each in done.stdout.splitlines():
                json.loads(each)


def unharmed(world: World, argv: Sequence[str]) -> None:
    """Check that no file changed or disappeared, except those that the call may replace."""
    if any(word in line.LEGAL for word in argv):
        return
    now = picture(world.box)
    named = [value.rpartition("/")[2] for option, value in pairwise(argv) if option == "--catalog"]
    for name, seen in world.mine.items():
        # A catalog is written to; an empty file is a database without tables.
        if name.startswith("catalog.sqlite") or (name in named and seen[1] == b""):
            continue
        assert now.get(name) == seen, f"{name} was changed or has gone: {argv}"


def of_one_each(pick: random.Random, most: int) -> Iterator[list[str]]:
    """Return, for each verb, calls with one hostile value each for some of its parameters, and valid others.

    most: the number of parameters of one verb.
    """
    for verb in verbs():
        for parameter in pick.sample(verb.parameters, min(most, len(verb.parameters))):
            values: dict[str, Sequence[str]] = {
                p.name: (pick.choice(fitting(p)),) for p in verb.parameters if p.required and not p.flag
            }
            if pick.random() < 0.3 and any(p.name == "output" for p in verb.parameters):
                values["output"] = ("json",)
            values[parameter.name] = (pick.choice(hostile(parameter)),)
            yield argv_of(verb, values)


@pytest.mark.parametrize(
    ("most", "rounds"), [pytest.param(2, 1, id="some"), pytest.param(99, 8, id="all", marks=pytest.mark.soak)]
)
def test_one_hostile_value_for_each_parameter(
    most: int,
    rounds: int,
    world: World,
    attack: Callable[[Sequence[str]], Outcome],
    request: pytest.FixtureRequest,
) -> None:
    seed = request.config.getoption("--seed") or (11 if rounds == 1 else random.randrange(1 << 30))
    print("--seed", seed)
    pick, failed, codes = random.Random(seed), [], set()
    for argv in (argv for _ in range(rounds) for argv in of_one_each(pick, most)):
        try:
            codes.add(attack(argv).code)
            if picture(world.box) != world.mine:
                unharmed(world, argv)
        except line.OutsideTheTest:
            raise
        except AssertionError as error:
            failed.append(f"{str(argv)[:300]}\n{error}"[:1500])
        if picture(world.box) != world.mine:
            world.clean()
    assert not failed, f"{len(failed)} calls:\n" + "\n\n".join(failed[:20])
    assert {0, 2, 8} <= codes, "nothing gets past the parser"


# What such calls have found: a code other than 70, no secret, and an answer in time.
FOUND = (
    *(f"catalog show --catalog {BOX}/{'n' * 256} best", f"catalog list --catalog {'n/' * 3000}"),
    *(f"plan one.pt {'n' * 300}", f"export one.pt {'x' * 5000}", f"plan one.pt out --save {'n' * 300}"),
    *(
        f"apply {'n' * 300}",
        f"apply nope://me:{SECRET}@h/x",
        f"plan one.pt out --save nope://me:{SECRET}@h/x",
    ),
    f"reshard one.pt out --to dcp --mesh fsdp=2 --sharding nope://me:{SECRET}@h/x",
    *(f"consolidate one.pt out --max-file-size {line.NINES}", f"diff one.pt one.pt --memory {line.NINES}GiB"),
    *("fingerprint whole --catalog sqlite://host/x", "verify-export whole --catalog sqlite://host/x"),
    *(f"sweep --min-age {line.NINES}d", f"scrub --budget {line.NINES}"),
    *(f"export nothing out --wait {line.NINES}", "consolidate nothing out --wait 1s"),
)


@pytest.mark.parametrize("call", FOUND, ids=range(len(FOUND)))
def test_what_was_found_before(call: str, world: World, attack: Callable[[Sequence[str]], Outcome]) -> None:
    done = attack(call.split())
    assert done.code or call.startswith("catalog list"), done
    unharmed(world, done.argv)
    world.clean()


def calls() -> st.SearchStrategy[list[str]]:
    """Draw a call: any verb, some of its parameters, hostile values and valid ones."""
    free = st.text(st.characters(exclude_characters="/~"), max_size=12)

    def values(parameter: Parameter) -> st.SearchStrategy[list[str]]:
        some = st.sampled_from(hostile(parameter))
        if parameter.name not in line.SHORT:
            some = st.one_of(some, free)
        one = st.one_of(st.sampled_from(fitting(parameter)), some)
        return st.lists(one, min_size=1, max_size=3 if parameter.many else 1)

    def call(verb: Verb) -> st.SearchStrategy[list[str]]:
        needed = {p.name: values(p) for p in verb.parameters if p.required and not p.flag}
        rest = {p.name: values(p) for p in verb.parameters if p.name not in needed}
        given = st.fixed_dictionaries(needed, optional=rest)
        off = st.sets(st.sampled_from(sorted(rest) or [""]))
        return st.builds(lambda given, off: argv_of(verb, given, sorted(off)), given, off)

    return st.sampled_from(verbs()).flatmap(call)


@pytest.mark.soak
def test_any_values_for_any_parameters_of_verbs_in_a_row(
    world: World, attack: Callable[[Sequence[str]], Outcome]
) -> None:
    @settings(
        max_examples=int(os.environ.get("CKPTCORE_FUZZ_CALLS", "1500")),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(st.lists(calls(), min_size=1, max_size=3))
    def fuzz(row: list[list[str]]) -> None:
        world.clean()
        for argv in row:
            try:
                attack(argv)
            except line.OutsideTheTest:
                continue  # it was not run
        unharmed(world, [word for argv in row for word in argv])

    fuzz()


def test_processes_of_their_own(world: World) -> None:
    """Commands as a shell starts them: arguments that are not text, and an output that nothing reads."""
    env = os.environ | {
        "CKPTCORE_CATALOG_URL": str(world.box / "catalog.sqlite"),
        "PYTHONPATH": str(REPOSITORY),
    }
    for typed in (b"inspect \xff\x1b[2J", b"catalog show \xed\xa0\x80", b"catalog sql SELECT'\xff'", b"\xff"):
        command = [sys.executable, "-m", "ckptcore", *typed.split()]
        done = subprocess.run(command, cwd=world.box, env=env, capture_output=True, check=False, timeout=300)
        assert done.returncode in CODES, (typed, done)
        assert not CONTROL.search((done.stdout + done.stderr).decode()), (typed, done)


def test_every_verb_is_attacked() -> None:
    """The tree of verbs is the command line's own, down to its last verb."""
    found = {str(verb) for verb in verbs()}
    assert {"inspect", "retire", "catalog sql", "catalog hold place", "catalog inbox retry"} <= found
    by_name = {parameter.name for verb in verbs() for parameter in verb.parameters}
    assert {"src", "dst", "mesh", "accept_loss", "until", "no_catalog"} <= by_name
    sql = next(verb for verb in verbs() if str(verb) == "catalog sql")
    assert argv_of(sql, {"limit": ("-1",), "explain": ("",)})[2:] == [
        "--limit",
        "-1",
        "--explain",
        "--",
        "SELECT uri FROM checkpoint",
    ]


OUTSIDE = """
    / /x //x file:///x file://host/x a::file:///x local:///x/y k=/x ../../../../../x ~root zip://a::/x sqlite:////x
    {"destination":"/x"} file:/x FILE:///x <box>/../../../../../x a,/x x=file:///y ["/x"] --x=/y \0/x
"""


@pytest.mark.parametrize("word", OUTSIDE.split())
def test_no_word_names_a_place_outside(word: str, tmp_path: Path) -> None:
    box = tmp_path / "a" / "b" / "c" / "box"
    with pytest.raises(line.OutsideTheTest):
        built([word], box, tmp_path)


def test_paths_that_stay_inside(tmp_path: Path) -> None:
    box = tmp_path / "a" / "b" / "c" / "box"
    for word in ("x", "../../x", f"{BOX}/x", f"file://{BOX}/x", "s3://bucket/x", "[/red]", "~/x", "a=b"):
        assert guarded(word.replace(BOX, str(box)), box, tmp_path)


ESCAPES = """
open('{out}/x', 'w')
import os; os.mkdir('{out}/x')
import os; os.rename('{root}/in', '{out}/x')
import os; os.remove('{out}/keep')
import os; os.remove('keep', dir_fd=os.open('{out}', os.O_RDONLY))
import os; os.symlink('{out}', '{root}/l'); open('{root}/l/x', 'w')
import shutil; shutil.rmtree('{out}')
import pathlib; pathlib.Path('{root}/../out/x').touch()
"""


@pytest.mark.parametrize("code", ESCAPES.strip().splitlines())
def test_a_confined_process_ends_before_it_writes_elsewhere(code: str, tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    for folder in (root, out):
        folder.mkdir()
    (root / "in").touch()
    (out / "keep").touch()
    inside = str(root / "ok")
    begin = f"import confined; confined.confine({str(root)!r}); open({inside!r}, 'w').close()\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + code.format(root=root, out=out)],
        cwd=Path(confined.__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ESCAPED, done
    assert [p.name for p in out.iterdir()] == ["keep"]
    assert (root / "ok").exists()
