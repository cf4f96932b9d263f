"""What must be true while processes run, whenever one of them ends, and behind them."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from custody_model import Contents, Tree, folders_above, ids_in, is_hidden, logical
from sqlalchemy import select, text

from ckptcore.catalog.claims import TAKEN, read_owner
from ckptcore.catalog.models import Claim
from ckptcore.operations.abandoned import collect
from tests.simulation.records import all_in, beside, homes, ids_in_sight, is_kept, obligations, vouched
from tests.simulation.seam import HOSTS

if TYPE_CHECKING:
    from tests.simulation.programs import Run


# How a run may end that has published an output: whether the disk keeps it is not known.
STAGED = re.compile(r"(^|(?<=/))\.[^/]+(?<!\.obligations)(?<!\.retiring-.{8})\.ckptcore(?=/|\.gone-)")
COMMIT = (".metadata", "model.safetensors.index.json")  # what makes a folder loadable
SKEW_S = 15.0  # that clocks of hosts may differ by
FAILING = tuple(f"refused: {code}" for code in ("destination-unwritable", "disk-full", "storage-trouble"))


class Broken(AssertionError):
    """Something that must be true after a step is not."""


@dataclass(frozen=True)
class Act:
    """What one process does.

    Attributes:
        act: What it does, with an open catalog.
        target: The place that may change; "" for none.
        made: What is there afterwards; None for anything that is complete.
        catalog: Whether the product uses the catalog.
        purges: Whether it removes what is set aside.
        retires: Whether it sets sources aside.
        claim: What only one process may do at a time; "" for anything.
        reads: The place that it converts; "" for none.
        restores: What is set aside that it restores; None for nothing.
        torn: Whether that has rotted where it is set aside; what a purge has begun to remove may not return.
    """

    act: Callable[[Any], object]
    target: str
    made: Contents | None
    catalog: bool
    purges: bool
    retires: bool = False
    claim: str = ""
    reads: str = ""
    restores: Contents | None = None
    torn: bool = False


class Check:
    """What must be true of a group of processes; made before they begin.

    kinds: of the faults that befall them.
    """

    def __init__(self, run: Run, group: Sequence[Act], kinds: Collection[str]) -> None:
        self.run, self.group = run, group
        self.fails = run.disk.kind == "bucket" or "error" in kinds  # whether the storage does by itself
        self.before = run.disk.tree()
        self.there = all_in(self.before)
        self.sources = _sources(self.there)
        self.owed = frozenset(run.owed)
        self.strict = all(act.catalog for act in group) and not run.forgot
        self.listed, self.succeeded = self._recorded()
        self.known = frozenset[str]().union(*(self._known_sources(act) for act in group))
        self.by_hand: set[str] = set()
        self.writers: dict[
            str, list[int]
        ] = {}  # staging folder -> processes that have written to it, in turn
        self.inodes = self._inodes()
        self.claims = self._claims() if self.watches_claims else {}
        self.leases = self._leases() if run.disk.kind == "bucket" else {}

    @property
    def watches_claims(self) -> bool:
        """Whether processes of the group compete for claims."""
        return len(self.group) > 1 and (self.run.disk.kind == "bucket" or any(a.claim for a in self.group))

    def now(self) -> None:
        """Check what must be true at any time; raise `Broken`."""
        self._check([])

    def end(self, outcomes: Sequence[str]) -> None:
        """Check what must be true when the processes have ended; raise `Broken`."""
        run = self.run
        tree, there = self._check(outcomes)
        for place, contents in run.on_hold.items():
            if not is_kept(place, contents, there):
                raise Broken(f"{place} is on hold, and gone")
        lost = self.by_hand - ids_in(tree)
        if lost and not run.world.cut:
            raise Broken(f"what another user wrote meanwhile is gone: {sorted(lost)}")
        failing = set(outcomes) & set(FAILING)
        if failing and not self.fails:
            raise Broken(f"{min(failing)}, and nothing has failed")
        self._require_replaced(there)
        self._require_restored(there, outcomes)
        self._note_between(there, outcomes)
        if run.disk.kind == "bucket":
            self._require_listed(tree)
        if all(o in FAILING for o in outcomes) and self._recorded()[1] > self.succeeded and not run.world.cut:
            raise Broken("a conversion failed that the catalog has recorded as succeeded")
        ids_there = _at_sources(there) | self._ids_between(there)
        new = {run.disk.url(each[0]) for each in run.owed - self.owed if each[2] not in ids_there}
        forgotten = new - self._recorded()[0] if new and self.strict and not run.world.cut else ()
        if forgotten:
            raise Broken(f"the catalog has no obligation of {sorted(forgotten)}")

    def committed(self, number: int) -> None:
        """A claim that a process has, in its time, is changed by no other process."""
        shared, claims = self.run.world.shared, self._claims()
        latest = datetime.fromtimestamp(max(map(shared.now_ns, range(HOSTS))) / 1e9, UTC)
        for key, before in self.claims.items():
            _, process = read_owner(before.owner)
            taken = before.state == TAKEN and before.due_at > latest and process
            others = taken and process[0] != str(number) and shared.is_alive(int(process[0]))
            if others and claims.get(key) != before:
                raise Broken(f"process {number} changed the claim of {before.owner}: {claims.get(key)}")
        self.claims = claims

    def writes(self, number: int, path: str) -> None:
        """A process writes to a staging folder only if no other one has, since it began to."""
        staged = STAGED.search(path)
        if staged is None:
            return
        writers = self.writers.setdefault(path[: staged.end()], [])
        if number in writers[:-1]:
            raise Broken(f"processes {number} and {writers[-1]} write to {staged[0]} at the same time")
        if number not in writers:
            writers.append(number)

    def requested(self, number: int, key: str) -> None:
        """What users see of a destination is not changed while another process has its lease, in time."""
        if self._have_clocks_jumped():
            return
        latest = max(self.run.world.shared.clocks_s())
        for place, holder in self._leases().items():
            process = int(holder["process"][0])
            of_others = process != number and self.run.world.shared.is_alive(process)
            if of_others and holder["until"] > latest and f"{key}/".startswith(f"{self._key(place)}/"):
                raise Broken(
                    f"process {number} changes {key} while process {process} has the lease of {place}"
                )

    def leased(self, number: int) -> None:
        """No process takes or ends the lease of another one that lives, in time by the clock of any host."""
        before, self.leases = self.leases, self._leases()
        if self._have_clocks_jumped():
            return
        earliest = min(self.run.world.shared.clocks_s())
        for place, holder in before.items():
            process = int(holder["process"][0])
            gone = self.leases.get(place, {"token": ""})["token"] != holder["token"]
            of_others = process != number and self.run.world.shared.is_alive(process)
            if gone and of_others and holder["until"] > earliest:
                raise Broken(f"process {number} takes the lease of {place} from process {process}, in time")

    def _have_clocks_jumped(self) -> bool:
        clocks = self.run.world.shared.clocks_s()
        return max(clocks) - min(clocks) > SKEW_S

    def _leases(self) -> dict[str, dict[str, Any]]:
        """Return the leases of the targets of the group; none where the store does not decide by itself."""
        server = self.run.disk.server
        if server.creates is not True:
            return {}
        leases = {}
        for place in {act.target for act in self.group if act.made is not None}:
            above, _, name = self._key(place).rpartition("/")
            lease = server.objects.get(f"{above}/.{name}.ckptcore/lease.json")
            if lease is not None:
                leases[place] = json.loads(lease.data)
        return leases

    def _key(self, place: str) -> str:
        return f"{self.run.disk.bucket}/{place}"

    def _claims(self) -> dict[int, Any]:
        with self.run.catalog.reading() as conn:
            rows = conn.execute(select(Claim.id, Claim.state, Claim.owner, Claim.attempts, Claim.due_at))
            return {row.id: row for row in rows}

    def hand(self, index: int, wrote: bool, number: int) -> None:
        """Let another user write to what a process has looked at, and has not moved away yet."""
        act, there = self.group[index], all_in(self.run.disk.tree())
        if act.made is not None:
            places = [act.target] if wrote and len(self.group) == 1 else []
        else:
            places = sorted(place for place in there if place.startswith("runs/") and not is_hidden(place))
        places = [
            p for p in places if there.get(p) and there[p] == self.there.get(p) and p not in self.run.on_hold
        ]
        # An equal output that is published already is not what is replaced.
        places = [p for p in places if self._inodes().get(p) == self.inodes.get(p)]
        if not places:
            return
        place = places[number % len(places)]
        old = set((there[place] or {}).values())
        if place.endswith(".pt") or (number // 8 % 2 and self.run.disk.exists(f"{place}/model.safetensors")):
            self.run.write(place, {"extra": torch.full((2,), float(number))}, objects=True)
        else:
            self.run.disk.put(f"{place}/note-{number}.txt", f"{number}".encode())
        tree = self.run.disk.tree()
        files = {p: data for p, data in tree.items() if p == place or p.startswith(f"{place}/")}
        new = set((all_in(files).get(place) or {}).values())
        self.by_hand = self.by_hand - (old - new) | (new - old)  # who writes twice replaces what was theirs
        self.before |= files
        self.there = all_in(self.before)
        self.sources = _sources(self.there)
        self.inodes = self._inodes()

    def _inodes(self) -> dict[str, int]:
        """Return the inodes of the targets of the group, on a local disk."""
        if self.run.disk.kind != "local":
            return {}
        paths = {act.target: self.run.disk.url(act.target) for act in self.group if act.target}
        return {place: os.stat(path).st_ino for place, path in paths.items() if os.path.exists(path)}

    def _check(self, outcomes: Sequence[str]) -> tuple[Tree, dict[str, Contents | None]]:
        run, tree = self.run, self.run.disk.tree()
        there = all_in(tree)
        self._require_places(there, outcomes)
        self.changed()
        self._require_old_outputs(there)
        self._note_deleted(there)
        self._require_owed(tree, there)
        if run.disk.kind == "local":
            torn = [home for home, record in homes(tree).items() if record is None]
            if torn:
                raise Broken(f"{torn[0]} has no record of what is in it")
        return tree, there

    def _require_places(self, after: dict[str, Contents | None], outcomes: Sequence[str]) -> None:
        """Every place that a user sees is as it was, or, if it is a target, the new output, complete.

        outcomes: how the acts of the group ended; none while they run.
        """
        before, group, bucket = self.there, self.group, self.run.disk.kind == "bucket"
        for place in {*before, *after, *(act.target for act in group if act.made is not None)}:
            old, new = before.get(place), after.get(place)
            if place not in before and any(place.startswith(f"{act.target}.kept-") for act in group):
                continue  # what cannot be removed is kept beside its place, and stays as it is from then on
            acts = [(a, o) for a, o in zip_longest(group, outcomes, fillvalue="") if a.target == place]
            wanted = [made for a, _ in acts for made in self._possible(a, after)]
            if any(o == "done" and a.made is not None for a, o in acts):
                if new is None or set(new.values()) not in wanted:
                    raise Broken(f"{place} is not the new output: {new}, not {wanted}")
                continue
            torn = place in after and new is None and place not in before and not any(a.torn for a, _ in acts)
            if is_hidden(place) or (old == new and not torn):
                continue
            halves = bucket and new is None  # objects are replaced one at a time
            retired = place not in after and any(act.retires for act in group)
            if retired and place.startswith("runs/"):
                continue  # what that loses is counted below
            if not acts:
                back = any(logical(p) == place and c == new for p, c in before.items())
                if place.startswith("runs/") and (place not in after or back or halves):
                    continue  # it is purged or thinned in two steps. Or it is restored
                raise Broken(f"{place} changed: {old} -> {new}")
            between = (place not in after and old in beside(place, after)) or (
                place not in before and new in beside(place, before)
            )
            if not self.run.world.exchanges and between:
                continue  # of two steps; the next run completes or restores it
            # What is published could not be registered, by who published it; or the lease ended between two
            # objects: `Run.finish` completes it.
            late = any(
                (o == "refused: interrupted" and halves)
                or (
                    o in (*FAILING, "refused: catalog")
                    and new
                    and set(new.values()) in self._possible(a, after)
                )
                for a, o in acts
            )
            # Objects of a retired source are in their place until a purge, which may run beside.
            purged = halves and place.startswith("runs/") and any(act.purges for act in group)
            if outcomes and old and all(o.startswith("refused") for _, o in acts) and not (late or purged):
                raise Broken(f"{place} was refused, and changed: {old} -> {new}")
            if place in before and not place.startswith("runs/") and not wanted:
                raise Broken(f"{place} was there, and another was restored over it: {old} -> {new}")
            if halves or (
                new is not None and (set(new.values()) in wanted or None in [a.made for a, _ in acts])
            ):
                continue
            raise Broken(f"{place} is not complete: {old} -> {new}, not {wanted}")

    def _possible(self, act: Act, after: dict[str, Contents | None]) -> Iterator[set[str]]:
        """Yield what may be in the place of an act: its source is as it was, or as another act left it."""
        if act.made is None:
            return
        yield set(act.made.values())
        for other in self.group if act.reads and after.get(act.reads) != self.there.get(act.reads) else ():
            if other.target == act.reads and other.made is not None:
                yield {other.made[name] for name in act.made if name in other.made}

    def changed(self) -> None:
        """What makes a folder of a bucket loadable is there only if all that it names is."""
        if self.run.disk.kind != "bucket" or self.run.rotten:
            return
        tree = self.run.disk.tree()
        there = all_in(tree)
        for place in {act.target for act in self.group if act.made is not None}:
            commit = {f"{place}/{name}" for name in COMMIT} & tree.keys()
            # One that was torn before stays so until it is replaced.
            if commit and there.get(place) is None and self.there.get(place, 1) is not None:
                raise Broken(f"{place} is not complete, and {min(commit)} says that it is")

    def _require_old_outputs(self, there: dict[str, Contents | None]) -> None:
        """What a killed run moved away from a place is kept beside it until the new output is there."""
        between = self.run.between
        for place, old in list(between.items()):
            local = self.run.disk.kind == "local"
            if there.get(place) is not None or (place in there and local):
                if local and there[place] != old and old in beside(place, there):
                    continue  # the next run sets it aside, whoever wrote there meanwhile
                del between[place]
                if place.startswith("runs/"):
                    self._owe(place, old.items() - (there[place] or {}).items())
            elif old not in beside(place, there):
                raise Broken(f"{place} has neither the old output nor a new one: {old} is gone")

    def _note_between(self, there: dict[str, Contents | None], outcomes: Sequence[str]) -> None:
        """Note what runs that came to no end have moved away from places, or have not moved there yet."""
        for act, outcome in zip(self.group, outcomes, strict=True):
            hidden = self._hidden_between(act, there)
            if outcome != "done" and hidden is not None:
                self.run.between[act.target] = hidden

    def _hidden_between(self, act: Act, there: dict[str, Contents | None]) -> Contents | None:
        """Return what is hidden beside a place that an act has begun to replace, until it is complete.

        On a disk that is what was moved away. In a bucket it is what a step is thinned to, as a whole: the
        step itself is replaced object by object.
        """
        if act.made is None:
            return None
        if self.run.disk.kind == "local":
            hidden = None if act.target in there else self.there.get(act.target)
        else:
            hidden = act.made if act.target.startswith("runs/") and there.get(act.target) is None else None
        return hidden if hidden and hidden in beside(act.target, there) else None

    def _ids_between(self, there: dict[str, Contents | None]) -> set[str]:
        """Return the content ids of what is hidden beside sources, until these are complete."""
        hidden = [self._hidden_between(act, there) for act in self.group if act.target.startswith("runs/")]
        earlier = (contents for place, contents in self.run.between.items() if place.startswith("runs/"))
        return {each for contents in (*hidden, *earlier) for each in (contents or {}).values()}

    def _require_restored(self, there: dict[str, Contents | None], outcomes: Sequence[str]) -> None:
        """What was reported as restored is in its place, unless it was retired or thinned there since."""
        for act, outcome in zip(self.group, outcomes, strict=True):
            if act.restores is None or outcome != "done":
                continue
            now = there.get(act.target)
            since = [other.made for other in self.group if other.target == act.target and other is not act]
            retired = act.target not in there and any(other.retires for other in self.group)
            if now not in (act.restores, *filter(None, since)) and not retired:
                raise Broken(f"{act.target} was restored, and is {now}, not {act.restores}")

    def _require_listed(self, tree: Tree) -> None:
        """What processes that have ended left in a bucket is listed by `gc`."""
        server, bucket = self.run.disk.server, self.run.disk.bucket
        left = {path[: found.end()] for path in tree if (found := STAGED.search(path))}
        left |= {upload.key.removeprefix(f"{bucket}/") for upload in server.uploads.values()}
        if not left:
            return
        lag, server.lag_s = server.lag_s, 0.0
        listed = collect(self.run.disk.url("").rstrip("/"), older_than_s=0, dry_run=True)
        server.lag_s = lag
        places = {item.url.removeprefix(f"s3://{bucket}/") for item in listed}
        # The uploads of a staging prefix are listed with it.
        of_prefixes = sum(item.uploads for item in listed)
        unlisted = {path for path in left if path not in places and STAGED.search(path)}
        if unlisted or of_prefixes < len(server.uploads):
            raise Broken(f"gc does not list {sorted(unlisted or left)}: {sorted(places)}")

    def _note_deleted(self, there: dict[str, Contents | None]) -> None:
        """Note what of sources is gone: some place must hold it from now on.

        What was restored under another name is a source, and not gone.
        """
        sources = _sources(there)
        restored: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
        for (place, rows), count in (sources - self.sources).items():
            if place.endswith("-back"):
                restored[place.removesuffix("-back"), rows] = count
        for place, rows in self.sources - sources - restored:
            # Of two steps, or of many, the first is done: see `_require_old_outputs` for the others.
            two_steps = self.run.disk.kind == "bucket" or not self.run.world.exchanges
            acts = [act for act in self.group if act.target == place and two_steps]
            begun = (self._hidden_between(act, there) for act in acts)
            self._owe(place, rows.difference(*(hidden.items() for hidden in begun if hidden)))

    def _owe(self, place: str, rows: Collection[tuple[str, str]]) -> None:
        """Note what a source had: some place must hold it from now on, unless a user said its name."""
        accepted = self.run.accepted.get(place, ())
        self.run.owed |= {
            (place, name, id)
            for name, id in rows
            if not any(fnmatchcase(name.removeprefix("file "), g) for g in accepted)
        }

    def _require_owed(self, tree: Tree, there: dict[str, Contents | None]) -> None:
        run, ids = self.run, ids_in(tree)
        lost = {each for each in run.owed if each[2] not in ids}
        missing = {
            each
            for each in lost
            if self.strict or each not in self.owed or run.disk.url(each[0]) in self.known
        }
        if missing:
            raise Broken(f"lost: {sorted(missing)}")
        run.owed -= lost  # a catalog that knew was lost, and there is no record
        seen, sure = (
            ids_in_sight(tree, rotten=run.rotten),
            vouched(tree, rotten=run.rotten) | self._ids_between(there),
        )
        unseen = {each for each in run.owed - run.unseen if each[2] not in seen}
        if unseen:
            raise Broken(f"in sight of nobody: {sorted(unseen)}")
        unvouched = {each for each in run.owed - run.unvouched if each[2] not in sure}
        if unvouched:
            raise Broken(f"no record of an obligation is beside: {sorted(unvouched)}")

    def _require_replaced(self, there: dict[str, Contents | None]) -> None:
        """What was replaced under an obligation can be restored, until a purge."""
        run = self.run
        if any(act.purges or act.made is None for act in self.group):
            run.replaced = []
            return
        owed = {each[2] for each in self.owed if run.disk.url(each[0]) in self.listed}
        (act, *others) = self.group
        old, new = self.there.get(act.target), there.get(act.target)
        # What is rotten may be unreadable for the product, and not under an obligation.
        alone = self.strict and run.disk.kind == "local" and not others and not run.rotten
        if alone and old and new and old != new and owed & set(old.values()):
            run.replaced.append((act.target, old))
        for place, contents in run.replaced:
            if contents not in beside(place, there):
                raise Broken(f"{place} was replaced, and cannot be restored: {contents}")

    def _recorded(self) -> tuple[frozenset[str], int]:
        """Return the sources of the catalog's obligations, and how many of its conversions have succeeded."""
        with self.run.catalog.reading() as conn:
            listed = frozenset(conn.execute(text("SELECT source FROM obligation")).scalars())
            done = conn.execute(text("SELECT count(*) FROM conversion WHERE state = 'succeeded'"))
            return listed, int(done.scalar_one())

    def _known_sources(self, act: Act) -> frozenset[str]:
        """Return the sources of the obligations that the catalog, or a record at a place, has."""
        above = {act.target, *folders_above(act.target)}
        records = {one.source for one in obligations(self.before) if one.place in above}
        return (self.listed if act.catalog else frozenset()) | records


def _at_sources(there: dict[str, Contents | None]) -> set[str]:
    """Return the content ids that sources hold at their places."""
    return {
        i for p, c in there.items() if p.startswith("runs/") and not is_hidden(p) for i in (c or {}).values()
    }


def _sources(there: dict[str, Contents | None]) -> Counter[tuple[str, frozenset[tuple[str, str]]]]:
    """Return the sources at their places or set aside, by where they belong; what is staged is none."""
    found: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    for place, contents in there.items():
        if contents and logical(place).startswith("runs/") and not is_hidden(logical(place)):
            found[logical(place), frozenset(contents.items())] += 1
    return found
