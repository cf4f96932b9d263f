"""Retention: which steps of a run are kept, and why? Pure: a list in, the list with reasons out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ckptcore.errors import UsageError


@dataclass(frozen=True, slots=True)
class Policy:
    """keep_last: this many of the newest steps of every run. keep_every: and every step that it divides."""

    keep_last: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(f"--keep-last {self.keep_last} would keep no newest one", hint="1 or more")
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"--keep-every {self.keep_every} is no number of steps", hint="1 or more")


@dataclass(frozen=True, slots=True)
class RetentionEntry:
    """One checkpoint. run: whose steps it is one of. tags, aliases, holds: by which people hold on to it."""

    id: str
    run: str
    step: int | None
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """keep: whether it stays. why: every reason."""

    entry: RetentionEntry
    keep: bool
    why: tuple[str, ...]


def decide(entries: Iterable[RetentionEntry], policy: Policy) -> tuple[Verdict, ...]:
    """A verdict for each, in order. Nothing is let go that has no step, or that somebody holds on to."""
    entries = tuple(entries)
    steps: dict[str, set[int]] = defaultdict(set)
    for entry in entries:
        if entry.step is not None:
            steps[entry.run].add(entry.step)
    newest = {run: frozenset(sorted(found)[-policy.keep_last :]) for run, found in steps.items()}
    return tuple(_verdict(entry, policy, newest.get(entry.run, frozenset())) for entry in entries)


def held(entry: RetentionEntry) -> tuple[str, ...]:
    """Why people want it kept, whatever the policy."""
    return (
        *(f"tagged {tag}" for tag in entry.tags),
        *(f"alias {name}" for name in entry.aliases),
        *(f"held: {reason}" for reason in entry.holds),
    )


def _verdict(entry: RetentionEntry, policy: Policy, newest: frozenset[int]) -> Verdict:
    why = list(held(entry))
    if entry.step is None:
        why.append("no step is known")
    elif entry.step in newest:
        why.append(f"one of the last {policy.keep_last}")
    if entry.step is not None and policy.keep_every is not None and entry.step % policy.keep_every == 0:
        why.append(f"a step of every {policy.keep_every}")
    if why:
        return Verdict(entry, True, tuple(why))
    every = f", not of every {policy.keep_every}" if policy.keep_every else ""
    return Verdict(entry, False, (f"not one of the last {policy.keep_last}{every}",))
