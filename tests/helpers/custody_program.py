"""Random programs of commands and accidents, and what must be true after each step of one.

A program is a list of (verb, number). The number decides everything about the step, so any part of a program
is a program, too. The model is a plain set of content ids (`custody_model`): what a purge deleted, and the
user did not name, is held by some place on disk after every step. What the environment destroys (rot, a
hand) is excused by looking again right after it.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import traceback
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from custody_copies import put_rows, rows_of
from custody_model import HOME, Contents, folders_above, ids_in, is_hidden, logical, places, read_place
from safetensors.torch import load as safetensors_state
from safetensors.torch import save as safetensors_bytes
from sqlalchemy import text
from strikes import STRUCK, strike_at

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

MEANS = Settings(memory=32 << 20, workers=1, fingerprint=True)
NO_SUMS = Settings(memory=32 << 20, workers=1)
WEEK = timedelta(days=7)
OUTPUTS = (*(f"{top}/{name}" for top in ("out", "disk") for name in "abcde"), "out/p.pt", "disk/q.pt")
# Verb -> how often.
WEIGHTS = {
    "save": 5,
    "resave": 1,
    "make": 10,
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
FORGET = ("rewind", "lose")  # behind them less is promised, so half of the programs have none
REFUSED, CRASHED = 3, 4


class Broken(AssertionError):
    """Something that must be true after a step is not."""


def program(seed: int, length: int) -> list[tuple[str, int]]:
    """Return a random program."""
    draw = random.Random(seed)
    weights = {verb: 0 if seed % 2 and verb in FORGET else often for verb, often in WEIGHTS.items()}
    verbs = draw.choices(list(weights), list(weights.values()), k=length)
    start = ["save", "save", "make", "make", "save", "make"]
    return [(verb, draw.getrandbits(40)) for verb in (*start, *verbs)][:length]


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


class Run:
    """One program on one disk with one catalog."""

    def __init__(self, disk: Any, url: str, tmp: Path) -> None:
        self.disk, self.url, self.tmp = disk, url, tmp
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
                self.draw = random.Random(f"{number} {drawn}")
                names = random.Random(f"names {number} {drawn}")
                uuid.uuid4 = lambda names=names: uuid.UUID(int=names.getrandbits(128), version=4)  # type: ignore[assignment]
                self.trace.append(f"{number:3} {verb:10} {drawn}")
                self._step(verb)
        except Broken as error:
            raise Broken("\n".join([*self.trace, str(error)])) from error
        finally:
            uuid.uuid4 = real

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
            roots.add(conn, datetime.now(UTC), "r", self.disk.url("runs"))

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
            holds.place(conn, datetime.now(UTC), self.disk.url(place), "mine")
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
        if self.draw.random() < 0.15:
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
        if outcome.startswith("killed"):
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
        later = datetime.now(UTC) + timedelta(days=8)
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
        """Run a verb, sometimes killed at one of its steps, and check what must be true.

        target: the place that may change. made: what is there afterwards; None for anything that is complete.
        """
        tree = self.disk.tree()
        known = self._known_sources(target, tree, catalog=catalog)
        last = self.draw.randint(1, 45) if self.draw.random() < 0.25 else 0
        outcome = self._killed(act, last) if last else self._in_process(act)
        self._note(f"[{outcome}]")
        after = self.disk.tree()
        self._require_places(self._all(tree), self._all(after), target, made, outcome)
        self._note_deleted(tree, after)
        self._require_owed(ids_in(after), known, strict=catalog and not self.forgot)
        for place, contents in self.on_hold.items():
            if self._all(after).get(place) != contents:
                raise Broken(f"{place} is on hold, and gone")
        return outcome

    def _in_process(self, act: Callable[[Any], object]) -> str:
        try:
            act(self.catalog)
        except CkptError as error:
            return f"refused: {error.code}"
        except Exception as error:
            raise Broken("".join(traceback.format_exception(error))) from error
        return "done"

    def _killed(self, act: Callable[[Any], object], last: int) -> str:
        remote = self.disk.kind == "bucket" and self.draw.random() < 0.7
        crash = self.tmp / "crash.txt"
        child = os.fork()
        if not child:
            code = CRASHED
            try:
                if not remote:
                    strike_at(last)
                with open_catalog(self.url) as catalog:
                    act(catalog)
                code = 0
            except CkptError:
                code = REFUSED
            except BaseException:
                crash.write_text(traceback.format_exc())
            finally:
                os._exit(code)
        if remote:
            left = [1 + last % 20]

            def strike(_path: str) -> None:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(child, signal.SIGKILL)

            self.disk.server.after = strike
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if remote:
            self.disk.server.after = None
        if status == CRASHED:
            raise Broken(crash.read_text())
        return {0: "done", REFUSED: "refused", STRUCK: f"killed at {last}"}.get(status, f"killed {status}")

    # What must be true.

    def _require_places(
        self,
        before: dict[str, Contents | None],
        after: dict[str, Contents | None],
        target: str,
        made: Contents | None,
        outcome: str,
    ) -> None:
        """Every place that a user sees is as it was; the target, too, or it is the new output, complete."""
        for place in {*before, *after}:
            old, new = before.get(place), after.get(place)
            if is_hidden(place) or old == new:
                continue
            if place != target:
                back = any(logical(p) == place and c == new for p, c in before.items())
                half = outcome.startswith("killed") and self.disk.kind == "bucket" and new is None
                if place.startswith("runs/") and (place not in after or back or half):
                    continue  # it is retired; what that loses is counted below. Or it is restored
                raise Broken(f"{place} changed: {old} -> {new}")
            if made is not None and new is not None and set(new.values()) == set(made.values()):
                continue
            if made is None and new is not None:
                continue
            if outcome.startswith("killed") and self.disk.kind == "bucket":
                continue  # objects are replaced one at a time; nothing opens meanwhile
            raise Broken(f"{place} is not complete: {old} -> {new}, not {made}")
        if (
            outcome == "done"
            and made is not None
            and set((after.get(target) or {}).values()) != set(made.values())
        ):
            raise Broken(f"{target} is not the new output: {after.get(target)}, not {made}")
        if outcome.startswith("refused") and before.get(target) != after.get(target) and before.get(target):
            raise Broken(f"{target} was refused, and changed: {before.get(target)} -> {after.get(target)}")

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

    def _known_sources(self, target: str, tree: dict[str, bytes], *, catalog: bool) -> frozenset[str]:
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
