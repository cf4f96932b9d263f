"""Check the options of every command: the command line is a contract, and a new option is added here."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main
import warm

import ckptcore
from ckptcore.cli.main import COMMANDS, program
from ckptcore.cli.main import run as main
from ckptcore.errors import error_classes
from ckptcore.operations.automation.sweep import SweepSettings
from ckptcore.operations.automation.sweep_items import Swept
from ckptcore.utils import terminal

WRITE = """--allow-incomplete --catalog --device --digest --dtype --dtype-for --exclude --fingerprint
    --include
    --keep-quantized --max-file-size --memory --meta --no-catalog --no-digest --no-fingerprint --no-resume
    --no-verify --output --overwrite --overwrite-foreign --overwrite-in-place --rename --resume --stats --tie
    --to --verify --if-exists --wait --weights --workers"""
NAMES = " --allow-untried --arch --config --model-prefix --names"
OPTIONS = {
    "inspect": "--all --allow-incomplete --exclude --include --keep-quantized --output --weights",
    "validate": """--all --allow-incomplete --catalog --keep-quantized --level --no-catalog --output --weights
        --workers""",
    "diff": """--exclude --ignore-dropped --include --keep-quantized --memory --model --model-prefix --output
        --record --rename --tie --weights --workers""",
    "consolidate": WRITE + NAMES,
    "export": WRITE + NAMES + " --tokenizer",
    "reshard": WRITE + NAMES + " --keep-object --mesh --serialization --sharding --tokenizer",
    "merge": WRITE
    + NAMES
    + """ --adapter --decay --every --keep-object --last --mesh --run
        --serialization --sharding --tokenizer --verb""",
    "verify-export": """--against --allow-incomplete --any-memory --catalog --device --dtype --dtype-for
        --exclude --include
        --keep-quantized --logits --logits-dtype --logits-tolerance --memory --model-prefix --near
        --near-threshold --no-catalog --output --reference --rename --tie --weights --workers""",
    "plan": """--all --allow-incomplete --allow-untried --arch --config --dtype --dtype-for --exclude
        --include --keep-object --keep-quantized --max-file-size --memory --mesh --model-prefix --names
        --no-catalog --no-resume --output
        --overwrite --overwrite-foreign --overwrite-in-place --rename --resume --save --serialization
        --sharding --tie --to --tokenizer --verb --weights --workers""",
    "apply": """--catalog --device --digest --fingerprint --memory --no-catalog --no-digest --no-fingerprint
        --no-verify --output --stats --verify --workers""",
    "serve": """--allow-host --allow-incomplete --allow-untried --arch --config --dtype --dtype-for --exclude
        --host --include --keep-quantized --max-file-size --memory --model-prefix --name --names --port
        --rename --tie --tokenizer --weights --workers""",
    "mount": """--allow-incomplete --allow-untried --arch --config --dtype --dtype-for --exclude --include
        --keep-quantized --max-file-size --memory --model-prefix --names --rename --tie --tokenizer --weights
        --workers""",
    "fingerprint": """--catalog --device --exclude --include --keep-quantized --memory --model
        --model-prefix --no-catalog --output --rename --weights --workers""",
    "stats": """--all --catalog --keep-quantized --memory --no-catalog --output --weights --workers""",
    "find": "--catalog --fingerprint --output",
    "formats": "--output",
    "scrub": "--budget --catalog --output --share",
    "gc": "--catalog --dry-run --older-than --output",
    "retire": """--accept-loss --catalog --device --dry-run --fingerprint --grace --keep-best --keep-every
        --keep-last --memory --output --purge --rest --workers --yes""",
    "thin": """--catalog --device --drop --dry-run --grace --keep-optimizer-last --memory --min-age --output
        --workers --yes""",
    "sweep": """--catalog --device --dry-run --fingerprint --memory --meta --min-age --output --relist
        --retry-failed --strict --no-verify-export --verify-export --workers""",
    "push": "--accept --card --catalog --create --dry-run --output --overwrite --tag",
    "sign": """--catalog --certificate --chain --digest --key --no-catalog --output --overwrite
        --signature""",
    "verify-signature": "--chain --ignore --key --output --signature",
}
GROUPS = (
    "",
    "catalog",
    "catalog alias",
    "catalog hold",
    "catalog obligation",
    "catalog root",
    "catalog inbox",
    "catalog outbox",
)


def flags(params: list[typer.core.TyperOption]) -> set[str]:
    return {o for p in params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")} - {"--help"}


@pytest.fixture(scope="module")
def commands() -> dict[str, typer.core.TyperCommand]:
    complete: typer.core.TyperGroup = typer.main.get_command(program())  # type: ignore[assignment]  # it has commands
    return complete.commands  # type: ignore[return-value]


def test_options_are_those_listed_here(commands: dict[str, typer.core.TyperCommand]) -> None:
    listed = {name: flags(command.params) for name, command in commands.items() if name != "catalog"}
    assert listed == {name: set(text.split()) for name, text in OPTIONS.items()}


def test_every_command_answers_as_json() -> None:
    complete = typer.main.get_command(program())
    paths = {path for path, _ in _parameters(complete)}
    answering = {path for path, parameter in _parameters(complete) if "--output" in parameter.opts}
    # Groups have no answer, and the others are servers.
    assert paths - answering - {tuple(group.split()) for group in GROUPS} == {
        ("catalog", "page"),
        ("serve",),
        ("mount",),
    }


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A DCP folder whose save did not finish: the metadata has its temporary name."""
    from torch import arange
    from torch.distributed.checkpoint import save

    folder = tmp_path / "unfinished"
    save({"w": arange(4)}, checkpoint_id=folder, no_dist=True)
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    return folder


