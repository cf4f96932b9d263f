"""Known faults that are restored into the product, one at a time: the simulation must find each of them.

A mutant replaces a piece of one function's source, or of several where one guard would hide that another is
missing. The seed of a program that finds it is beside it; `tests/simulation/test_simulation.py` runs these
programs, and `make docs` writes the table.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A known fault.

    Attributes:
        what: What is wrong with it, for people.
        where: ``module:function`` or ``module:Class.method``, without ``ckptcore.``.
        old: A piece of the function.
        new: What is there instead.
        seed: Of a program that finds it, below 2000 or of fresh ones that once failed; None if none that
            was run did.
        disk: Where that program runs.
        also: (where, old, new) of other guards that are left out with it, so that it shows.
        only: A piece of what the one check reports that finds it in this program; "" if others would, too.
    """

    what: str
    where: str
    old: str
    new: str
    seed: int | None = None
    disk: str = "local"
    also: tuple[tuple[str, str, str], ...] = ()
    only: str = ""


STAGING = "conversion.staging.local_staging"
WRITER, GATE, PURGE = "store.local_writer", "custody.gate", "operations.retention.purge"
ASIDE, REPLACING = "custody.set_aside", "custody.replacing"

LOOKED = (
    f"{REPLACING}:moving_obligations",
    "if digest_of_files(contents(where, follow=True)) != judged.looks.get(where):",
    "if False:",
)
WRITER_ROW = (f"{REPLACING}:counting_on", "if writer := writer_of_place(conn, place):", "if False:")
COPY_LOCK = (f"{REPLACING}:counting_on", "locks.enter_context(at_rest(place))", "pass")
LOCK_WHEN_READ = (f"{GATE}:_read_apart", "with at_rest(row.uri):", "if True:")
UNLOCKED = (f"{ASIDE}:LocalSetAside.opened", "host.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass")

