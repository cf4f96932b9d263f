"""Random programs of commands and accidents, and what must be true after each step of one.

A program is a list of (verb, number). The number decides everything about the step, so any part of a program
is a program, too. The model is a plain set of content ids (`custody_model`): what a purge deleted, and the
user did not name, is held by some place on disk after every step. What the environment destroys (rot, a
hand) is excused by looking again right after it.
"""

from __future__ import annotations

import functools
import io
import json
import random
import re
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from custody_copies import put_rows, rows_of
from custody_model import HOME, Contents, LocalDisk, ids_in, is_hidden, logical
from safetensors.torch import load as safetensors_state
from safetensors.torch import save as safetensors_bytes

from ckptcore.catalog import holds, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts, record_fingerprint
from ckptcore.custody.upkeep import listed, release
from ckptcore.errors import CkptError, UsageError
from ckptcore.operations.abandoned import collect
from ckptcore.operations.automation.convert_once import convert_once
from ckptcore.operations.rebuild_catalog import rebuild
from ckptcore.operations.retention.policy import Policy
from ckptcore.operations.retention.purge import purge, restore
from ckptcore.operations.retention.replacement import Allowed
from ckptcore.operations.retention.retire import retire
from ckptcore.operations.retention.thin import ThinOutcome, ThinRules, thin
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Request, Settings
from tests.simulation.invariants import Act, Broken, Check
from tests.simulation.records import all_in, beside, ids_in_sight, is_kept, vouched
from tests.simulation.scheduler import World, drawn_faults

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)
NO_SUMS = Settings(memory=32 << 20, workers=1)
WEEK = timedelta(days=7)
OUTPUTS = (*(f"{top}/{name}" for top in ("out", "disk") for name in "abcde"), "out/p.pt", "disk/q.pt")
PLACES = {"p": "out/p.pt", "q": "disk/q.pt"} | {name: f"out/{name}" for name in "abcde"}
# What processes that run at the same time do.
PRODUCT = {"make": 6, "overwrite": 6, "resume": 3, "retire": 4, "purge": 4, "restore": 2, "scrub": 1}
WAYS = ("validate", "fingerprint", "fingerprint", "rebuild")  # how a place comes into the catalog
LATER = "later"


def place_of(name: str) -> str:
    """Return the place that a step of a program calls by a digit or a letter."""
    return f"runs/llama/step-{name}" if name.isdigit() else PLACES[name]


@dataclass(frozen=True)
class Conversion:
    """A conversion of a place with these contents; what it makes of them."""

    source: str
    target: str
    contents: Contents
    made: Contents
    options: dict[str, Any]
    settings: Settings
    catalog: bool


def _lived(act: Callable[[Any], object], url: str) -> None:
    with open_catalog(url) as catalog:
        act(catalog)


