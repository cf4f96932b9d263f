"""Ask transformers in a process of its own.

Its memory is released before any bytes move. A crash, a kill or a print of a library becomes an answer. A
module that answers has ``answer(asked)``, whose argument and result are JSON values, and ends with
``if __name__ == "__main__": serve(answer)``. An answer with ``error`` has the reason of a failure. Nothing is
fetched, and no code of a model folder runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# For every `from_pretrained`: no request to the hub, and no code of a folder.
LOCAL: Mapping[str, Any] = MappingProxyType({"local_files_only": True, "trust_remote_code": False})
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_MOST_LINES, _MOST_CHARACTERS = 4, 500  # of an error
# -P: nothing is imported from the current folder. Not -I: PYTHONPATH may be where ckptcore is.
COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m")  # before the name of a module

Answer = dict[str, Any]


def ask(module: str, asked: object, *, seconds: float | None) -> Answer:
    """Ask a module in a process of its own.

    Args:
        module: Dotted name of the module.
        asked: The question, a JSON value.
        seconds: Timeout; None for none.

    Returns:
        The answer, or ``{"error": text}`` if the process ended without one.
    """
    try:
        run = subprocess.run(
            [*COMMAND, module],
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
            env=os.environ | _ENVIRONMENT,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"transformers took more than {seconds:g} s"}
    try:
        answer = json.loads(run.stdout)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": _ended(run.returncode, run.stderr)}


def serve(answer: Callable[[Any], Answer]) -> None:
    """Answer one question: JSON on standard input, JSON on standard output; an error is an answer, too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        outcome = answer(json.load(sys.stdin))
    except Exception as error:  # of transformers' inside, which may change with any version
        outcome = {"error": brief(error)}
    json.dump(outcome, answers)
    answers.flush()


def quiet_transformers() -> Any:
    """Import transformers, which has no complete types, and let it log errors only."""
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    return library


def brief(error: Exception) -> str:
    r"""Return class and first lines of an error.

    >>> brief(ValueError("no such model\n\n  in this version"))
    'ValueError: no such model in this version'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:_MOST_LINES])[:_MOST_CHARACTERS]}"


def _ended(status: int, stderr: bytes) -> str:
    """Return how a process without an answer ended, with the last line of its stderr."""
    ending = f"was ended by signal {-status}" if status < 0 else f"ended with {status}"
    last = stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"the process of transformers {ending}{f': {last[0][:_MOST_CHARACTERS]}' if last else ''}"