@pytest.mark.parametrize("command", ["inspect", "validate", "consolidate"])
def test_an_incomplete_save_is_accepted_on_demand(command: str, unfinished: Path) -> None:
    arguments = [command, str(unfinished)]
    arguments += [] if command == "inspect" else ["--no-catalog"]
    assert main([*arguments, "--output", "json"]) == 3 if command != "validate" else 1
    assert main([*arguments, "--allow-incomplete"]) == 0


def test_options_of_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = []

    def sweep(*args: object, **_options: object) -> Swept:
        settings = args[-1]
        assert isinstance(settings, SweepSettings)
        given.append((settings.settle_s, settings.retry_failed))
        return Swept(())

    monkeypatch.setattr("ckptcore.operations.automation.sweep.sweep", sweep)
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "catalog.sqlite"))
    assert main(["sweep", "--min-age", "3s", "--retry-failed"]) == 0
    assert main(["sweep"]) == 0
    assert given == [(3.0, True), (120.0, False)]


def test_a_level_is_one_of_those_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file
    from torch import arange

    save_file({"w": arange(4)}, tmp_path / "a.safetensors")
    arguments = ["validate", str(tmp_path / "a.safetensors"), "--no-catalog", "--output", "json"]
    assert main([*arguments, "--level", "coverage"]) == 0
    assert json.loads(capsys.readouterr().out)["level"] == "coverage"
    assert main([*arguments, "--level", "deep"]) == 2
    assert (
        "files, coverage, bytes or values (got 'deep')"
        in json.loads(capsys.readouterr().out)["error"]["message"]
    )


@pytest.mark.parametrize("command", [*OPTIONS, *GROUPS])
def test_the_help_cuts_no_word_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help", *(["--all"] if command in OPTIONS else [])]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert [line for line in text.splitlines() if line.endswith("...") and not line.startswith("Usage")] == []
    assert set(OPTIONS.get(command, "").split()) <= set(text.replace(",", " ").split())


def test_help_is_short_and_has_all_on_request(
    commands: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptcore.cli.commands import FIRST, FIRST_OF, SECTIONS

    for verb in COMMANDS.keys() - {"catalog"}:
        params = commands[verb].params
        assert main([verb, "-h"]) == 0
        short = capsys.readouterr().out
        assert main([verb, "--help", "--all"]) == 0
        every = capsys.readouterr().out
        assert all(flag in every for flag in flags(params)), verb
        assert ("--help --all" in short) == (len(short) < len(every)), verb
    names = {param.name for command in commands.values() for param in getattr(command, "params", ())}
    sections = {name for listed in SECTIONS.values() for name in listed.split()}
    assert FIRST.union(*FIRST_OF.values(), sections) <= names | {"help"}


def test_every_command_has_an_example_that_it_accepts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptcore.cli.commands import EXAMPLES

    monkeypatch.setenv("COLUMNS", "80")
    complete = typer.main.get_command(program())
    paths = {" ".join(path) for path, _ in _parameters(complete)} | {*GROUPS}
    assert EXAMPLES.keys() == paths
    for path in sorted(paths):
        assert main([*path.split(), "--help"]) == 0
        _, _, rendered = capsys.readouterr().out.partition("\nExample:\n")
        terms = shlex.split(rendered.replace("\\\n", " "))  # as a shell joins lines
        assert terms[: 1 + len(path.split())] == ["ckptcore", *path.split()]
        command: Any = complete
        for n, word in enumerate(terms[1:], 1):
            if not hasattr(command, "commands"):
                command.make_context(path, terms[n:])
                break
            command = command.commands[word]


def test_help_of_a_verb_is_about_this_verb(
    commands: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptcore.planning.options import HELP_OF_VERB

    for verb, helps in HELP_OF_VERB.items():
        rendered = {param.name: param.help for param in commands[verb].params if param.name in helps}
        assert rendered == helps
        assert main([verb, "--help", "--all"]) == 0
        text = capsys.readouterr().out
        assert not [word for word in ("a reshard", "An export", "other commands") if word in text], verb


def test_no_command_line_waits_for_pydantic_to_know_its_options() -> None:
    code = "import sys, ckptcore.cli.main; print(any(m.split('.')[0] == 'pydantic' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*warm.command(), *argv], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["inspect"], 2),
        (["bogus"], 2),
        (["inspect", "SRC", "--bogus"], 2),
        (["consolidate", "SRC", "DST", "--memory", "much"], 2),
        (["consolidate", "SRC", "DST", "--memory", "1KiB"], 2),
        (["export", "SRC", "DST", "--rename", "nothing"], 2),
        (["export", "SRC", "DST", "--to", "safetnsors"], 2),
        (["consolidate", "SRC", "DST", "--to", "diffusers_"], 2),
        (["plan", "SRC", "DST", "--to", "safetnsors"], 2),
        (["export", "SRC", "DST", "--max-file-size", "5"], 2),
        (["inspect", "/nowhere/at/all"], 8),
        (["inspect", "nosuchscheme://x/y"], 2),
    ],
)
def test_wrong_use_has_a_message_and_an_exit_code(argv: list[str], code: int) -> None:
    done = run(*argv)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    as_json = run(*argv, "--output", "json")
    assert as_json.returncode == code
    error = json.loads(as_json.stdout)["error"]
    assert error["exit_code"] == code
    assert error["message"]


