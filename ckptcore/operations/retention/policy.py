"""Decide which steps of a run are kept, with reasons. Pure functions on lists."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptcore.catalog.training_rows import GOALS
from ckptcore.errors import UsageError


@dataclass(frozen=True, slots=True)
class KeepBest:
    """A rule: keep the steps of a run with the best values of a metric.

    Attributes:
        count: How many steps.
        metric: Its name.
        goal: ``min`` or ``max``.
    """

    count: int
    metric: str
    goal: str = "min"

    @classmethod
    def of(cls, text: str) -> KeepBest:
        """Return the rule that a text states; raise `UsageError` if it states none.

        >>> KeepBest.of("3:eval_loss"), KeepBest.of("1:mmlu:max").goal
        (KeepBest(count=3, metric='eval_loss', goal='min'), 'max')
        """
        count, _, rest = text.partition(":")
        metric, colon, goal = rest.rpartition(":")
        if not colon or goal not in GOALS:
            metric, goal = rest, "min"
        if not (count.isascii() and count.isdigit() and int(count)) or not metric:
            raise UsageError(
                f"keep_best must be N:METRIC, with N at least 1 (got {text!r})",
                hint="such as 3:eval_loss, or 3:mmlu:max where the highest value is the best",
            )
        return cls(int(count), metric, goal)

    def __str__(self) -> str:
        return f"{self.count} best by {self.metric}"


# (run, rule) -> its best steps; none where no step of the run has the metric.
BestSteps = Mapping[tuple[str, KeepBest], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy.

    Attributes:
        keep_last: The number of newest steps to keep of every run.
        keep_every: Keep every step that this number divides, too.
        keep_best: Keep the best steps by these metrics, too.
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: tuple[KeepBest, ...] = ()

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise UsageError(f"--keep-last must be at least 1 (got {self.keep_last})")
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(f"--keep-every must be at least 1 (got {self.keep_every})")


@dataclass(frozen=True, slots=True)
class RetentionEntry:
    """One checkpoint of a run.

    tags, aliases, holds: a user's reasons to keep it. promoted: aliases of what is made from it.
    """

    id: str
    run: str
    step: int | None
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    promoted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on one checkpoint. keep: whether it is kept. why: all reasons."""

    entry: RetentionEntry
    keep: bool
    why: tuple[str, ...]


def decide(
    entries: Iterable[RetentionEntry],
    policy: Policy,
    own_policies: Mapping[str, Policy] | None = None,
    steps: Mapping[str, Iterable[int]] | None = None,
    best: BestSteps | None = None,
) -> tuple[Verdict, ...]:
    """Return a verdict for each, in order. Checkpoints without a step, or with a user's reason, are kept.

    Where a metric decides, and no step of the run has it, all of them are kept.

    Args:
        entries: The checkpoints.
        policy: The policy.
        own_policies: Id -> its own policy, of checkpoints that have one.
        steps: Run -> its newest steps, if the checkpoints are only a part of it.
        best: The best steps of runs, for all rules of the policies.
    """
    entries = tuple(entries)
    if steps is None:
        steps = steps_of(entries)
    ordered = {run: sorted(run_steps) for run, run_steps in steps.items()}
    newest: dict[tuple[str, int], frozenset[int]] = {}
    verdicts = []
    for entry in entries:
        rule = (own_policies or {}).get(entry.id, policy)
        key = entry.run, rule.keep_last
        if key not in newest:
            newest[key] = frozenset(ordered.get(entry.run, [])[-rule.keep_last :])
        verdicts.append(_verdict(entry, rule, newest[key], best or {}))
    return tuple(verdicts)


def steps_of(entries: Iterable[RetentionEntry]) -> dict[str, set[int]]:
    """Return the steps of each run."""
    steps: dict[str, set[int]] = defaultdict(set)
    for entry in entries:
        if entry.step is not None:
            steps[entry.run].add(entry.step)
    return steps


def user_reasons(entry: RetentionEntry) -> tuple[str, ...]:
    """Return the users' reasons to keep a checkpoint, whatever the policy."""
    return (
        *(f"tagged {tag}" for tag in entry.tags),
        *(f"alias {name}" for name in entry.aliases),
        *(f"source of alias {name}" for name in entry.promoted),
        *(f"held: {reason}" for reason in entry.holds),
    )


def _verdict(entry: RetentionEntry, policy: Policy, newest: frozenset[int], best: BestSteps) -> Verdict:
    why = list(user_reasons(entry))
    if entry.step is None:
        why.append("no step is known")
    elif entry.step in newest:
        why.append(f"one of the last {policy.keep_last}")
    if entry.step is not None and policy.keep_every is not None and entry.step % policy.keep_every == 0:
        why.append(f"a step of every {policy.keep_every}")
    for rule in policy.keep_best:
        steps = best.get((entry.run, rule), frozenset())
        if not steps:
            why.append(f"no step of {entry.run} has the metric {rule.metric}")
        elif entry.step in steps:
            why.append(f"one of the {rule}")
    if why:
        return Verdict(entry, True, tuple(why))
    not_every = f", not of every {policy.keep_every}" if policy.keep_every else ""
    ranked = "".join(f", not one of the {rule}" for rule in policy.keep_best)
    return Verdict(entry, False, (f"not one of the last {policy.keep_last}{not_every}{ranked}",))
