"""Test that retention keeps what the policy or a user keeps, and nothing without a reason."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import UsageError
from ckptcore.operations.retention.policy import KeepBest, Policy, RetentionEntry, decide
from ckptcore.operations.retention.root_retention import checked

names = st.lists(st.sampled_from(["a", "b"]), max_size=1).map(tuple)
entries = st.lists(
    st.builds(
        RetentionEntry,
        id=st.uuids().map(str),
        run=st.sampled_from(["r", "s"]),
        step=st.none() | st.integers(0, 60),
        tags=names,
        aliases=names,
        holds=names,
    ),
    max_size=20,
)
policies = st.builds(Policy, st.integers(1, 5), st.none() | st.integers(1, 20))


@given(entries, policies)
def test_every_verdict_follows_from_its_reasons(found, policy):
    verdicts = decide(found, policy)
    assert [v.entry for v in verdicts] == found
    steps = defaultdict(set)
    for entry in found:
        if entry.step is not None:
            steps[entry.run].add(entry.step)
    for verdict in verdicts:
        entry = verdict.entry
        assert verdict.why
        newer = {s for s in steps[entry.run] if entry.step is not None and s > entry.step}
        keep = (
            entry.step is None
            or len(newer) < policy.keep_last
            or (policy.keep_every is not None and entry.step % policy.keep_every == 0)
            or bool(entry.tags or entry.aliases or entry.holds)
        )
        assert verdict.keep == keep


@given(entries, policies)
def test_the_newest_of_every_run_stays(found, policy):
    kept = {(v.entry.run, v.entry.step) for v in decide(found, policy) if v.keep}
    for run in {e.run for e in found if e.step is not None}:
        newest = max(e.step for e in found if e.run == run and e.step is not None)
        assert (run, newest) in kept


@given(entries, policies, policies)
def test_a_stricter_policy_keeps_no_more(found, policy, other):
    strict = Policy(min(policy.keep_last, other.keep_last), policy.keep_every)
    kept = {v.entry.id for v in decide(found, policy) if v.keep}
    assert {v.entry.id for v in decide(found, strict) if v.keep} <= kept


@given(entries, policies)
def test_a_second_run_deletes_nothing_else(found, policy):
    kept = [v.entry for v in decide(found, policy) if v.keep]
    assert all(v.keep for v in decide(kept, policy))


@pytest.mark.parametrize("given", [(0, None), (-1, None), (1, 0)])
def test_policies_that_make_no_sense(given):
    with pytest.raises(UsageError):
        Policy(*given)


def test_reasons_as_text():
    found = [RetentionEntry("1", "r", 1), RetentionEntry("2", "r", 2, ("best",)), RetentionEntry("3", "r", 3)]
    whys = [v.why for v in decide(found, Policy(1, 10))]
    assert whys == [("not one of the last 1, not of every 10",), ("tagged best",), ("one of the last 1",)]


def test_the_best_steps_by_a_metric_are_kept():
    entries = [RetentionEntry(str(n), "r", n) for n in range(5)]
    rule = KeepBest.of("2:loss")
    policy = Policy(1, None, (rule,))
    verdicts = decide(entries, policy, best={("r", rule): frozenset({1, 2})})
    assert [v.entry.step for v in verdicts if v.keep] == [1, 2, 4]
    assert [v.why for v in verdicts[1:3]] == [("one of the 2 best by loss",)] * 2
    assert verdicts[0].why == ("not one of the last 1, not one of the 2 best by loss",)
    # Where no step has it, it is not known which are the best.
    assert all(v.keep for v in decide(entries, policy))
    assert "no step of r has the metric loss" in decide(entries, policy)[0].why


@pytest.mark.parametrize("text", ["loss", "0:loss", "x:loss", "3:", "-1:loss", "3"])
def test_a_rule_of_a_metric_that_is_none(text):
    with pytest.raises(UsageError, match="N:METRIC"):
        KeepBest.of(text)
    with pytest.raises(UsageError, match="N:METRIC"):
        checked({"keep_best": [text]})
