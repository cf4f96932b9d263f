"""Check that forks of a warm process are like processes that Python starts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm

OPTIONS = ("-c", "/dev/null", "-n0", "--import-mode=importlib")
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """How a command line begins; the server has collected a test that settles its environment."""
    folder = tmp_path_factory.mktemp("forks")
    (folder / "test_one.py").write_text("import os\nos.environ['SETTLED'] = 'by an import'\n")
    (folder / "test_broken.py").write_text("def test_above(): pass\nimport no_such_module\n")
    address = str(folder / "socket")
    options = [*OPTIONS, f"--rootdir={folder}", f"--confcutdir={folder}", "--collect-only", "-s"]
    server = warm.started(address, dict(os.environ), *options, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(warm.TESTS, address)
        patch.setenv("FOLDER", str(folder))
        yield warm.python()
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(60) == 0


@pytest.mark.soak
def test_streams_arguments_and_environment(python: list[str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "elsewhere.py").write_text("WORD = 'elsewhere'\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, beside, elsewhere\n"
        "if __name__ == '__main__':\n"
        "    print(beside.WORD, elsewhere.WORD, *sys.argv[1:], os.environ['SETTLED'], os.getcwd())\n"
        "    print(sys.stdin.read(), file=sys.stderr)\n"
        "    sys.exit(3)\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path / "path")}
    outcomes = [
        subprocess.run(
            [*start, str(program), "a", "b c"],
            input="given",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env | more,
            check=False,
        )
        for start, more in ((python, {}), ([sys.executable], {"SETTLED": "by an import"}))
    ]
    assert [(done.returncode, done.stdout, done.stderr) for done in outcomes] == [
        (3, f"beside elsewhere a b c by an import {tmp_path}\n", "given\n")
    ] * 2


def test_modules_and_errors(python: list[str]) -> None:
    done = subprocess.run(
        [*python, "-m", "json.tool"], input="[1]", capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["[", "1", "]"]
    asks = "import sys; print(sys.argv[1:], '' in sys.path)"
    done = subprocess.run([*python, "-", "a"], input=asks, capture_output=True, text=True, check=True)
    assert done.stdout == "['a'] True\n"
    done = subprocess.run([*python, "-P", "-c", asks, "a"], capture_output=True, text=True, check=True)
    assert done.stdout == "['a'] False\n"
    done = subprocess.run([*python, "-c", "1 / 0"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")


def test_a_module_that_cannot_be_imported_is_an_error(python: list[str]) -> None:
    argv = [*python, "-m", "pytest", *OPTIONS, "-p", "no:cacheprovider", "--rootdir", os.environ["FOLDER"]]
    done = subprocess.run(
        [*argv, f"{os.environ['FOLDER']}/test_broken.py"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "No module named 'no_such_module'" in done.stdout) == (2, True), done.stdout


def test_a_signal_that_ends_it_is_seen(python: list[str]) -> None:
    kills = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([*python, "-c", kills], check=False).returncode == -signal.SIGKILL


def test_it_ends_with_its_client(python: list[str]) -> None:
    with subprocess.Popen([*python, "-c", WAITS], stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        fork = os.pidfd_open(int(waiting.stdout.readline()))
        waiting.kill()
    ended = select.poll()  # `select.select` takes no descriptor above 1023, and a worker may have more
    ended.register(fork, select.POLLIN)
    assert ended.poll(120_000)
    os.close(fork)
