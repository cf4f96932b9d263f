"""Check that everything that is printed goes through the one module that cleans it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GATE = Path("ckptcore/utils/terminal.py")
# name -> why it may write by itself
OWN = {
    "ckptcore/catalog/sqlworker.py": "a process of ours reads what it writes",
    "deployments/senders/send.py": "is copied to machines without this package, and writes JSON in ASCII",
    "deployments/senders/torch_exit.py": "is copied to machines without this package",
}
WRITES = {
    "print",
    "Console",
    "rich.print",
    "typer.echo",
    "typer.secho",
    "click.echo",
    "click.secho",
    "pprint",
    "sys.stdout.write",
    "sys.stderr.write",
    "sys.stdout.writelines",
    "sys.stderr.writelines",
    "sys.stdout.buffer.write",
    "traceback.print_exc",
    "traceback.print_exception",
    "logging.basicConfig",
    "argparse.ArgumentParser",
    "ArgumentParser",
    "logging.StreamHandler",
    "StreamHandler",
    "warnings.showwarning",
}


LAST_NAMES = {name.rpartition(".")[2] for name in (*WRITES, "json.dump", "traceback.print_stack")}
MAY_WRITE = re.compile(rf"\b({'|'.join(sorted(LAST_NAMES))})\b")


def sources() -> Iterator[Path]:
    for package in ("ckptcore", "tasks", "flows", "deployments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT)


def named(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{named(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def written(path: Path) -> list[str]:
    found: list[str] = []
    text = (ROOT / path).read_text()
    if not MAY_WRITE.search(text):  # a parse is slow
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            called = named(node.func)
            handed = [named(each) for each in [*node.args, *(k.value for k in node.keywords)]]
            streams = [each for each in handed if each in ("sys.stdout", "sys.stderr")]
            if called in WRITES or (called in ("json.dump", "traceback.print_stack") and streams):
                found.append(f"{path}:{node.lineno} {called}")
    return found


def test_nothing_writes_past_the_gate() -> None:
    assert [w for p in sources() if p != GATE and str(p) not in OWN for w in written(p)] == []


def test_the_exceptions_are_needed() -> None:
    assert written(GATE)
    for path in OWN:
        assert written(Path(path)), path
