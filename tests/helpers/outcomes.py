"""Check that the answer of one command is documented, and that its resource use is bounded."""

from __future__ import annotations

from typing import Any

from driver import GIB, Outcome

from ckptcore.errors import FINDINGS, error_classes

CODES = {c.code: c.exit_code for c in error_classes()}
BUDGET = 256 << 20
# The interpreter, torch and what the forked server holds, plus the budget.
PEAK = BUDGET + (700 << 20)
SECONDS = 120.0  # a hang; a call takes less than one, on a machine with nothing else to do
LIMITS: dict[str, Any] = {"seconds": SECONDS, "memory": 6 * GIB}


def well_behaved(outcome: Outcome) -> None:
    """Documented exit code, stable codes, words and no traceback, bounded memory."""
    assert "Traceback" not in outcome.stderr, outcome
    assert outcome.code == 0 or outcome.code in CODES.values(), outcome
    assert outcome.peak <= PEAK, f"{outcome.peak >> 20} MiB\n{outcome}"
    answer = outcome.json
    if "error" in answer:
        error = answer["error"]
        assert set(error) >= {"code", "exit_code", "message", "hint", "values"}, outcome
        assert CODES.get(error["code"]) == error["exit_code"] == outcome.code, outcome
        assert error["message"], outcome
        assert error["hint"], outcome
    if "findings" in answer:
        for finding in answer["findings"]:
            assert finding["code"] in FINDINGS, outcome
            assert finding["message"], outcome
        errors = [f for f in answer["findings"] if f["severity"] == "error"]
        assert (outcome.code == 0) == (not errors), outcome
        assert answer["ok"] is not bool(errors), outcome


def codes_of(outcome: Outcome) -> set[str]:
    """Every error and finding code that was said."""
    answer = outcome.json
    found = {f["code"] for f in answer.get("findings", [])}
    found |= {w["code"] for w in answer.get("warnings", [])}
    if "error" in answer:
        found.add(answer["error"]["code"])
        found |= {f["code"] for f in answer["error"]["values"].get("findings", [])}
    return found
