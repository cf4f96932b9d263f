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
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from custody_copies import put_rows, rows_of
from custody_model import HOME, Contents, folders_above, ids_in, is_hidden, logical, places, read_place
from safetensors.torch import load as safetensors_state
from safetensors.torch import save as safetensors_bytes
from sqlalchemy import text

from ckptcore.catalog import holds, open_catalog
from ckptcore.catalog import watched_roots as roots
from ckptcore.comparison.fingerprint import fingerprint
from ckptcore.conversion.pipeline import convert, inspect
from ckptcore.conversion.registration import facts, record_fingerprint
from ckptcore.custody.upkeep import listed, release
from ckptcore.errors import CkptError
from ckptcore.operations.purge import purge, restore
from ckptcore.operations.rebuild_catalog import rebuild
from ckptcore.operations.replacement import Allowed
from ckptcore.operations.retention import Policy
from ckptcore.operations.retire import retire
from ckptcore.operations.scrub import scrub
from ckptcore.planning.request import Request, Settings
from tests.simulation.scheduler import World, drawn_faults

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)
NO_SUMS = Settings(memory=32 << 20, workers=1)
WEEK = timedelta(days=7)
OUTPUTS = (*(f"{top}/{name}" for top in ("out", "disk") for name in "abcde"), "out/p.pt", "disk/q.pt")
# Verb -> how often.
WEIGHTS = {
    "save": 5,
    "resave": 1,
    "make": 6,
    "together": 12,
    "copy": 3,
    "move": 3,
    "overwrite": 10,
    "resume": 4,
    "retire": 10,
    "purge": 4,
    "restore": 2,
    "scrub": 1,
    "away": 1,
    "rot": 1,
    "rewrite": 2,
    "validate": 2,
    "backup": 1,
    "rewind": 1,
    "lose": 1,
    "release": 1,
    "hold": 1,
}
START = ("save", "save", "make", "make", "save")  # of every program, undisturbed
FORGET = ("rewind", "lose")  # behind them less is promised, so half of the programs have none
# What processes that run at the same time do.
PRODUCT = {"make": 6, "overwrite": 6, "resume": 3, "retire": 4, "purge": 4, "restore": 2, "scrub": 1}
LATER = "later"


class Broken(AssertionError):
    """Something that must be true after a step is not."""


def program(seed: int, length: int) -> list[tuple[str, int]]:
    """Return a random program."""
    draw = random.Random(seed)
    weights = {verb: 0 if seed % 2 and verb in FORGET else often for verb, often in WEIGHTS.items()}
    verbs = draw.choices(list(weights), list(weights.values()), k=length)
    return [(verb, draw.getrandbits(40)) for verb in (*START, *verbs)][:length]


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


