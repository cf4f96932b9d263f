"""Known faults that are restored into the product, one at a time: the simulation must find each of them.

A mutant replaces a piece of one function's source. The seed of the first program that finds it is beside
it; `tests/simulation/test_simulation.py` runs these programs, and `make docs` writes the table.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
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
        seed: Of the first program that finds it, from 0 on; None if none of those that were run did.
        disk: Where that program runs.
    """

    what: str
    where: str
    old: str
    new: str
    seed: int | None = None
    disk: str = "local"


PUBLICATION, STAGING = "conversion.local_publication", "conversion.local_staging"
WRITER, GATE, PURGE = "store.local_writer", "custody.gate", "operations.purge"
ASIDE, REPLACING = "custody.set_aside", "custody.replacing"

MUTANTS = {
    # Durability.
    "unsynced-file": Mutant(
        "a file is renamed before its bytes are synced",
        f"{WRITER}:LocalWriter._sync",
        "if not self._in_memory:",
        "if False:",
        seed=4,
    ),
    "unsynced-publish": Mutant(
        "the folder of the destination is not synced after the output is moved there",
        f"{PUBLICATION}:publish_local",
        'sync_folder(".", paths.target.at)',
        "pass",
    ),
    "unsynced-record-of-set-aside": Mutant(
        "the record of what is set aside is renamed before it is synced",
        f"{ASIDE}:_written",
        "host.fsync(file.fileno())",
        "pass",
    ),
    "unsynced-obligation": Mutant(
        "the record of an obligation is renamed before it is synced",
        "custody.obligation_records:_put_local",
        "host.fsync(file.fileno())",
        "pass",
    ),
    "purged-without-flush": Mutant(
        "what is set aside is moved without syncing either folder",
        f"{ASIDE}:LocalSetAside.move_in",
        "host.fsync(self._above)",
        "pass",
    ),
    # Publishing.
    "no-exchange": Mutant(
        "an output is replaced in two steps where one would do",
        f"{PUBLICATION}:_move",
        "if _exchange(staged, target):",
        "if False:",
    ),
    "removed-before-move": Mutant(
        "the old output is removed before the new one is in its place",
        f"{PUBLICATION}:_move",
        "if _exchange(staged, target):",
        "_discard(replace(paths, aside=target), replaces.inventory)\n    if _exchange(staged, target):",
        seed=3,
    ),
    "move-without-record": Mutant(
        "an output is moved before the record of its publication is written",
        f"{PUBLICATION}:publish_local",
        "note(staging, publication)\n        _move(output, paths, publication.replaces)",
        "_move(output, paths, publication.replaces)\n        note(staging, publication)",
    ),
    "old-output-not-restored": Mutant(
        "a resumed run removes the old output, whether or not the new one is in its place",
        f"{PUBLICATION}:conclude",
        "if record.identity is not None and _inode(target) == record.identity[:2]:",
        "if True:",
    ),
    "old-output-forgotten": Mutant(
        "a resumed run does not look for an exchanged output",
        f"{PUBLICATION}:old_output",
        "return None if linked or _is_empty(exchanged) else exchanged",
        "return None",
    ),
    "no-lock": Mutant(
        "a staging folder is used without a lock",
        f"{STAGING}:LocalStaging._lock_file",
        "host.flock(fd, kind | fcntl.LOCK_NB)",
        "pass",
    ),
    "lock-of-a-removed-folder": Mutant(
        "a lock is not looked at again: its folder may have been removed by the run before",
        f"{STAGING}:LocalStaging._lock_file",
        "if named is not None and os.path.samestat(named, os.fstat(fd)) and self._home.in_place():",
        "if True:",
    ),
    "published-without-its-last-file": Mutant(
        "an output is read back before its files are compared with their receipts, and not after",
        "conversion.publish:_publish_staged",
        "_require_written(staging, plan, receipts, iter(()))",
        "pass",
    ),
    "resume-trusts-names": Mutant(
        "a resumed run takes a staged file for written without reading it",
        "execution.receipts:is_intact",
        "return has_digest(files, receipt.path, receipt.nbytes, (receipt.digest,))",
        "return True",
    ),
    "changed-destination-is-replaced": Mutant(
        "a destination is not looked at again right before it is replaced",
        f"{PUBLICATION}:_move",
        "if name is not None:",
        "if False:",
    ),
    "staging-in-place-removed": Mutant(
        "a staging folder is removed without being renamed first",
        f"{STAGING}:LocalStaging.remove",
        'self._home.remove(f"{self._home.name}.gone-{os.getpid()}-{host.now_ns():x}")',
        "self.clear()",
    ),
    # Custody.
    "gate-open": Mutant("an only copy may be replaced", f"{GATE}:judge", "if missing:", "if False:"),
    "gate-trusts-rows": Mutant(
        "a copy counts because the catalog says what it held, unread",
        f"{GATE}:_elsewhere",
        "ids = attempt(_read_apart, catalog, row, place, things, specs, settings)",
        "ids = frozenset(left) if row.uri != place else frozenset()",
    ),
    "gate-proves-itself": Mutant(
        "a place is a copy of itself",
        f"{GATE}:_read_apart",
        "require_apart(place, things, row.uri, files)",
        "pass",
    ),
    "gate-same-place": Mutant(
        "a place under another name, or inside, counts as another place",
        f"{GATE}:_read_apart",
        "if relation(identify(place), identify(row.uri)) is not Relation.APART:",
        "if False:",
    ),
    "gate-counts-on-a-target": Mutant(
        "a copy counts although a conversion is about to replace it",
        f"{GATE}:_read_apart",
        "if writer_of_place(conn, row.uri) is not None:",
        "if False:",
    ),
    "judged-once": Mutant(
        "what may be replaced is decided when it is planned, and not again",
        f"{REPLACING}:admit",
        "or duties_beside(place)",
        "",
    ),
    "not-admitted": Mutant(
        "an output is replaced without asking what counts on it",
        "conversion.publish:_admitted",
        "if not replaces.inventory:",
        "if True:",
    ),
    "old-output-not-set-aside": Mutant(
        "an output under an obligation is removed at once",
        f"{REPLACING}:admit",
        'return "" if in_place else _set_aside(catalog, place)',
        'return ""',
    ),
    "obligation-stays-behind": Mutant(
        "an obligation does not move with what it counts on",
        f"{REPLACING}:move_obligations",
        "if not moves:",
        "if True:",
    ),
    "no-obligation": Mutant(
        "a purge puts no obligation into the catalog",
        f"{PURGE}:_give_to_child",
        "obligations.put(conn, row, duty.packed)",
        "pass",
    ),
    "no-obligation-at-all": Mutant(
        "a purge puts no obligation on the copy",
        f"{PURGE}:_give_to_child",
        "obligations.put(conn, row, duty.packed)",
        "drop_duties(child.uri, [row.id])",
    ),
    "child-not-read": Mutant(
        "a purge does not compare what the copy holds with what it must",
        f"{PURGE}:_read_child",
        "if missing:",
        "if False:",
    ),
    "child-not-looked-at-again": Mutant(
        "a purge does not look at the copy again within its transaction",
        f"{PURGE}:_give_to_child",
        "require_files(child.uri, before, files_now(detail))",
        "pass",
    ),
    "child-being-written": Mutant(
        "a purge counts on a copy that a conversion is about to replace",
        f"{PURGE}:_require_at_rest",
        "if writer := writer_of_place(conn, child.uri):",
        "if False:",
    ),
    "child-not-locked": Mutant(
        "a purge does not lock the copy's staging folder",
        f"{PURGE}:_give_to_child",
        "with open_staging(child.uri).lock(shared=True):",
        "if True:",
    ),
    "purge-before-decision": Mutant(
        "a removal begins before it is recorded as decided",
        f"{PURGE}:_decide",
        "if not set_aside.purging(conn, aside.home):",
        "if False:",
    ),
    "unlisted-is-removed": Mutant(
        "what a killed run had set aside is removed instead of restored",
        f"{PURGE}:_unlisted",
        "aside.restore()\n    return None",
        "aside.remove()\n    return None",
    ),
    "restored-while-purged": Mutant(
        "what is being purged may be restored",
        f"{PURGE}:restore",
        "if row is not None and row.purging:",
        "if False:",
    ),
    "half-restored": Mutant(
        "what is partly removed may be restored", f"{PURGE}:restore", "if partly_gone(aside):", "if False:"
    ),
    "set-aside-unlocked": Mutant(
        "what is set aside is opened without a lock",
        f"{ASIDE}:LocalSetAside.opened",
        "host.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
    ),
    "restored-over-another": Mutant(
        "what is set aside is restored over what is at its place now",
        f"{ASIDE}:LocalSetAside.restore",
        "rename_new(self.inside, Spot(self._above, name, uri or self.record.uri))",
        "host.rename(self._name, name, src_dir_fd=self._at, dst_dir_fd=self._above)",
    ),
    "hold-ignored": Mutant(
        "a source on hold may go", "operations.setting_aside:require_untied", "if why:", "if False:"
    ),
    "retired-before-moved": Mutant(
        "a source is set aside without comparing it with what was looked at",
        f"{ASIDE}:LocalSetAside.require_approved",
        "if name is not None:",
        "if False:",
    ),
}


def changed(mutant: Mutant) -> tuple[Any, Any]:
    """Return the function of a mutant as it is, and with its fault; raise `ValueError` if it does not fit."""
    module_name, _, path = mutant.where.partition(":")
    module = importlib.import_module(f"ckptcore.{module_name}")
    function: Any = module
    for part in path.split("."):
        function = getattr(function, part)
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.where} has {source.count(mutant.old)} times: {mutant.old}")
    made: dict[str, Any] = {}
    code = f"from __future__ import annotations\n{source.replace(mutant.old, mutant.new)}"
    exec(compile(code, f"<{mutant.where}>", "exec"), dict(vars(module)), made)
    fresh = inspect.unwrap(getattr(made[function.__name__], "__func__", made[function.__name__]))
    return function, fresh


def mutate(name: str) -> None:
    """Put a known fault into the product, for as long as this process lives; "" for none."""
    if name:
        function, fresh = changed(MUTANTS[name])
        function.__code__ = fresh.__code__  # wherever it was imported
