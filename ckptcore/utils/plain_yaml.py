"""Parse YAML that others wrote into plain values, in time that grows with the text.

Only the scanner and the parser of PyYAML are used. What its constructors do is left out: typed tags
(``!!python/...``, and also ``!!int``, ``!!timestamp``), timestamps and the base-60 numbers of YAML 1.1.
Values are None, bools, integers, floats, texts, lists and dicts whose keys are texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptcore.utils.foreign_text import BOM, MAX_DEPTH, InvalidText, decoded, parsing

# Bytes; the parser reads some 100,000 a second, and no trainer's config is a tenth of it.
MAX_YAML = 256 << 10
_MAX_EXPANDED = 4 << 20  # characters and containers with every alias written out
_CONTAINER = 8  # characters that a value counts as, beside its own
_MAX_NUMBER = 64  # characters; longer ones are texts

# As PyYAML resolves them, which wrote most configs: YAML 1.2 has fewer.
_CONSTANTS: dict[str, Any] = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    spelled: value
    for value, names in ((True, ("true", "yes", "on")), (False, ("false", "no", "off")))
    for name in names
    for spelled in (name, name.capitalize(), name.upper())
}
_INTEGER = re.compile(
    r"(?P<sign>[-+]?)(?:0b(?P<binary>_*[01][01_]*)|0x(?P<hex>_*[0-9a-fA-F][0-9a-fA-F_]*)|0(?P<octal>[0-7_]+)"
    r"|(?P<decimal>0|[1-9][0-9_]*))"
)
_BASES = {"binary": 2, "hex": 16, "octal": 8, "decimal": 10}
# PyYAML wants a dot. People write 1e-5 and 5e8, too; a commit such as 12345e6 is longer than such a number.
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+][0-9]+|[0-9]{1,3}[eE][0-9]{1,2}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)


def load_yaml(data: bytes | str) -> Any:
    r"""Return the value of a YAML text of one document; what has a tag is None.

    >>> load_yaml("lr: 1e-5\nat: 1:30\nday: 2026-11-28\nof: !!python/name:os.system x\nout: ${a.b}")
    {'lr': 1e-05, 'at': '1:30', 'day': '2026-11-28', 'of': None, 'out': '${a.b}'}
    >>> load_yaml("base: &b {lr: 1, wd: 2}\nrun:\n  <<: *b\n  wd: 3")
    {'base': {'lr': 1, 'wd': 2}, 'run': {'lr': 1, 'wd': 3}}

    Raises:
        InvalidText: It is no such text; it is too long, nests too deep, or its aliases expand too far.
    """
    import yaml

    if len(data) > MAX_YAML:
        raise InvalidText(f"YAML of more than {MAX_YAML >> 10} KiB")
    text = data if isinstance(data, str) else decoded(data.removeprefix(BOM))
    with parsing("YAML"):
        return _document(yaml.parse(text, yaml.SafeLoader))


@dataclass(slots=True)
class _Open:
    """A list or dict in the making.

    Attributes:
        value: The container.
        anchor: Its name for aliases.
        tagged: Whether it has a tag, so that its value is None.
        size: Characters so far, with aliases written out.
        height: Levels below it.
        key: The key whose value is next; None for a list, or where a key is next.
        merges: Whether that key is ``<<``.
        merged: What ``<<`` names.
    """

    value: Any
    anchor: str | None
    tagged: bool
    size: int
    height: int
    key: str | None = None
    merges: bool = False
    merged: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Node:
    value: Any
    size: int
    height: int = 0


def _document(events: Iterator[Any]) -> Any:
    """Return the value of the one document of a stream of PyYAML's events."""
    import yaml

    anchors: dict[str, _Node] = {}
    # The document itself is a list of its one value.
    open_: list[_Open] = [_Open([], None, False, 0, 0)]
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            empty: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            if len(open_) > MAX_DEPTH:
                raise InvalidText(f"nested deeper than {MAX_DEPTH} levels")
            if event.anchor is not None:
                anchors.pop(event.anchor, None)  # an alias inside names nothing yet
            open_.append(_Open(empty, event.anchor, event.tag is not None, _CONTAINER, 1))
            continue
        if isinstance(event, yaml.ScalarEvent):
            node, anchor = _scalar(event), event.anchor
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise InvalidText("an alias of nothing before it")
            node, anchor = anchors[event.anchor], None
        elif isinstance(event, yaml.CollectionEndEvent):
            node, anchor = _closed(open_.pop())
        elif isinstance(event, yaml.DocumentEndEvent) and len(open_[0].value) > 1:
            raise InvalidText("several documents")
        else:
            continue
        if anchor is not None:
            anchors[anchor] = node
        _add(open_[-1], node, event)
        if open_[-1].size > _MAX_EXPANDED or len(open_) + node.height > MAX_DEPTH + 1:
            raise InvalidText("aliases that expand too far")
    document = open_[0].value
    return document[0] if document else None


def _scalar(event: Any) -> _Node:
    """Return the value of a scalar: what a plain one means, the text of a quoted one."""
    text = _text(event.value)
    if event.tag is not None:
        return _Node(None, _CONTAINER)
    return _Node(_meaning(text) if event.implicit[0] else text, _CONTAINER + len(text))


def _text(text: str) -> str:
    """Return a text whose pairs of surrogates, which JSON escapes, are characters."""
    if text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _meaning(text: str) -> Any:
    """Return what a plain scalar means.

    >>> [_meaning(t) for t in ("0x1F", "1_000", "010", "1e5", "12345e6", ".nan", "off", "1:20", "1.5.2")]
    [31, 1000, 8, 100000.0, '12345e6', nan, False, '1:20', '1.5.2']
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if len(text) > _MAX_NUMBER or text[0] not in "+-.0123456789":
        return text
    if (integer := _INTEGER.fullmatch(text)) is not None:
        base = integer.lastgroup or "decimal"
        return int(integer["sign"] + (integer[base].replace("_", "") or "0"), _BASES[base])
    if _FLOAT.fullmatch(text) is not None:
        digits = text.replace("_", "").lower()
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _closed(container: _Open) -> tuple[_Node, str | None]:
    """Return the value of a list or dict that has ended, and its anchor."""
    value = container.value
    if container.merged:
        inherited: dict[str, Any] = {}
        for mapping in reversed(container.merged):  # the first one takes precedence
            inherited |= mapping
        value = inherited | value
    return _Node(None if container.tagged else value, container.size, container.height), container.anchor


def _add(container: _Open, node: _Node, event: Any) -> None:
    """Add a value to the list or dict that is open, or a key."""
    container.size += node.size
    container.height = max(container.height, node.height + 1)
    if isinstance(container.value, list):
        container.value.append(node.value)
    elif container.key is None:
        if not hasattr(event, "value"):  # only a scalar has its text
            raise InvalidText("a key that is no text")
        container.key = _text(event.value)
        container.merges = container.key == "<<" and event.implicit[0]
    else:
        key, container.key = container.key, None
        if container.merges:
            bases = node.value if isinstance(node.value, list) else [node.value]
            container.merged += [base for base in bases if isinstance(base, dict)]
        else:
            container.value[key] = node.value
