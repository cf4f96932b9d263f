"""The terminal: how does anything reach standard output and standard error?

Through this module alone. Paths, names of tensors, keys of objects, values of a catalog and messages of
libraries are strangers' texts: a control character in one of them could clear the screen, forge a line or
retitle the window, a bidirectional override could pass one path off as another, a URL could hold a password.
Here all of them are written out as escapes and `redacted`. What a program reads is JSON in ASCII: exact, but
for the credentials of URLs.

    line      one line of text
    block     several, as an error or a traceback has them
    console   a rich console for tables and colours: no markup, no text that gets past the same rule
    write_json  an answer for programs
    parser    `argparse`, whose complaints repeat what was typed
    guard     what Python and libraries write by themselves: warnings, tracebacks, logging
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ckptcore.redaction import redacted

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console
    from rich.text import Text

Part = str | tuple[str, str]  # a text, or a text and its style


def printable(text: str, *, lines: bool = False) -> str:
    """`text` with everything written out that is not seen as itself: controls, overrides, lone surrogates.

    lines: leaves the ends of lines alone.

    >>> printable("a\\x1b[2J\\u202eb\\udc80\\n"), printable("modèle\\n", lines=True)
    ('a\\\\x1b[2J\\\\u202eb\\\\udc80\\\\n', 'modèle\\n')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def clean(text: str, *, lines: bool = False) -> str:
    """`text` as people may see it: `redacted`, then `printable`."""
    return printable(redacted(text), lines=lines)


def line(text: str, *, err: bool = False) -> None:
    """Writes one line of text, whatever is in it."""
    _write(clean(text) + "\n", err)


def block(text: str, *, err: bool = False, indent: str = "  ") -> None:
    """Writes lines of text. Those after the first are indented: none can pass for a line of our own."""
    first, *more = clean(text, lines=True).split("\n")
    _write("\n".join([first, *(indent + each for each in more)]) + "\n", err)


def write_json(value: Any, *, indent: int | None = None) -> None:
    """Writes an answer for programs: every character beyond ASCII as an escape, URLs without credentials."""
    written = json.dumps(value, ensure_ascii=True, indent=indent)
    if "://" in written:
        written = json.dumps(_bare(value), ensure_ascii=True, indent=indent)
    _write(written + "\n", False)


def text(*parts: Part, lines: bool = False) -> Text:
    """A text for a console, of parts with and without a style; each of them `clean`."""
    from rich.text import Text

    done = Text()
    for part in parts:
        words, style = (part, "") if isinstance(part, str) else part
        done.append(clean(words, lines=lines), style)
    return done


def console(*, err: bool = False, width: int | None = None) -> Console:
    """A console for tables and progress. Markup means nothing to it: styles are given with `text`."""
    return _guarded()(stderr=err, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def parser(prog: str, description: str | None) -> ArgumentParser:
    """A parser of arguments that repeats nothing raw."""
    return _guarded_parser()(prog=prog, description=description)


class Formatter(logging.Formatter):
    """Lines of a log, each `clean`; of those that belong to one record, all but the first are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        return clean(super().format(record), lines=True).replace("\n", "\n  ")


class Clean(logging.Filter):
    """Makes records `clean` on their way to the handlers of others: Prefect's terminal and its server."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        with contextlib.suppress(TypeError, ValueError):  # a wrong format string is the handler's to report
            record.msg, record.args = clean(record.getMessage(), lines=True), None
        if record.exc_info and not record.exc_text:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if record.exc_text:
            record.exc_text = clean(record.exc_text, lines=True)
        return True


def log_to_stderr(level: int = logging.INFO) -> None:
    """Sends the log of a service to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def guard() -> None:
    """Makes what Python writes by itself go through here: for processes that are ours from begin to end."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets escapes instead of an error
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(message)s"))
    handler.setLevel(logging.WARNING)
    logging.lastResort = handler
    warnings.showwarning = _warning
    sys.excepthook = _fatal
    sys.unraisablehook = lambda given: _aside(given.exc_value, given.err_msg or "ignored")
    threading.excepthook = lambda given: _aside(given.exc_value, "in a thread")


def report(error: BaseException) -> None:
    """Writes the traceback of an error to standard error."""
    block("".join(traceback.format_exception(error)).rstrip("\n"), err=True, indent="")


def _warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    block(f"{category.__name__}: {message}", err=True)


def _fatal(_kind: type[BaseException], error: BaseException, _trace: Any) -> None:
    report(error)


def _aside(error: BaseException | None, where: str) -> None:
    if error is not None and not isinstance(error, SystemExit):
        block(f"{where}: {type(error).__name__}: {error}", err=True)


def _bare(value: Any) -> Any:
    """With redacted URLs. Other texts are left as they are: a tensor may be called ``token=1``."""
    if isinstance(value, str):
        return redacted(value) if "://" in value else value
    if isinstance(value, Mapping):
        return {k: _bare(v) for k, v in value.items()}
    return [_bare(v) for v in value] if isinstance(value, list | tuple) else value


def _write(text: str, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    stream.write(text)
    stream.flush()


@cache
def _guarded() -> Callable[..., Console]:
    """The kind of console; made when one is needed, because rich takes a while to import."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Guarded(Console):
        # Every text that is given as one, cells of tables included, is cleaned before it is measured.
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(clean(text, lines=True), **how)

        # And nothing leaves without this, whatever it was made of.
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control or segment.text.isprintable():
                    yield segment
                else:
                    yield Segment(printable(segment.text, lines=True), segment.style)

    return Guarded


@cache
def _guarded_parser() -> type[ArgumentParser]:
    """The kind of parser; made when one is needed: the commands of `ckptcore` itself need none."""
    from argparse import ArgumentParser

    class Guarded(ArgumentParser):
        def error(self, message: str) -> NoReturn:
            block(f"{self.format_usage()}{self.prog}: error: {message}", err=True, indent="")
            self.exit(2)

    return Guarded
