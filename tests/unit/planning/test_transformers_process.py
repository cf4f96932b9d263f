"""What a process that answers for transformers may do to the one that asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptcore.planning.transformers_process import ask

ANSWERS = """
import os, signal, sys, time
from ckptcore.planning.transformers_process import serve

def answer(asked):
    print("a library prints")
    os.write(1, b"and so does its C")
    match asked["do"]:
        case "answer":
            return {"got": asked, "offline": os.environ["HF_HUB_OFFLINE"]}
        case "raise":
            raise ValueError("no such model\\nin this version")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            print("first\\nlast", file=sys.stderr)
            os._exit(3)
        case "list":
            return [1]
        case "wait":
            time.sleep(600)

if __name__ == "__main__":
    serve(answer)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "an_answer.py").write_text(ANSWERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "an_answer"


def test_an_answer_is_what_was_returned_whatever_was_printed(module: str) -> None:
    asked = {"do": "answer", "name": "ü"}
    assert ask(module, asked, seconds=600) == {"got": asked, "offline": "1"}


@pytest.mark.parametrize(
    ("do", "error"),
    [
        ("raise", "ValueError: no such model in this version"),
        ("die", "the process of transformers was ended by signal 9"),
        ("exit", "the process of transformers ended with 3: last"),
        ("list", "the process of transformers ended with 0: and so does its C"),
    ],
)
def test_no_answer_is_an_error_that_says_why(module: str, do: str, error: str) -> None:
    assert ask(module, {"do": do}, seconds=600)["error"].startswith(error)


def test_a_process_without_an_answer_is_ended_in_time(module: str) -> None:
    assert ask(module, {"do": "wait"}, seconds=2) == {"error": "transformers took more than 2 s"}


def test_nothing_is_imported_from_the_current_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    assert "No module named an_answer" in ask(module, {"do": "answer"}, seconds=600)["error"]
