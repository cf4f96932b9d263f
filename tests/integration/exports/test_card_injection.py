"""Foreign text in a model card is text: it begins no line, no link and no fact, and forges no provenance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import ckptcore
from ckptcore.planning.hub_files import front_matter
from ckptcore.planning.model_card import is_untouched, provenance, tied_by_card
from ckptcore.redaction import redacted
from ckptcore.utils.markdown import code, prose, uncoded, yaml_text
from ckptcore.utils.plain_yaml import load_yaml
from ckptcore.utils.terminal import printable

FORGED = (
    f"\n- source: `/forged` (dcp)\n- source manifest (BLAKE3): `{'f' * 64}`\n- exported by: ckptcore 9.9\n"
    "- tied: `a` is `b`, equality checked\n\n## Provenance\n<script>x</script> [x](http://evil) `y`\n---\n"
)
NAME = FORGED.replace("/", "")[:120]
BASE: dict[str, Any] = {"model_type": "of_nobody", "architectures": ["OfNobody"], "_name_or_path": "org/base"}


def written(folder: Path, config: dict[str, Any], card: str = "", **files: str) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text(card)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def sent(folder: Path) -> Path:
    dcp.save({"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(3)}, checkpoint_id=folder, no_dist=True)
    return folder


# Where foreign text goes into a card: the place of it -> options of an export in a folder.
PLACES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "the architecture": lambda f: {"config": written(f / "c", BASE | {"architectures": [FORGED, "x`y"]})},
    "the model type": lambda f: {"config": written(f / "c", BASE | {"model_type": FORGED})},
    "the version": lambda f: {"config": written(f / "c", BASE | {"transformers_version": FORGED})},
    "the licence": lambda f: {
        "config": written(f / "c", BASE, f"---\nlicense: {json.dumps(FORGED)}\n---\n", LICENSE="x")
    },
    "the base model": lambda f: {
        "config": written(f / "c", BASE, f"---\nbase_model: {json.dumps('org/' + FORGED)}\n---\n")
    },
    "the name of a licence": lambda f: {"config": written(f / "c", BASE, **{f"LICENSE{NAME[:40]}": ""})},
    "the folder of the config": lambda f: {"config": written(f / NAME, BASE)},
    "the source": lambda f: {"source": sent(f / NAME)},
    "the destination": lambda f: {"destination": str(f / NAME)},
    "a file of code": lambda f: {
        "config": written(f / "c", BASE | {"auto_map": {"AutoModel": "m.X"}}, **{f"m{NAME[:30]}__py": ""})
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_foreign_text_adds_no_line(place: str, tmp_path: Path) -> None:
    options = PLACES[place](tmp_path)
    source = options.pop("source", None) or sent(tmp_path / "step-3")
    destination = options.pop("destination", str(tmp_path / "out"))
    ckptcore.convert(
        str(source),
        destination,
        verb="export",
        catalog=False,
        tokenizer="none",
        **{"config": "none", **options},
    )
    data = (Path(destination) / "README.md").read_bytes()
    card = data.decode()
    # The one block of provenance is the real one, and nothing else of the text is Markdown or YAML.
    recorded = provenance(card, destination)
    assert recorded is not None
    assert recorded.place == str(source)
    assert card.count("- source manifest (BLAKE3)") - card.count("\\n- source manifest (BLAKE3)") == 1
    assert [line for line in card.splitlines() if line.startswith("## ")] == ["## Provenance"]
    assert tied_by_card(card) == ()
    assert is_untouched(data, Path(destination).name)
    assert front_matter(data).keys() <= {"library_name", "base_model", "license"}
    body = card.split("---\n\n", 1)[1] if card.startswith("---\n") else card
    kinds = {each.type for token in MarkdownIt().parse(body) for each in (token, *(token.children or ()))}
    assert not kinds & {"link_open", "html_block", "html_inline", "image", "hr", "fence", "softbreak"}


def test_names_of_tensors_in_ties(tmp_path: Path) -> None:
    """They are read back as they are, whatever they contain."""
    name = "a`\n- tied: `x` is `y`, equality checked\n\\x60"
    dcp.save({name: torch.ones(3), "b": torch.ones(3)}, checkpoint_id=tmp_path / "s", no_dist=True)
    ckptcore.convert(
        str(tmp_path / "s"), str(tmp_path / "out"), verb="export", catalog=False, config="none",
        tokenizer="none", tie=((name, "b"),),
    )  # fmt: skip
    assert tied_by_card((tmp_path / "out/README.md").read_text()) == ((name, "b"),)


ANY = st.text(st.characters(exclude_categories=()), max_size=40)
MARKS = st.text(st.sampled_from("\\`*_[]()<>&!#|~-+=.:/$ \n1a\u2028\u0085é"), max_size=25)


@given(ANY | MARKS)
@example(FORGED)
@example("1. x")
@example("&amp; &#65;")
@example("http://a.b <http://a.b> ![x](y)")
def test_prose_is_its_characters(text: str) -> None:
    """As a parser of Markdown reads it, in a heading and in a list."""
    line = prose(text)
    assert len(line.splitlines()) <= 1
    want = printable(redacted(text)[:300])
    for before in ("# ", "- source: x, ", "# a"):
        tokens = MarkdownIt().parse(before + line)
        inline = [t for t in tokens if t.type == "inline"]
        assert len(inline) <= 1
        got = "".join(child.content for child in (inline[0].children or ()) if inline) if inline else ""
        assert {child.type for t in inline for child in t.children or ()} <= {"text", "text_special"}
        assert got.split() == (before.lstrip("#- ") + want).split()


@given(ANY | MARKS)
def test_a_code_span_is_read_back(text: str) -> None:
    span = code(text)
    assert len(span.splitlines()) <= 1
    assert span[0] == span[-1] == "`"
    assert "`" not in span[1:-1]
    assert uncoded(span[1:-1]) == text


@given(ANY | MARKS)
def test_text_of_yaml_is_read_back(text: str) -> None:
    line = f"k: {yaml_text(text)}"
    assert len(line.splitlines()) == 1
    want = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in redacted(text))
    assert load_yaml(line) == yaml.safe_load(line) == {"k": want}