@dataclass(frozen=True)
class Act:
    """What one process does; see `Run._product`."""

    act: Callable[[Any], object]
    target: str
    made: Contents | None
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
        self.together: list[tuple[int, Conversion]] | None = None  # while several are gathered
        self.catalog = open_catalog(url)
        self.trace: list[str] = []
        self.owed: set[tuple[str, str, str]] = set()  # (source, name, id) of what purges deleted
        self.accepted: dict[str, set[str]] = {}  # source -> globs that a user said
        self.on_hold: dict[str, Contents] = {}  # source on hold -> what it had
        self.saved = 0
        self.backup: dict[str, list[dict[str, Any]]] | None = None
        self.killed: Conversion | None = None  # the last one that was
        self.forgot = False  # whether a catalog was lost, or restored from a backup
        self._watch()

    def close(self) -> None:
        self.catalog.close()

    def run(self, steps: Sequence[tuple[str, int]]) -> None:
        """Run a program; raise `Broken` with its trace for the first step after which something is wrong."""
        real = uuid.uuid4
        try:
            for number, (verb, drawn) in enumerate(steps):
                self.world.inline = self.inline or number < len(START)
                self.draw = random.Random(f"{number} {drawn}")
                names = random.Random(f"names {number} {drawn}")
                uuid.uuid4 = lambda names=names: uuid.UUID(int=names.getrandbits(128), version=4)  # type: ignore[assignment]
                self.trace.append(f"{number:3} {verb:10} {drawn}")
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
        there, self.calm = self._all().get(run.target), True
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

    def _step(self, verb: str) -> None:
        getattr(self, f"_{verb}")()

    def _note(self, line: str) -> None:
        self.trace[-1] += f"  {line}"

    # What is there.

    def _all(self, tree: dict[str, bytes] | None = None) -> dict[str, Contents | None]:
        return {p: read_place(f) for p, f in places(self.disk.tree() if tree is None else tree).items()}

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
        tree = self.disk.tree()
        there = ids_in(tree)
        self.owed = {each for each in self.owed if each[2] in there}
        now = self._all(tree)
        self.on_hold = {
            place: contents for place, contents in self.on_hold.items() if now.get(place) == contents
        }

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

    def _resave(self) -> None:
        """The trainer saves a step again: over it, or where it was before it was set aside."""
        place = f"runs/llama/step-{self.draw.randint(1, max(self.saved, 1))}"
        if place in self.on_hold:
            return
        if self.disk.exists(place):
            self.disk.remove(place)
        self._save(place)
        self._excuse()

    def _copy(self) -> None:
        source, target = self._pick(self._visible("out/", "disk/")), self._free()
        if source and target and source.endswith(".pt") == target.endswith(".pt"):
            self.disk.copy(source, target)
            self._note(f"{source} -> {target}")
            if self.draw.random() < 0.25:
                self._write(target, {}, objects=False)
            if self.draw.random() < 0.7:
                self._known(target)

    def _move(self) -> None:
        source, target = self._pick(self._visible("out/", "disk/")), self._free()
        if not source or not target or source.endswith(".pt") != target.endswith(".pt"):
            return
        self.disk.move(source, target)
        self._note(f"{source} -> {target}")
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
            if self.draw.random() < 0.7:
                self._product(lambda catalog: scrub(catalog, share=1))

    def _rot(self) -> None:
        tree = self.disk.tree()
        path = self._pick(p for p in tree if tree[p] and not is_hidden(p) and p.startswith(("out/", "disk/")))
        if path:
            data = bytearray(tree[path])
            data[self.draw.randrange(len(data))] ^= 1 << self.draw.randrange(8)
            self.disk.alter(path, bytes(data), unseen=self.draw.random() < 0.7)
            self._note(path)
            self._excuse()

    def _rewrite(self) -> None:
        """A user writes one tensor more into a copy, or leaves its objects out."""
        place = self._pick(self._visible("out/", "disk/"))
        if place is None:
            return
        extra = {"extra": torch.full((2,), float(self.draw.getrandbits(10)))}
        self._write(place, extra, objects=self.draw.random() < 0.8)
        self._note(place)
        self._excuse()
        if self.draw.random() < 0.3:
            self._known(place)

    def _write(self, place: str, more: dict[str, torch.Tensor], *, objects: bool) -> None:
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

    def _validate(self) -> None:
        place = self._pick(self._visible())
        if place:
            self._note(place)
            self._known(place)

    def _known(self, place: str) -> None:
        """Catalog a place: by a validation, with or without its fingerprint, or as an output."""
        url, how = (
            self.disk.url(place),
            self.draw.choice(["validate", "fingerprint", "fingerprint", "rebuild"]),
        )
        with suppress(CkptError):
            if how == "rebuild":
                rebuild(self.catalog, [], made=[url], take=MEANS)
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
            rebuild(self.catalog, [self.disk.url("runs")], made=list(map(self.disk.url, tops)), take=MEANS)

    def _release(self) -> None:
        rows = listed(self.catalog)
        if rows:
            row = self.draw.choice(rows)
            names = list(row.contents) if self.draw.random() < 0.4 else [self.draw.choice(row.contents)]
            with suppress(CkptError):
                release(self.catalog, row.id, names)
                self._note(f"{row.source} {names}")
                self.owed = {e for e in self.owed if self.disk.url(e[0]) != row.source or e[1] not in names}

    def _hold(self) -> None:
        place = self._pick(self._steps())
        if place is None:
            return
        if self.draw.random() < 0.5:
            self._known(place)
        with suppress(CkptError), self.catalog.writing() as conn:
            holds.place(conn, self.catalog.now(), self.disk.url(place), "mine")
            self.on_hold[place] = self._visible()[place]
            self._note(place)

    # The product.

    def _make(self) -> None:
        """A conversion to a free place."""
        target = self._free()
        if target:
            self._convert(self._pick(self._sources()), target, {})

    def _sources(self) -> list[str]:
        """Return steps more often than copies."""
        visible = self._visible()
        steps = [place for place in visible if place.startswith("runs/")]
        return steps if steps and self.draw.random() < 0.7 else list(visible)

    def _overwrite(self) -> None:
        there = {p for p in OUTPUTS if self.disk.exists(p) and self._is_up(p)}
        target = self._pick(there)
        source = self._pick(set(self._sources()) - {target})
        options = {"overwrite": True}
        if self.disk.kind == "bucket":
            options["overwrite_in_place"] = True
        if self.draw.random() < 0.5:
            options["overwrite_foreign"] = True
        if target and source:
            self._convert(source, target, options, catalog=self.draw.random() < 0.8)

    def _convert(
        self, source: str | None, target: str, options: dict[str, Any], *, catalog: bool = True
    ) -> None:
        if source is None:
            return
        options["to"] = "torch_save" if target.endswith(".pt") else self.draw.choice(["safetensors", "dcp"])
        contents = self._visible()[source]
        made = {name: id for name, id in contents.items() if not name.startswith("file ")}
        if self.draw.random() < 0.15 and "shared" in contents:
            options["exclude"] = ("shared",)
            made.pop("shared", None)
        settings = MEANS if self.draw.random() < 0.85 else NO_SUMS
        self._converted(Conversion(source, target, contents, made, options, settings, catalog))

    def _converted(self, run: Conversion) -> None:
        request = Request(self.disk.url(run.source), self.disk.url(run.target), **run.options)
        url: str | bool = self.url if run.catalog else False
        self._note(f"{run.source} -> {run.target} {run.options} catalog={run.catalog}")
        outcome = self._product(
            lambda _: convert(request, run.settings, None, url), run.target, run.made, catalog=run.catalog
        )
        if outcome == LATER:
            assert self.together is not None
            self.together.append((len(self.group) - 1, run))
        else:
            self._note_killed(run, outcome)

    def _note_killed(self, run: Conversion, outcome: str) -> None:
        if outcome == "killed":
            self.killed = run
        elif run is self.killed:
            self.killed = None

    def _resume(self) -> None:
        """The same command as the one that was killed last."""
        run = self.killed
        if run is not None and self._is_up(run.target) and self._visible().get(run.source) == run.contents:
            self._converted(run)

    def _retire(self) -> None:
        grace = timedelta(0) if self.draw.random() < 0.6 else WEEK
        globs = self.draw.choice([(), (), (), ("note",), ("tokenizer.json", "note")])
        for place in self._all():
            self.accepted.setdefault(logical(place), set()).update(globs)
        options = {
            "grace": grace,
            "take": MEANS if self.draw.random() < 0.4 else None,
            "allowed": Allowed(loss=globs),
            "purging": self.draw.random() < 0.2,
        }
        self._note(f"grace={grace.days} {globs}")
        self._product(lambda catalog: retire(catalog, Policy(1), yes=True, **options))

    def _purge(self) -> None:
        later = self.catalog.now() + timedelta(days=8)
        self._product(lambda catalog: tuple(purge(catalog, MEANS, None, due=later)))

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
        self._product(lambda catalog: restore(catalog, url, to), target, None)

    def _scrub(self) -> None:
        self._product(lambda catalog: scrub(catalog, share=1))

    def _product(
        self,
        act: Callable[[Any], object],
        target: str = "",
        made: Contents | None = None,
        *,
        catalog: bool = True,
    ) -> str:
        """Run a verb in a simulated process, at once or together with others; return how it ended.

        target: the place that may change. made: what is there afterwards; None for anything that is complete.
        """
        self.group.append(Act(act, target, made, catalog))
        return self._run_group()[0] if self.together is None else LATER

    def _together(self) -> None:
        """Several processes at once, on several hosts."""
        self.together = []
        for verb in self.draw.choices(list(PRODUCT), list(PRODUCT.values()), k=self.draw.choice([2, 2, 3])):
            self._note(f"\n    {verb:8}")
            self._step(verb)
        later, self.together = self.together, None
        if self.group:
            outcomes = self._run_group()
            for act, run in later:
                self._note_killed(run, outcomes[act])

    def _run_group(self) -> list[str]:
        """Run what was gathered, as the faults decide, and check what must be true while and after."""
        group, self.group = self.group, []
        before = self.disk.tree()
        strict = all(act.catalog for act in group) and not self.forgot
        known = frozenset[str]().union(*(self._known_sources(a.target, before, a.catalog) for a in group))
        draw = random.Random(self.draw.getrandbits(60))
        faults = drawn_faults(draw, calm=self.calm or draw.random() < 0.2, local=self.disk.kind == "local")

        def observe() -> None:
            after = self.disk.tree()
            self._require_places(self._all(before), self._all(after), group, [])
            self._note_deleted(before, after)
            self._require_owed(ids_in(after), known, strict=strict)

        works = [(draw.randrange(3), functools.partial(_lived, act.act, self.url)) for act in group]
        outcomes = self.world.run(works, faults, draw, observe)
        for word in (*outcomes, self.world.cut):
            self._note(f"[{word}]" if word else "")
        for outcome in outcomes:
            if outcome.startswith("crashed"):
                raise Broken(outcome)
        after = self.disk.tree()
        self._require_places(self._all(before), self._all(after), group, outcomes)
        self._note_deleted(before, after)
        self._require_owed(ids_in(after), known, strict=strict)
        for place, contents in self.on_hold.items():
            if self._all(after).get(place) != contents:
                raise Broken(f"{place} is on hold, and gone")
        return outcomes

    # What must be true.

    def _require_places(
        self,
        before: dict[str, Contents | None],
        after: dict[str, Contents | None],
        group: Sequence[Act],
        outcomes: Sequence[str],
    ) -> None:
        """Every place that a user sees is as it was, or, if it is a target, the new output, complete.

        outcomes: how the acts of the group ended; none while they run.
        """
        for place in {*before, *after, *(act.target for act in group if act.made is not None)}:
            old, new = before.get(place), after.get(place)
            acts = [
                (a, o)
                for a, o in zip_longest(group, outcomes, fillvalue="")
                if a.target == place or place.startswith(f"{a.target}.kept-")
            ]  # what cannot be removed is kept beside its place
            if place not in before and ".kept-" in place and acts:
                continue
            wanted = [set(a.made.values()) for a, _ in acts if a.made is not None]
            if any(o == "done" and a.made is not None for a, o in acts):
                if new is None or set(new.values()) not in wanted:
                    raise Broken(f"{place} is not the new output: {new}, not {wanted}")
                continue
            torn = place in after and new is None and place not in before
            if is_hidden(place) or (old == new and not torn):
                continue
            halves = self.disk.kind == "bucket" and new is None  # objects are replaced one at a time
            if not acts:
                back = any(logical(p) == place and c == new for p, c in before.items())
                if place.startswith("runs/") and (place not in after or back or halves):
                    continue  # it is retired; what that loses is counted below. Or it is restored
                raise Broken(f"{place} changed: {old} -> {new}")
            if outcomes and old and all(o.startswith("refused") for _, o in acts):
                raise Broken(f"{place} was refused, and changed: {old} -> {new}")
            if halves or (
                new is not None and (set(new.values()) in wanted or None in [a.made for a, _ in acts])
            ):
                continue
            raise Broken(f"{place} is not complete: {old} -> {new}, not {wanted}")

    def _note_deleted(self, before: dict[str, bytes], after: dict[str, bytes]) -> None:
        """Note what of sources is gone: some place must hold it from now on."""
        gone = self._source_contents(before) - self._source_contents(after)
        for place, rows in gone:
            self.owed |= {
                (place, name, id)
                for name, id in rows
                if not any(fnmatchcase(name.removeprefix("file "), g) for g in self.accepted.get(place, ()))
            }

    def _source_contents(self, tree: dict[str, bytes]) -> Counter[tuple[str, frozenset[tuple[str, str]]]]:
        """Return the sources at their places or set aside, by where they belong."""
        found: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
        for place, contents in self._all(tree).items():
            if contents and logical(place).startswith("runs/") and not place.endswith("-back"):
                found[logical(place), frozenset(contents.items())] += 1
        return found

    def _require_owed(self, there: frozenset[str], known: frozenset[str], *, strict: bool) -> None:
        lost = {each for each in self.owed if each[2] not in there}
        missing = {e for e in lost if strict or self.disk.url(e[0]) in known}
        if missing:
            raise Broken(f"lost: {sorted(missing)}")
        self.owed -= lost  # a catalog that knew was lost, and there is no record

    def _known_sources(self, target: str, tree: dict[str, bytes], catalog: bool) -> frozenset[str]:
        """Return the sources of the obligations that the catalog, or a record at a place, has."""
        found: set[str] = set()
        if catalog:
            with self.catalog.reading() as conn:
                found |= set(conn.execute(text("SELECT source FROM obligation")).scalars())
        for above in (target, *folders_above(target)):
            parent, _, name = above.rpartition("/")
            home = f"{parent}/.{name}.obligations.ckptcore/"
            records = [
                data for path, data in tree.items() if path.startswith(home) and path.endswith(".json")
            ]
            found |= {json.loads(data)["source"] for data in records}
        return frozenset(found)
