"""Check how answers look in a terminal: names of tensors, sizes, numbers with nouns, durations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptcore.cli.catalog_render import size, tail
from ckptcore.cli.main import run
from ckptcore.cli.tables import print_table, wrap_name
from ckptcore.utils import terminal
from ckptcore.utils.units import show_duration

LONG = "model.language_model.layers.0.self_attn.rotary_embedding.inverse_frequencies.weight"
WIDE = "model." + "x" * 100 + ".weight"


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def parts_of(name: str) -> set[str]:
    return set(name.split("."))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("names", [(0,), (0, 1)])
def test_names_break_at_their_dots(
    width: int, names: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out = terminal.console(width=width)
    second = f"decoder.{LONG}" if 1 in names else "float32"
    print_table(out, ("tensor", "second", "note"), [(LONG, second, "some words about it")], names)
    lines = lines_of(capsys)
    pieces = {word for line in lines for part in line.split() for word in part.split(".")}
    assert parts_of(LONG) | parts_of(second) <= pieces
    assert "".join(re.findall(r"^\S+", "\n".join(lines[2:]), re.MULTILINE)).startswith(
        LONG[:30].rsplit(".", 1)[0]
    )


def test_a_part_that_is_wider_than_the_terminal_stays_in_one_piece(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(terminal.console(width=60), ("tensor", "dtype"), [(WIDE, "float32")])
    assert any("x" * 100 in line for line in lines_of(capsys))
    assert wrap_name(WIDE, 20).splitlines() == ["model.", "x" * 100 + ".", "weight"]


def test_a_name_cannot_start_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(terminal.console(width=80), ("tensor", "dtype"), [("a\nforged: line\x1b[2J", "float32")])
    lines = lines_of(capsys)
    assert not any(line.startswith("forged") for line in lines)
    assert any("a\\nforged: line\\x1b[2J" in line for line in lines)


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_commands_use_singular_and_plural(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    save_file({"w": torch.zeros(4096)}, tmp_path / "one.safetensors")
    save_file({LONG: torch.zeros(4), "b": torch.zeros(4)}, tmp_path / "two.safetensors")
    for name, number, size_text in (("one", "1 tensor,", "16.0 KiB"), ("two", "2 tensors,", "32 B")):
        arguments = [command, str(tmp_path / f"{name}.safetensors")]
        arguments += [] if command == "inspect" else [str(tmp_path / "out"), "--no-catalog"]
        assert run(arguments) == 0
        text = capsys.readouterr().out
        assert size_text in text
        assert "1 file" in text
        assert "1 files" not in text
        assert command == "plan" or number in text
    if command == "inspect":
        assert LONG in text.replace("\n", " ").replace(". ", ".") or parts_of(LONG) <= set(
            re.split(r"[\s.]+", text)
        )


def test_sizes_are_binary_and_cuts_are_at_separators() -> None:
    assert (size(None), size(999), size(1 << 20), size(5_000_000_000)) == ("-", "999 B", "1.0 MiB", "4.7 GiB")
    assert tail("/data/runs/llama/checkpoints/step-1000", 20) == "\u2026/step-1000"
    assert tail("x" * 30, 10) == "\u2026" + "x" * 9
    assert tail("s3://user:secret@bucket/runs/step-1", 14) == "\u2026/runs/step-1"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (172799, "47 h 59 min"),
        (172800, "2 d 0 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert show_duration(seconds) == text