MUTANTS = {
    # Durability.
    "unsynced-file": Mutant(
        "a file is renamed before its bytes are synced",
        f"{WRITER}:LocalWriter._sync",
        "if not self._in_memory:",
        "if False:",
        seed=1,
    ),
    "unsynced-publish": Mutant(
        "the folder of the destination is not synced after the output is moved there",
        f"{STAGING}:publish_local",
        'sync_folder(".", paths.target.folder_fd)',
        "pass",
        seed=80,
    ),
    "unsynced-record-of-set-aside": Mutant(
        "the record of what is set aside is renamed before it is synced",
        f"{ASIDE}:_written",
        "host.fsync(file.fileno())",
        "pass",
        seed=12,
    ),
    "unsynced-obligation": Mutant(
        "the record of an obligation is renamed before it is synced",
        "custody.obligation_records:_put_local",
        "host.fsync(file.fileno())",
        "pass",
        seed=10,
    ),
    "purged-without-flush": Mutant(
        "what is set aside is moved without syncing either folder",
        f"{ASIDE}:LocalSetAside.move_in",
        "host.fsync(self._folder_fd)\n        host.fsync(self._parent_fd)",
        "pass",
        seed=600,
    ),
    "unsynced-name-of-an-obligation": Mutant(
        "no folder is synced after the record of an obligation is put there",
        "custody.obligation_records:_put_local",
        "host.fsync(folder)",
        "pass",
        also=(("custody.obligation_records:_put_local", "host.fsync(above)", "pass"),),
        seed=12,
    ),
    # Publishing.
    "no-exchange": Mutant(
        "an output is replaced in two steps where one would do",
        f"{STAGING}:_move",
        "if _exchange(staged, target):",
        "if False:",
        seed=308,
    ),
    "removed-before-move": Mutant(
        "the old output is removed before the new one is in its place",
        f"{STAGING}:_move",
        "if _exchange(staged, target):",
        "_discard(replace(paths, aside=target), replaces.inventory)\n    if _exchange(staged, target):",
        seed=4,
    ),
    "move-without-record": Mutant(
        "an output is moved before the record of its publication is written",
        f"{STAGING}:publish_local",
        "note(staging, publication)\n        _move(output, paths, publication.replaces)",
        "_move(output, paths, publication.replaces)\n        note(staging, publication)",
        seed=51,
    ),
    "old-output-not-restored": Mutant(
        "a resumed run removes the old output, whether or not the new one is in its place",
        f"{STAGING}:finish_interrupted_publish",
        "if record.identity is not None and _inode(target) == record.identity[:2]:",
        "if True:",
        seed=488,
    ),
    "old-output-forgotten": Mutant(
        "a resumed run does not look for an exchanged output",
        f"{STAGING}:old_output",
        "return None if linked or _is_empty(exchanged) else exchanged",
        "return None",
        seed=160,
    ),
    "no-lock": Mutant(
        "a staging folder is used without a lock",
        f"{STAGING}:LocalStaging._lock_file",
        "host.flock(fd, kind | fcntl.LOCK_NB)",
        "pass",
        seed=247,
    ),
    "lock-of-a-removed-folder": Mutant(
        "a lock is not looked at again, nor when the output is published: its folder may have been removed",
        f"{STAGING}:LocalStaging._lock_file",
        "if named is not None and os.path.samestat(named, os.fstat(fd)) and self._home.in_place():",
        "if True:",
        also=(
            (
                f"{STAGING}:LocalStaging.publish",
                "staged_output is None or not self._home.in_place()",
                "False",
            ),
        ),
        seed=776,
    ),
    "resume-trusts-names": Mutant(
        "a resumed run takes a staged file for written without reading it, or looking at its times",
        "execution.receipts:is_intact",
        "return has_digest(files, receipt.path, receipt.nbytes, (receipt.digest,))",
        "return True",
        also=(
            (
                "execution.reuse:earlier",
                "if receipt.stamp is not None and receipt.stamp == current_stamp:",
                "if True:",
            ),
        ),
        seed=1054,
    ),
    "changed-destination-is-replaced": Mutant(
        "a destination is not looked at again before it is replaced, nor before it is removed",
        f"{STAGING}:_move",
        "if name is not None:",
        "if False:",
        also=(
            (f"{STAGING}:_remove_aside", "if not strangers or (", "if True or ("),
            (f"{STAGING}:_remove_recorded", "if not same_content(", "if False and not same_content("),
            (
                f"{STAGING}:_discard",
                'elif same_content(inventory.get("")',
                'elif True or same_content(inventory.get("")',
            ),
        ),
        seed=7,
    ),
    "old-output-not-kept": Mutant(
        "an old output that was to be set aside is removed after it was moved away",
        f"{STAGING}:_remove_aside",
        "if not strangers and replaces.home:",
        "if False:",
        seed=27,
    ),
    "plan-of-another": Mutant(
        "a run goes on with whatever plan is staged for its destination, of the same source or not",
        "conversion.pipeline:_resume",
        "same = saved_digest(staging) == plan.digest and load_stamps(staging.plan) == stamps",
        "same = saved_digest(staging) is not None",
        also=(("conversion.pipeline:_resume", "staging.check_staged_plan(composed, stamps)", "pass"),),
        seed=3,
        only="is not the new output",
    ),
    "row-asked-for-too-late": Mutant(
        "a conversion asks behind its publication whether the catalog counts it as ended, and not before",
        "conversion.publish:_publish_staged",
        "    staging.publish(publishing.publication(), commit, single=plan.target.single is not None)\n",
        "    staging.publish(publishing.publication(), commit, single=plan.target.single is not None)\n"
        "    from ckptcore.custody.replacing import require_row; require_row(publishing.writer)\n",
        also=((f"{REPLACING}:admit", "    require_row(writer)\n", ""),),
        seed=40,
        only="was refused, and changed",
    ),
    # Custody.
    "gate-open": Mutant("an only copy may be replaced", f"{GATE}:judge", "if missing:", "if False:", seed=38),
    "gate-trusts-rows": Mutant(
        "a copy counts because the catalog says what it held, unread",
        f"{GATE}:_elsewhere",
        "copy = attempt(read_apart, row)",
        "copy = (frozenset(left) if row.uri != read_apart.args[1] else frozenset(), '')",
        also=(LOOKED,),
        seed=38,
    ),
    "gate-forgets-the-unread": Mutant(
        "what cannot be read of a place counts as nothing",
        f"{GATE}:judge",
        "None if read_contents.readable else _unread_at(catalog, place)",
        "None",
        seed=1810275,
    ),
    "gate-proves-itself": Mutant(
        "a place is a copy of itself",
        f"{GATE}:_read_apart",
        "require_apart(place, things, row.uri, files)",
        "pass",
        seed=53,
    ),
    "gate-same-place": Mutant(
        "a place under another name, or inside, counts as another place, and so do its own files",
        f"{GATE}:_read_apart",
        "if relation(identify(place), identify(row.uri)) is not Relation.APART:",
        "if False:",
        also=((f"{GATE}:_read_apart", "require_apart(place, things, row.uri, files)", "pass"),),
        seed=53,
    ),
    "copy-of-links": Mutant(
        "a copy counts although links lead to its bytes, beside which there is no record",
        "custody.distinct:require_own_files",
        "if os.path.commonpath([folder, real_path]) != folder:",
        "if False:",
        seed=318,
    ),
    "gate-counts-on-a-target": Mutant(
        "a copy counts although a conversion is about to replace it, and is not locked",
        f"{GATE}:_read_apart",
        "if writer_of_place(conn, row.uri) is not None:",
        "if False:",
        also=(LOCK_WHEN_READ, COPY_LOCK, WRITER_ROW),
        seed=0,
    ),
    "gate-without-records": Mutant(
        "obligations in records beside a place are not read",
        f"{GATE}:obligations_at",
        "[obligations_beside(place), *(read_obligations(folder) for folder in sorted(filter(None, inside)))]",
        "[]",
        seed=58,
    ),
    "gate-without-catalog": Mutant(
        "obligations of the catalog count only where they were recorded",
        f"{GATE}:obligations_at",
        "listed[key] = obligation_of[key] if isinstance(obligation, CkptError) else obligation",
        "pass",
        seed=19,
    ),
    "not-admitted": Mutant(
        "an output is replaced without asking what counts on it",
        "conversion.publish:_admitted",
        "if not replaces.inventory:",
        "if True:",
        seed=27,
    ),
    "old-output-not-set-aside": Mutant(
        "an output under an obligation is removed at once",
        f"{REPLACING}:_admitted",
        'return "" if local_path(place) is None else set_aside(catalog, place)',
        'return ""',
        seed=27,
    ),
    "obligation-stays-behind": Mutant(
        "an obligation does not move with what it counts on",
        f"{REPLACING}:moving_obligations",
        "if judged.moves else ()",
        "if False else ()",
        seed=295,
    ),
    "record-stays-behind": Mutant(
        "the record of an obligation does not move with what it counts on",
        f"{REPLACING}:moving_obligations",
        "[(current_obligations | new)[key] for key, places in left.items() if where in places]",
        "[]",
        seed=295,
    ),
    "no-obligation": Mutant(
        "a purge puts no obligation into the catalog",
        f"{PURGE}:_give_to_child",
        "obligations.put(conn, row, obligation.packed)",
        "pass",
        seed=5,
    ),
    "no-obligation-at-all": Mutant(
        "a purge puts no obligation on the copy",
        f"{PURGE}:_give_to_child",
        "obligations.put(conn, row, obligation.packed)",
        "drop_obligations(child.uri, [row.id])",
        seed=5,
        only="no record of an obligation is beside",
    ),
    "child-not-read": Mutant(
        "a purge does not compare what the copy holds with what it must",
        f"{PURGE}:_read_child",
        "if missing:",
        "if False:",
        seed=1207,
    ),
    "child-not-looked-at-again": Mutant(
        "a purge does not look at the copy again within its transaction",
        f"{PURGE}:_give_to_child",
        "require_files(uri, before, files_now(detail))",
        "pass",
        seed=655,
    ),
    "child-being-written": Mutant(
        "a purge counts on a copy that a conversion is about to replace, and does not lock it",
        *WRITER_ROW,
        also=(COPY_LOCK,),
        seed=268,
    ),
    "child-not-locked": Mutant(
        "whoever counts on a copy does not lock its staging folder", *COPY_LOCK, seed=268
    ),
    "copy-not-locked": Mutant(
        "an overwrite counts on a copy that a stopped process goes on to replace",
        *COPY_LOCK,
        also=(LOCK_WHEN_READ,),
        seed=730441,
    ),
    "copy-not-looked-at-again": Mutant(
        "an overwrite counts on a copy as it was when the overwrite was planned", *LOOKED, seed=931
    ),
    "purge-before-decision": Mutant(
        "a removal begins before it is recorded as decided, and without a lock",
        f"{PURGE}:_decide",
        "if not set_aside.purging(conn, aside.home):",
        "if False:",
        also=(UNLOCKED,),
        seed=23,
    ),
    "purged-unjudged": Mutant(
        "what a conversion has set aside is purged without asking what counts on it",
        f"{PURGE}:purge_one",
        "judged = judge(catalog, aside.place, verify_settings, at_rest, record.uri, counted=expected)",
        "from ckptcore.custody.judged import Judged; judged = Judged()",
        seed=106,
    ),
    "unlisted-is-removed": Mutant(
        "what a killed run had set aside is removed instead of restored",
        f"{PURGE}:_unlisted",
        "aside.restore()\n    return None",
        "aside.remove()\n    return None",
        seed=806,
    ),
    "restored-while-purged": Mutant(
        "what is being purged may be restored, without a lock",
        f"{PURGE}:restore",
        "if row is not None and row.purging:",
        "if False:",
        also=(UNLOCKED,),
        seed=23,
    ),
    "half-restored": Mutant(
        "what is partly removed may be restored, as decided or not",
        f"{PURGE}:restore",
        "if partly_gone(aside):",
        "if False:",
        also=((f"{PURGE}:restore", "if row is not None and row.purging:", "if False:"),),
        seed=81,
    ),
    "record-forgotten-first": Mutant(
        "the record of what is set aside is removed before that is restored",
        f"{ASIDE}:LocalSetAside.restore",
        "if self.holds:",
        "_forget(os.path.basename(self.home), self._folder_fd, self._parent_fd)\n    if self.holds:",
        seed=83,
    ),
    "restored-over-another": Mutant(
        "what is set aside is restored over what is at its place now",
        f"{ASIDE}:LocalSetAside.restore",
        "rename_new(self.inside, DirEntryAt(self._parent_fd, name, uri or self.record.uri))",
        "host.rename(self._name, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._parent_fd)",
        seed=27,
    ),
    "restored-in-name-only": Mutant(
        "what is set aside is recorded as restored, and stays aside",
        f"{PURGE}:restore",
        "aside.restore(target)",
        "pass",
        seed=12,
        only="was restored, and is",
    ),
    "writer-asked-before-the-record": Mutant(
        "who counts on a copy asks for writers before the record is beside it, not within the transaction",
        f"{REPLACING}:counting_on",
        "    with catalog.writing():  # records beside copies are changed by one process at a time",
        "    with catalog.reading() as conn:\n        for place in obligations_on:\n"
        "            if first := writer_of_place(conn, place):\n                raise Busy(first)\n"
        "    for place in obligations_on:\n        require_same(place)\n"
        "    with catalog.writing():",
        also=(
            WRITER_ROW,
            COPY_LOCK,
            (
                f"{REPLACING}:counting_on",
                "            require_same(place)\n        with",
                "            pass\n        with",
            ),
        ),
        seed=77,
    ),
    # Claims and leases.
    "claim-not-exclusive": Mutant(
        "a claim is taken although another process has it",
        "catalog.claims:_is_settled",
        "busy = claim.owner != storable(owner) and claim.is_in_use(now)",
        "busy = False",
        seed=218,
    ),
    "claim-without-fence": Mutant(
        "a process that was stopped ends the claim that another one has taken",
        "catalog.claims:_owned",
        "Claim.id == claim.id, Claim.attempts == claim.attempts, Claim.state == TAKEN",
        "Claim.id == claim.id, Claim.state == TAKEN",
        seed=232,
    ),
    "lease-without-margin": Mutant(
        "a lease counts to its very end for its holder, and not a moment longer for others",
        "store.objects.lease:Lease.require",
        "if holder is not None and self._clock() < holder.until - self._ttl_s / 4:",
        "if holder is not None and self._clock() < holder.until:",
        also=(
            ("store.objects.lease:Holder.is_alive", "if now > self.until + _SKEW_S:", "if now > self.until:"),
        ),
        disk="bucket",
        seed=434,
    ),
    "lease-not-asked": Mutant(
        "a process does not ask whether it still has its lease before it changes what others see",
        "store.objects.lease:Lease.require",
        "    self.prove()",
        "    return self.prove()",
        disk="bucket",
        seed=344,
    ),
    "lease-of-the-living-taken": Mutant(
        "a lease is taken over although its process lives, and renewed it in time",
        "store.objects.lease:Holder.is_alive",
        "if now > self.until + _SKEW_S:",
        "if True:",
        disk="bucket",
        seed=16,
    ),
    "index-before-data": Mutant(
        "the file that makes a folder loadable is put into its place before the tensors",
        "conversion.staging.remote_publication:publish_remote",
        "        _put_all(target, tensors if uploaded else beside)",
        "        _put_all(target, [*last, *end])\n        _put_all(target, tensors if uploaded else beside)",
        disk="bucket",
        seed=8,
    ),
    "removed-while-loadable": Mutant(
        "the tensors of an old output are replaced before what makes it loadable is removed",
        "conversion.staging.remote_publication:publish_remote",
        "        if publication.step == REMOVING:",
        "        if False:",
        disk="bucket",
        seed=1,
    ),
    "hold-ignored": Mutant(
        "a source on hold may go",
        "operations.retention.setting_aside:require_untied",
        "if why:",
        "if False:",
        seed=145,
    ),
    "retired-before-moved": Mutant(
        "a source is set aside without comparing it with what was looked at",
        f"{ASIDE}:LocalSetAside.require_approved",
        "if name is not None:",
        "if False:",
        seed=234,
    ),
}


def changed(mutant: Mutant) -> list[tuple[Any, Any]]:
    """Return a mutant's functions as they are, and with the fault; raise `ValueError` if one does not fit."""
    pieces: dict[str, list[tuple[str, str]]] = {}
    for where, old, new in ((mutant.where, mutant.old, mutant.new), *mutant.also):
        pieces.setdefault(where, []).append((old, new))
    return [_changed(where, changes) for where, changes in pieces.items()]


def _changed(where: str, changes: Sequence[tuple[str, str]]) -> tuple[Any, Any]:
    module_name, _, path = where.partition(":")
    module = importlib.import_module(f"ckptcore.{module_name}")
    function: Any = module
    for part in path.split("."):
        function = getattr(function, part)
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{where} has {source.count(old)} times: {old}")
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    code = f"from __future__ import annotations\n{source}"
    exec(compile(code, f"<{where}>", "exec"), dict(vars(module)), made)
    fresh = inspect.unwrap(getattr(made[function.__name__], "__func__", made[function.__name__]))
    return function, fresh


def mutate(name: str) -> None:
    """Put a known fault into the product, for as long as this process lives; "" for none."""
    for function, fresh in changed(MUTANTS[name]) if name else ():
        function.__code__ = fresh.__code__  # wherever it was imported