def test_exit_codes_are_distinct_except_for_damage() -> None:
    codes = [c.exit_code for c in error_classes() if c.exit_code != 1]
    assert len(codes) == len(set(codes))


def test_a_saved_plan_is_executed_only_on_the_same_source(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import arange

    source, plan, out = tmp_path / "a.safetensors", tmp_path / "plan", tmp_path / "out"
    save_file({"w": arange(4)}, source)
    assert run("plan", str(source), str(out), "--no-catalog", "--save", str(plan)).returncode == 0
    assert not out.exists()
    source.rename(tmp_path / "kept")
    save_file({"w": arange(4) + 1}, source)  # equal names, shapes and sizes
    refused = run("apply", str(plan), "--no-catalog")
    assert refused.returncode == 11
    assert "source-changed" in refused.stderr
    (tmp_path / "kept").replace(source)
    assert run("apply", str(plan), "--no-catalog").returncode == 0
    assert (out / "model.safetensors").exists()


def test_a_file_in_place_of_a_plan_is_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    refused = run("apply", str(tmp_path / "file"), "--no-catalog")
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (2, f"usage: no plan in {tmp_path}/file")


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptcore", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["ckptcore", ckptcore.__version__]
    assert not done.stderr


def _parameters(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for parameter in command.params:
        yield path, parameter
    for name, inner in getattr(command, "commands", {}).items():
        yield from _parameters(inner, *path, name)


# Names in the model's own tree, a name that must be new, and nobody.
_EMPTY_MEANS = {"model_prefix", "expect", "owner"}
_SAMPLES = {("reshard",), ("add",)}  # all of their parameters are tried, and each name of the others once


def test_an_empty_text_is_refused_by_every_option_and_argument(capsys: pytest.CaptureFixture[str]) -> None:
    """It is what a shell makes of a variable that is not set: never the default."""
    checked = set()
    complete = typer.main.get_command(program())
    for path, parameter in _parameters(complete):
        seen = parameter.name in checked and path[-1:] not in _SAMPLES
        if seen or getattr(parameter, "is_flag", False) or parameter.name in _EMPTY_MEANS:
            continue
        command: Any = complete
        for name in path:
            command = command.commands[name]
        given: list[str] = []
        for other in command.params:  # in the order of the command's arguments
            empty = other.name == parameter.name
            if other.param_type_name == "argument":
                given += [""] if empty else ["x"] * other.required
            elif empty or other.required:
                given += [other.opts[0], "" if empty else "x"]
        assert main([*path, *given]) == 2, (path, given)
        message = capsys.readouterr().err
        assert "must not be empty" in message or parameter.name not in ("to", "mesh", "catalog")
        checked.add(parameter.name)
    assert {"to", "mesh", "catalog", "sharding", "config", "save", "record", "min_age", "src"} <= checked


def test_an_empty_model_prefix_and_an_empty_owner_mean_something() -> None:
    assert main(["diff", "/nowhere/a", "/nowhere/b", "--model-prefix", ""]) == 8
    assert (
        main(["catalog", "hold", "place", "x", "--reason", "y", "--owner", "", "--catalog", "/nowhere/c"])
        != 2
    )


def test_services_refuse_an_empty_text(capsys: pytest.CaptureFixture[str]) -> None:
    parser = terminal.parser("service", None)
    parser.add_argument("--catalog")
    parser.add_argument("place", nargs="?")
    for given in (["--catalog", ""], ["--catalog="], [""]):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(given)
        assert ended.value.code == 2
    assert "argument --catalog: must not be empty" in capsys.readouterr().err
    assert parser.parse_args(["--catalog", "c", "p"]).catalog == "c"


def test_services_take_a_text_that_ends_with_an_equals_sign() -> None:
    """Only an option's own sign may be the last: base64 and queries end with one, too."""
    parser = terminal.parser("service", None)
    parser.add_argument("--catalog")
    for text in ("postgresql://u@h/db?options=", "a=b=", "YQ=="):
        assert parser.parse_args([f"--catalog={text}"]).catalog == text
        assert parser.parse_args(["--catalog", text]).catalog == text
