r"""Write untrusted text into Markdown and its YAML head: a model card, artifacts of a flow.

A folder's or tensor's name, a version, a licence may hold a line break, which begins a line of its own, or
marks of Markdown and HTML, which make it a link, a heading or a fact that nobody stated. Here they are
characters of one line. Ordinary names stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckptcore.redaction import redacted
from ckptcore.utils.terminal import printable

_MOST = 300  # characters of a text in prose
# Marks of Markdown anywhere in a line. An underscore inside of a word is none.
_MARKS = r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])"
_CLOSING = r"#$"  # of a heading
_CODED = r"\\(?:(?P<mark>[\\nrt])|(?:x(?P<x>[0-9a-f]{2})|u(?P<u>[0-9a-f]{4})|U(?P<U>[0-9a-f]{8})))"
_NAMED: Mapping[str, str] = {"\\": "\\", "n": "\n", "r": "\r", "t": "\t"}


def prose(text: str, most: int = _MOST) -> str:
    r"""Return a text as characters of one line of prose, without credentials.

    >>> print(prose("llama-3_8b (v2)"), prose("a\n- source: `x` <b>"), prose("_a_ #"))
    llama-3_8b (v2) a\\n- source: \`x\` \<b\> \_a\_ \#

    Args:
        text: Any text.
        most: Cut it to so many characters.
    """
    return re.sub(f"{_MARKS}|{_CLOSING}", lambda mark: "\\" + mark[0], printable(redacted(text)[:most]))


def code(text: str) -> str:
    r"""Return a text as a code span of one line, which `uncoded` reads: exact, whatever it contains.

    >>> code("s3://b/a_b"), code("a`\n\\")
    ('`s3://b/a_b`', '`a\\x60\\n\\\\`')
    """
    if text.isprintable() and "\\" not in text and "`" not in text:
        return f"`{text}`"
    return f"`{printable(text.replace(chr(92), chr(92) * 2)).replace('`', chr(92) + 'x60')}`"


def uncoded(text: str) -> str:
    r"""Return the text of what is between the marks of a `code` span.

    >>> uncoded("a\\x60\\n\\\\"), uncoded("C:\\dir")
    ('a`\n\\', 'C:\\dir')
    """
    if "\\" not in text:
        return text
    return re.sub(_CODED, _character, text)


def yaml_text(text: str) -> str:
    r"""Return a text as a quoted scalar of YAML on one line, without credentials.

    >>> print(yaml_text('mit"\n---'), yaml_text("\u0085\U0001f600"))
    "mit\"\n---" "\u0085😀"
    """
    out = []
    for c in redacted(text):
        if c in '"\\':
            out.append("\\" + c)
        elif c.isprintable():
            out.append(c)
        elif c == "\n":
            out.append("\\n")
        else:  # half of a surrogate pair has no escape
            number = 0xFFFD if "\ud800" <= c <= "\udfff" else ord(c)
            out.append(f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}")
    return f'"{"".join(out)}"'


def _character(match: re.Match[str]) -> str:
    if match["mark"] is not None:
        return _NAMED[match["mark"]]
    number = int(match["x"] or match["u"] or match["U"], 16)
    return chr(number) if number < 0x110000 else match[0]
