"""Options: the command line is a contract. A new option is added here, on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ckptcore
from ckptcore.errors import error_classes

WRITE = """--catalog --device --digest --dtype --dtype-for --exclude --fingerprint --include
    --keep-quantized --max-file-size --memory --no-catalog --no-digest --no-fingerprint --no-resume
    --no-verify --output --overwrite --overwrite-foreign --allow-incomplete --rename --resume --tie
    --to --verify --wait --workers"""
OPTIONS = {
    "inspect": "--exclude --include --keep-quantized --output --allow-incomplete",
    "validate": "--catalog --keep-quantized --level --no-catalog --output --allow-incomplete --workers",
    "diff": """--exclude --include --keep-quantized --memory --model --model-prefix --output --rename --tie
        --workers""",
    "consolidate": WRITE,
    "export": WRITE + " --arch --config --model-prefix --names --tokenizer",
    "reshard": WRITE + " --mesh --model-prefix --serialization --sharding",
    "verify-export": """--against --any-memory --catalog --device --dtype --dtype-for --exclude --include
        --keep-quantized --logits --logits-dtype --logits-tolerance --memory --model-prefix --near
        --near-threshold --no-catalog --output --allow-incomplete --reference --rename --tie --workers""",
    "plan": """--arch --config --dtype --dtype-for --exclude --include --keep-quantized
        --max-file-size --memory --mesh --model-prefix --names --no-catalog --no-resume --output
        --overwrite --overwrite-foreign --allow-incomplete --rename --resume --save --serialization
        --sharding --tie --to --tokenizer --verb --workers""",
    "apply": """--catalog --device --digest --fingerprint --memory --no-catalog --no-digest --no-fingerprint
        --no-verify --output --verify --workers""",
    "fingerprint": """--catalog --device --exclude --include --keep-quantized --memory --model
        --model-prefix --no-catalog --output --rename --workers""",
    "which": "--catalog --fingerprint --output",
    "formats": "--output",
    "scrub": "--budget --catalog --output --share",
    "retire": """--accept-cast --accept-loss --catalog --device --dry-run --fingerprint --keep-every
        --keep-last --memory --output --workers --yes""",
    "sweep": "--again --catalog --device --dry-run --fingerprint --memory --output --min-age --workers",
}


def test_options_are_those_written_here() -> None:
    import typer.main

    from ckptcore.cli.main import app

    commands = typer.main.get_command(app).commands
    found = {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
        - {"--help"}
        for name, command in commands.items()
        if name != "catalog"
    }
    assert found == {name: set(text.split()) for name, text in OPTIONS.items()}


def test_no_command_line_waits_for_pydantic_to_know_its_options() -> None:
    code = "import sys, ckptcore.cli.main; print(any(m.split('.')[0] == 'pydantic' for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckptcore", *argv], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["inspect"], 2),
        (["bogus"], 2),
        (["inspect", "SRC", "--bogus"], 2),
        (["consolidate", "SRC", "DST", "--memory", "much"], 2),
        (["consolidate", "SRC", "DST", "--memory", "1KiB"], 2),
        (["export", "SRC", "DST", "--rename", "nothing"], 2),
        (["inspect", "/nowhere/at/all"], 8),
        (["inspect", "nosuchscheme://x/y"], 2),
    ],
)
def test_wrong_use_is_words_and_a_code(argv: list[str], code: int) -> None:
    done = run(*argv)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    as_json = run(*argv, "--output", "json")
    assert as_json.returncode == code
    told = json.loads(as_json.stdout)["error"]
    assert told["exit_code"] == code
    assert told["message"]


def test_exit_codes_are_distinct_but_for_damage() -> None:
    codes = [c.exit_code for c in error_classes() if c.exit_code != 1]
    assert len(codes) == len(set(codes))


def test_a_saved_plan_is_carried_out_only_on_the_same_source(tmp_path: Path) -> None:
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


def test_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptcore", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["ckptcore", ckptcore.__version__]
    assert not done.stderr