class Run:
    """One program on one disk with one catalog."""

    def __init__(self, disk: Any, url: str, tmp: Path, world: World, *, calm: bool = False) -> None:
        self.disk, self.url, self.tmp, self.world, self.calm = disk, url, tmp, world, calm
        self.inline = world.inline
        self.group: list[Act] = []  # what the next processes do
        self.profile = "calm"  # what befalls the processes of this step: see `scheduler.PROFILES`
        self.together: list[tuple[int, Conversion]] | None = None  # while several are gathered
        self.catalog = open_catalog(url)
        self.trace: list[str] = []
        self.owed: set[tuple[str, str, str]] = set()  # (source, name, id) of what purges deleted
        self.accepted: dict[str, set[str]] = {}  # source -> globs that a user said
        self.unseen: set[tuple[str, str, str]] = set()  # of these, what no place in sight held already
        self.unvouched: set[tuple[str, str, str]] = set()  # of these, what no record was about already
        self.on_hold: dict[str, Contents] = {}  # source on hold -> what it had
        self.saved = 0
        self.backup: dict[str, list[dict[str, Any]]] | None = None
        self.replaced: list[tuple[str, Contents]] = []  # what can be restored: its place, and it
        self.between: dict[str, Contents] = {}  # place -> what a killed run moved away, or not yet there
        self.killed: Conversion | None = None  # the last one that was
        self.rotten = False  # whether something was altered by no program
        self.forgot = False  # whether a catalog was lost, or restored from a backup
        self._watch()

    def close(self) -> None:
        self.catalog.close()

    def run(self, steps: Sequence[tuple[str, int]]) -> None:
        """Run a program; raise `Broken` with its trace for the first step after which something is wrong."""
        real = uuid.uuid4
        try:
            for number, (step, drawn) in enumerate(steps):
                verb, _, self.profile = step.partition("/")
                self.world.inline = self.inline or self.profile == "setup"
                self.draw = random.Random(f"{number} {drawn}")
                names = random.Random(f"names {number} {drawn}")
                uuid.uuid4 = lambda names=names: uuid.UUID(int=names.getrandbits(128), version=4)  # type: ignore[assignment]
                self.trace.append(f"{number:3} {step:10} {drawn}")
                self._step(verb)
        except Broken as error:
            raise Broken("\n".join([*self.trace, str(error)])) from error
        finally:
            uuid.uuid4 = real

    def finish(self) -> None:
        """Without faults, run what was killed last once more: it ends as if nothing had happened."""
        run = self.killed
        if run is None or not self._is_up(run.target) or self._visible().get(run.source) != run.contents:
            return
        there, self.calm, self.profile = self._all().get(run.target), True, "calm"
        if self.disk.exists(run.target) and there is None:
            return  # rot
        if there is not None and set(there.values()) != set(run.made.values()):
            return
        self.world.shared.advance(2 * 86400)  # leases and claims of the dead end
        self.draw = random.Random("finish")
        self.trace.append("    finish    ")
        self._converted(run)
        outcome = self.trace[-1]
        if there is None and "[done]" not in outcome:
            raise Broken("\n".join([*self.trace, f"{run.target} cannot be completed"]))
        if "[done]" in outcome and there is None:
            self._require_same_bytes(run)

    def _require_same_bytes(self, run: Conversion) -> None:
        """Compare an output with that of an undisturbed run elsewhere."""
        fresh = f"fresh/{run.target.rpartition('/')[2]}"
        options = {n: v for n, v in run.options.items() if not n.startswith("overwrite")}
        convert(
            Request(self.disk.url(run.source), self.disk.url(fresh), **options), run.settings, None, False
        )
        tree = self.disk.tree()
        one, two = (
            {path[len(place) :]: data for path, data in tree.items() if path.startswith(place)}
            for place in (run.target, fresh)
        )
        for files in (one, two):
            files.pop("/README.md", None)
        if one != two:
            raise Broken("\n".join([*self.trace, f"{run.target} has other bytes than an undisturbed run"]))
        above, _, name = run.target.rpartition("/")
        left = sorted(path for path in tree if path.startswith(f"{above}/.{name}.ckptcore"))
        if left:
            raise Broken("\n".join([*self.trace, f"what is left: {left}"]))

    def _step(self, step: str) -> None:
        """Do a step, in several processes at once if it is of several verbs."""
        verbs = step.split("+")
        if len(verbs) == 1:
            self._do(step)
            return
        self.together = []
        for verb in verbs:
            self._note(f"\n    {verb:8}")
            self._do(verb)
        self._run_together()

    def _do(self, step: str) -> None:
        verb, _, places = step.partition("=")
        getattr(self, f"_{verb}")(*filter(None, places.split(">")))

    def _note(self, line: str) -> None:
        self.trace[-1] += f"  {line}"

    # What is there.

    def _all(self) -> dict[str, Contents | None]:
        return all_in(self.disk.tree())

    def _visible(self, *tops: str) -> dict[str, Contents]:
        """Return readable places that a user sees."""
        return {
            p: c
            for p, c in self._all().items()
            if c and not is_hidden(p) and p.startswith(tops or ("runs/", "out/", "disk/"))
        }

    def _pick(self, choices: Any) -> Any:
        """Choose one; of places, more often one with contents that must not go."""
        choices = sorted(choices)
        if not choices:
            return None
        if self.owed and self.draw.random() < 0.5:
            owed, there = {each[2] for each in self.owed}, self._all()
            choices = [p for p in choices if owed & set((there.get(p) or {}).values())] or choices
        return self.draw.choice(choices)

    def _steps(self) -> list[str]:
        return sorted(self._visible("runs/"))

    # The environment: what it destroys is excused.

    def _excuse(self) -> None:
        """What is lost, not vouched for, or not kept now, was destroyed by the environment."""
        tree = self.disk.tree()
        there, ids = all_in(tree), ids_in(tree)
        self.owed = {each for each in self.owed if each[2] in ids}
        seen, sure = ids_in_sight(tree, rotten=self.rotten), vouched(tree, rotten=self.rotten)
        self.unseen = {each for each in self.owed if each[2] not in seen}
        self.unvouched = {each for each in self.owed if each[2] not in sure}
        self.on_hold = {p: c for p, c in self.on_hold.items() if is_kept(p, c, there)}
        self.replaced = [(p, c) for p, c in self.replaced if c in beside(p, there)]
        self.between = {p: c for p, c in self.between.items() if c in beside(p, there)}

    def _save(self, place: str = "") -> None:
        if not place:
            self.saved += 1
            place = f"runs/llama/step-{self.saved}"
        own = torch.Generator().manual_seed(self.draw.getrandbits(40))
        state: dict[str, Any] = {"w": torch.randn(2, 3, generator=own), "step": self.saved}
        if self.draw.random() < 0.7:
            state["shared"] = torch.full((4,), float(self.draw.randrange(3)))
        for name in ("zero", "bias"):
            if self.draw.random() < 0.4:
                state[name] = torch.zeros(3)
        if self.draw.random() < 0.6:
            state["note"] = f"note {self.draw.getrandbits(30)}"
        folder = self.tmp / f"save-{len(self.trace)}-{self.draw.getrandbits(30)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        for file in folder.iterdir():
            if file.is_file():
                self.disk.put(f"{place}/{file.name}", file.read_bytes())
        if self.draw.random() < 0.15:
            self.disk.put(f"{place}/tokenizer.json", b'{"%d": 1}' % self.draw.getrandbits(30))
        self._note(place)

    def _resave(self, which: str = "") -> None:
        """The trainer saves a step again: over it, or where it was before it was set aside."""
        place = place_of(which or str(self.draw.randint(1, max(self.saved, 1))))
        if place in self.on_hold:
            return
        if self.disk.exists(place):
            self.disk.remove(place)
        if self.disk.kind == "bucket":  # objects of the step were the rest of what is staged
            self.between.pop(place, None)
        self._save(place)
        self._excuse()

    def _plain(self) -> None:
        """The file system cannot exchange two names."""
        self.world.exchanges = False

    def _copy(self, source: str = "", target: str = "") -> None:
        source, target = self._pair(source, target)
        if source and target and source.endswith(".pt") == target.endswith(".pt"):
            self.disk.copy(source, target)
            self._note(f"{source} -> {target}")
            if self.draw.random() < 0.25:
                self.write(target, {}, objects=False)
            if self.draw.random() < 0.7:
                self._known(target)

    def _link(self, source: str = "", target: str = "") -> None:
        """A user makes a copy of links to the files of another one: it holds nothing of its own."""
        source, target = self._pair(source, target)
        if isinstance(self.disk, LocalDisk) and source and target and not source.endswith(".pt"):
            self.disk.link(source, target)
            self._note(f"{source} -> {target}")
            self._known(target, ("validate", "rebuild", "fingerprint", "rebuild"))

    def _pair(self, source: str, target: str) -> tuple[str | None, str | None]:
        """Return an output, and a free place: those that are named, if they are, or any."""
        if not source:
            return self._pick(self._visible("out/", "disk/")), self._free()
        source, target = place_of(source), place_of(target)
        return (
            (source, target) if source in self._visible() and not self.disk.exists(target) else (None, None)
        )

    def _move(self, source: str = "", target: str = "") -> None:
        source, target = self._pair(source, target)
        if not source or not target or source.endswith(".pt") != target.endswith(".pt"):
            return
        self.disk.move(source, target)
        self._note(f"{source} -> {target}")
        self._excuse()
        if self.draw.random() < 0.5:
            scrub(self.catalog, share=1)
        if self.draw.random() < 0.6:
            self._known(target)

    def _free(self) -> str | None:
        free = [each for each in OUTPUTS if not self.disk.exists(each) and self._is_up(each)]
        return self._pick(free)

    def _is_up(self, place: str) -> bool:
        return not (place.startswith("disk/") and self.disk.exists("disk.away"))

    def _away(self) -> None:
        """A disk goes away, or comes back."""
        if self.disk.exists("disk.away"):
            if not self.disk.exists("disk"):
                self.disk.move("disk.away", "disk")
        elif self.disk.exists("disk"):
            self.disk.move("disk", "disk.away")
            self._excuse()
            if self.draw.random() < 0.7:
                self._product(lambda catalog: scrub(catalog, share=1))

    def _rot(self, which: str = "") -> None:
        tree, tops = self.disk.tree(), (place_of(which),) if which else ("out/", "disk/")
        self._rot_one([p for p in tree if tree[p] and not is_hidden(p) and p.startswith(tops)], tree)

    def _rotstaged(self) -> None:
        """What a killed run staged is altered."""
        tree = self.disk.tree()
        staged = re.compile(r"(.*/\.[^/]+\.ckptcore)/files/.*(safetensors|distcp|\.pt)")
        found = [(path, matched[1]) for path in tree if tree[path] and (matched := staged.fullmatch(path))]
        # Behind that record, the old output may be where the new one was staged.
        self._rot_one([path for path, home in found if f"{home}/publishing.json" not in tree], tree)

    def _rot_one(self, paths: Sequence[str], tree: dict[str, bytes]) -> None:
        path, self.rotten = self._pick(paths), True
        if path:
            data = bytearray(tree[path])
            first = (
                len(data) - 40 if path.endswith(".safetensors") and self.draw.random() < 0.7 else 0
            )  # its tensors
            data[self.draw.randrange(max(first, 0), len(data))] ^= 1 << self.draw.randrange(8)
            self.disk.alter(path, bytes(data), unseen=self.draw.random() < 0.7)
            self._note(path)
            self._excuse()

    def _rewrite(self, which: str = "") -> None:
        """A user writes one tensor more into a copy, or leaves its objects out."""
        place = place_of(which) if which else self._pick(self._visible("out/", "disk/"))
        if place not in self._visible():
            return
        extra = {"extra": torch.full((2,), float(self.draw.getrandbits(10)))}
        self.write(place, extra, objects=self.draw.random() < 0.8)
        self._note(place)
        self._excuse()
        if self.draw.random() < 0.3:
            self._known(place)

    def write(self, place: str, more: dict[str, torch.Tensor], *, objects: bool) -> None:
        path = place if place.endswith(".pt") else f"{place}/model.safetensors"
        data = self.disk.tree().get(path)
        if data is None:
            return
        if place.endswith(".pt"):
            state, made = torch.load(io.BytesIO(data), weights_only=True), io.BytesIO()
            state = {n: v for n, v in state.items() if objects or isinstance(v, torch.Tensor)}
            torch.save(state | more, made)
            self.disk.put(path, made.getvalue())
            return
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__") if objects else None
        self.disk.put(path, safetensors_bytes(safetensors_state(data) | more, metadata))

    # The catalog: backups, losses, what it records.

    def _watch(self) -> None:
        with self.catalog.writing() as conn:
            roots.add(conn, self.catalog.now(), "r", self.disk.url("runs"))

    def _validate(self, which: str = "") -> None:
        place = place_of(which) if which else self._pick(self._visible())
        if place in self._visible():
            self._note(place)
            self._known(place)

    def _known(self, place: str, ways: Sequence[str] = WAYS) -> None:
        """Catalog a place: by a validation, with or without its fingerprint, or as an output (last)."""
        url, how = self.disk.url(place), self.draw.choice(ways[: 3 if place.startswith("runs/") else 4])
        with suppress(CkptError):
            if how == "rebuild":
                rebuild(self.catalog, [], output_roots=[url], fingerprint_settings=MEANS)
                return
            manifest = inspect(url)
            self.catalog.record_validation(facts(manifest, url, verified="coverage"), (), level="coverage")
            if how == "fingerprint":
                record_fingerprint(manifest, url, fingerprint(manifest, MEANS).tensors, {}, self.url)

    def _backup(self) -> None:
        self.backup = rows_of(self.catalog)

    def _rewind(self) -> None:
        if self.backup is not None:
            put_rows(self.catalog, self.backup)
            self.on_hold, self.forgot = {}, True

    def _lose(self) -> None:
        put_rows(self.catalog, {table: [] for table in rows_of(self.catalog)})
        self._watch()
        self.on_hold, self.forgot = {}, True
        tops = [top for top in ("out", "disk") if self.disk.exists(top)]
        with suppress(CkptError):
            rebuild(
                self.catalog,
                [self.disk.url("runs")],
                output_roots=list(map(self.disk.url, tops)),
                fingerprint_settings=MEANS,
            )

    def _release(self) -> None:
        rows = listed(self.catalog)
        if rows:
            row = self.draw.choice(rows)
            names = list(row.contents) if self.draw.random() < 0.4 else [self.draw.choice(row.contents)]
            with suppress(CkptError):
                release(self.catalog, row.id, names)
                self._note(f"{row.source} {names}")
                self.owed = {e for e in self.owed if self.disk.url(e[0]) != row.source or e[1] not in names}

    def _hold(self, which: str = "") -> None:
        """A user wants to keep a source, at its place or set aside."""
        sources = {logical(p): c for p, c in self._all().items() if c and logical(p).startswith("runs/")}
        place = place_of(which) if which else self._pick(sources)
        if place not in sources:
            return
        if place in self._visible() and self.draw.random() < 0.5:
            self._known(place)
        with suppress(CkptError), self.catalog.writing() as conn:
            holds.place(conn, self.catalog.now(), self.disk.url(place), "mine")
            self.on_hold[place] = sources[place]
            self._note(place)

    # The product.

    def _make(self, source: str = "", target: str = "") -> None:
        """A conversion to a free place."""
        if source:
            self._convert(place_of(source), place_of(target), {})
        elif free := self._free():
            self._convert(self._pick(self._sources()), free, {})

    def _sources(self) -> list[str]:
        """Return steps more often than copies."""
        visible = self._visible()
        steps = [place for place in visible if place.startswith("runs/")]
        return steps if steps and self.draw.random() < 0.7 else list(visible)

    def _bare(self, source: str, target: str) -> None:
        """A conversion without the catalog replaces an output."""
        self._overwrite(source, target, catalog=False)

    def _overwrite(self, source: str = "", target: str = "", *, catalog: bool = True) -> None:
        if source:
            source, target = place_of(source), place_of(target)
        else:
            target = self._pick({p for p in OUTPUTS if self.disk.exists(p) and self._is_up(p)})
            source = self._pick(set(self._sources()) - {target})
            catalog = self.draw.random() < 0.8
        options = {"overwrite": True}
        if self.disk.kind == "bucket":
            options["overwrite_in_place"] = True
        if self.draw.random() < 0.5:
            options["overwrite_foreign"] = True
        if target and source:
            self._convert(source, target, options, catalog=catalog)

    def _convert(
        self, source: str | None, target: str, options: dict[str, Any], *, catalog: bool = True
    ) -> None:
        visible = self._visible()
        if source not in visible:
            return
        options["to"] = "torch_save" if target.endswith(".pt") else self.draw.choice(["safetensors", "dcp"])
        contents = visible[source]
        made = {name: id for name, id in contents.items() if not name.startswith("file ")}
        usual = self.profile == "setup"
        if self.draw.random() < 0.15 and "shared" in contents and not usual:
            options["exclude"] = ("shared",)
            made.pop("shared", None)
        settings = MEANS if usual or self.draw.random() < 0.85 else NO_SUMS
        self._converted(Conversion(source, target, contents, made, options, settings, catalog))

    def _converted(self, run: Conversion) -> None:
        others = [other for _, other in self.together or ()]
        if any(run.source == other.target or other.source == run.target for other in others):
            return  # which of two contents it reads is not for the model to say
        request = Request(self.disk.url(run.source), self.disk.url(run.target), **run.options)
        url: str | bool = self.url if run.catalog else False
        self._note(f"{run.source} -> {run.target} {run.options} catalog={run.catalog}")
        outcome = self._product(
            lambda _: convert(request, run.settings, None, url),
            run.target,
            run.made,
            catalog=run.catalog,
            reads=run.source,
        )
        if outcome == LATER:
            assert self.together is not None
            self.together.append((len(self.group) - 1, run))
        else:
            self._note_killed(run, outcome)

    def _note_killed(self, run: Conversion, outcome: str) -> None:
        if outcome == "refused: staging-foreign" and not self.rotten:
            raise Broken(f"a run takes what another one left beside {run.target} for a stranger's")
        if outcome in ("killed", "refused: interrupted"):
            self.killed = run
        elif run is self.killed:
            self.killed = None

    def _once(self, source: str, target: str) -> None:
        """A process is asked to make an output, unless another one does, or did."""
        source, target = place_of(source), place_of(target)
        contents = self._visible().get(source)
        if contents is None:
            return
        # All ask for the same: another format is another claim.
        to = "torch_save" if target.endswith(".pt") else "dcp"
        made = {name: id for name, id in contents.items() if not name.startswith("file ")}
        request = Request(self.disk.url(source), self.disk.url(target), to=to)
        self._note(f"{source} -> {target} {to}")

        def act(_: Any) -> None:
            convert_once(request, MEANS, None, self.url, wait_s=0, on_wait=lambda *_: None)

        run = Conversion(source, target, contents, made, {"to": to}, MEANS, True)
        outcome = self._product(act, target, made, claim=f"{source} {target}")
        if outcome == LATER:
            assert self.together is not None
            self.together.append((len(self.group) - 1, run))
        else:
            self._note_killed(run, outcome)

    def _gc(self) -> None:
        """What killed runs left in a bucket is removed."""
        if self.disk.kind == "bucket":
            url, older = self.disk.url("").rstrip("/"), self.draw.choice([0, 0, 3600])
            self._product(lambda _: collect(url, older_than_s=older, catalog=self.url))

    def _loose(self) -> None:
        """The store has no conditions, or none for uploads."""
        if self.disk.kind == "bucket":
            self.disk.server.creates = self.draw.choice([False, False, "put"])

    def _lagging(self) -> None:
        """A list of the store lacks what was written a moment ago."""
        if self.disk.kind == "bucket":
            self.disk.server.lag_s = self.draw.choice([0.001, 1, 30])

    def _resume(self) -> None:
        """The same command as the one that was killed last."""
        run = self.killed
        if run is not None and self._is_up(run.target) and self._visible().get(run.source) == run.contents:
            self._converted(run)

    def _retire(self, when: str = "") -> None:
        grace = timedelta(0) if (when == "now" if when else self.draw.random() < 0.6) else WEEK
        globs = self.draw.choice([(), (), (), ("note",), ("tokenizer.json", "note")])
        for place in self._all():
            self.accepted.setdefault(logical(place), set()).update(globs)
        options = {
            "grace": grace,
            "fingerprint_settings": MEANS if self.draw.random() < 0.4 else None,
            "allowed": Allowed(loss=globs),
            "purging": self.draw.random() < 0.2,
        }
        self._note(f"grace={grace.days} {globs}")
        act = functools.partial(retire, policy=Policy(1), yes=True, **options)
        self._product(act, purges=not grace, retires=True)

    def _thin(self, which: str = "") -> None:
        """A step loses what a user names, in its place; what stays as it is, is refused."""
        place = place_of(which) if which else self._pick(self._steps())
        contents = self._visible("runs/").get(place) or self.between.get(place)
        if contents is None or not self._is_up(place):
            return
        drop = tuple(n for n in ("note", "tokenizer.json") if n in contents or f"file {n}" in contents)
        grace = timedelta(0) if self.disk.kind == "bucket" or self.draw.random() < 0.3 else WEEK
        made = {name: id for name, id in contents.items() if name.removeprefix("file ") not in drop}
        self.accepted.setdefault(place, set()).update(drop)
        self._note(f"{place} {drop} grace={grace.days}")
        rules = ThinRules(drop or ("note",), min_age_s=0, grace=grace)

        def act(catalog: Any) -> None:
            (item,) = thin(catalog, [self.disk.url(place)], rules, MEANS, yes=True).items
            if item.outcome is not ThinOutcome.THINNED:
                refusal = UsageError("; ".join(item.why))
                code, colon, _ = refusal.message.partition(": ")
                refusal.code = code if colon and " " not in code else refusal.code  # of what ended it
                raise refusal

        self._product(act, place, made, purges=not grace)

    def _purge(self) -> None:
        later = self.catalog.now() + timedelta(days=8)
        self._product(lambda catalog: tuple(purge(catalog, MEANS, None, due=later)), purges=True)

    def _restore(self) -> None:
        tree = self.disk.tree()
        homes = {m[0]: p[: m.start()] for p in tree for m in HOME.finditer(p)}
        home = self._pick(homes)
        if home is None:
            return
        place = homes[home] + HOME.fullmatch(home)["name"]  # type: ignore[index]
        to = self.draw.choice(["", f"{place.rpartition('/')[2]}-back"])
        if place.endswith(".pt") and to:
            to = "back.pt"
        self._note(f"{place} {to}")
        url = self.disk.url(homes[home] + home)
        target = f"{place.rpartition('/')[0]}/{to}" if to else place
        aside = self._all().get(f"{homes[home]}{home}/{place.rpartition('/')[2]}", {})
        self._product(
            lambda catalog: restore(catalog, url, to),
            target,
            None,
            restores=aside or None,
            torn=aside is None and self.rotten,
        )

    def _scrub(self) -> None:
        self._product(lambda catalog: scrub(catalog, share=1))

    def _product(
        self,
        act: Callable[[Any], object],
        target: str = "",
        made: Contents | None = None,
        *,
        catalog: bool = True,
        purges: bool = False,
        retires: bool = False,
        claim: str = "",
        reads: str = "",
        restores: Contents | None = None,
        torn: bool = False,
    ) -> str:
        """Run a verb in a simulated process, at once or together with others; return how it ended.

        target: the place that may change. made: what is there afterwards; None for anything that is complete.
        purges: it removes what is set aside. retires: it sets sources aside. claim: what only one may do.
        reads: the place that it converts. restores: what is set aside that it restores. torn: whether
        that is torn.
        """
        self.group.append(Act(act, target, made, catalog, purges, retires, claim, reads, restores, torn))
        return self._run_group()[0] if self.together is None else LATER

    def _together(self) -> None:
        """Several processes at once, on several hosts."""
        self.together = []
        for verb in self.draw.choices(list(PRODUCT), list(PRODUCT.values()), k=self.draw.choice([2, 2, 3])):
            self._note(f"\n    {verb:8}")
            self._do(verb)
        self._run_together()

    def _run_together(self) -> None:
        later, self.together = self.together or [], None
        if self.group:
            outcomes = self._run_group()
            for act, run in later:
                self._note_killed(run, outcomes[act])

    def _run_group(self) -> list[str]:
        """Run what was gathered, as the faults decide, and check what must be true while and after."""
        group, self.group = self.group, []
        draw = random.Random(self.draw.getrandbits(60))
        faults = drawn_faults(draw, "calm" if self.calm else self.profile, local=self.disk.kind == "local")
        check = Check(self, group, {fault.kind for fault in faults})
        self.world.hand, self.world.committed = check.hand, check.committed if check.watches_claims else None
        self.world.changed = check.changed if self.disk.kind == "bucket" else None
        self.world.writes = check.writes if len(group) > 1 else None
        several = self.disk.kind == "bucket" and len(group) > 1
        self.world.requested = check.requested if several else None
        self.world.leased = check.leased if several else None
        works = [
            (draw.randrange(3), functools.partial(_lived, act.act, self.url), not act.catalog)
            for act in group
        ]
        outcomes = self.world.run(works, faults, draw, check.now)
        for word in (*outcomes, self.world.cut):
            self._note(f"[{word}]" if word else "")
        for outcome in outcomes:
            if outcome.startswith("crashed"):
                raise Broken(outcome)
        check.end(outcomes)
        return outcomes
