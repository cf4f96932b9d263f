"""Write to standard output and standard error, with untrusted text made safe.

Every message goes through this module. Paths, names of tensors, keys of objects, values of a catalog and
messages of libraries are untrusted: a control character in one of them could clear the screen, forge a line
or retitle the window, a bidirectional override could pass one path off as another, a URL could hold a
password. Here all of them are escaped and `redacted`. Output for programs is JSON in ASCII: exact, except
for the credentials of URLs.

    line      one line of text
    block     several lines, for an error or a traceback
    console   a rich console for tables and colours: no markup, and the same rule for every text
    write_json  an answer for programs
    parser    `argparse`, whose messages repeat the arguments
    guard     output of Python and libraries: warnings, tracebacks, logging
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ckptcore.errors import CkptError
from ckptcore.redaction import redacted
from ckptcore.utils.log_format import JsonFormatter, log_format

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console
    from rich.text import Text

PIPE = 1 << 15  # columns of what a program reads
Part = str | tuple[str, str]  # a text, or a text and its style


def printable(text: str, *, lines: bool = False) -> str:
    r"""Return ``text`` with every character escaped that is not visible as itself.

    These are controls, overrides and lone surrogates.

    Args:
        text: Any text.
        lines: Keep line breaks.

    >>> printable("a\x1b[2J\u202eb\udc80\n"), printable("modèle\n", lines=True)
    ('a\\x1b[2J\\u202eb\\udc80\\n', 'modèle\n')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def clean(text: str, *, lines: bool = False) -> str:
    """Return ``text`` for display: `redacted`, then `printable`."""
    return printable(redacted(text), lines=lines)


def line(text: str, *, err: bool = False) -> None:
    """Write one line of text, whatever it contains."""
    _write(clean(text) + "\n", err)


def cleaned_lines(lines: Iterable[str]) -> None:
    """Write lines whose texts are `clean`."""
    _write("\n".join([*lines, ""]), False)


def block(text: str, *, err: bool = False, indent: str = "  ") -> None:
    """Write lines of text; those after the first are indented, so that none can pass for ckptcore's own."""
    first, *rest = clean(text, lines=True).split("\n")
    _write("\n".join([first, *(indent + row for row in rest)]) + "\n", err)


def write_json(value: Any, *, indent: int | None = None) -> None:
    """Write an answer for programs.

    Characters beyond ASCII are escaped, URLs lose their credentials, and numbers that JSON does not have are
    the texts ``inf``, ``-inf`` and ``nan``.
    """
    write = partial(json.dumps, ensure_ascii=True, allow_nan=False, indent=indent)
    try:
        written = write(value)
    except ValueError:  # looking for such numbers first would take longer than writing
        written = write(value := _replaced(value, _finite))
    # Most answers have no URL: they are written without a second pass.
    if "://" in written:
        written = write(_replaced(value, _bare))
    _write(written + "\n", False)


def text(*parts: Part, lines: bool = False) -> Text:
    """Return a text for a console, from parts with and without a style; each of them is `clean`."""
    from rich.text import Text

    styled = Text()
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        styled.append(clean(content, lines=lines), style)
    return styled


def console(*, err: bool = False, width: int | None = None) -> Console:
    """Return a console for tables and progress, without markup: `text` sets styles.

    Into a pipe nothing is wrapped or cut, unless ``COLUMNS`` is set: `grep` finds whole names.
    """
    if width is None and not err and is_piped():
        width = PIPE
    return _guarded()(stderr=err, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def is_piped() -> bool:
    """Return whether standard output is read by a program, which gets every row in full."""
    return not sys.stdout.isatty() and "COLUMNS" not in os.environ


def parser(prog: str, description: str | None) -> ArgumentParser:
    """Return an argument parser whose messages are `clean`."""
    return _guarded_parser()(prog=prog, description=description)


class Formatter(logging.Formatter):
    """Formats each record as `clean` lines; all but the first are indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        return clean(super().format(record), lines=True).replace("\n", "\n  ")


def formatter(text: str) -> logging.Formatter:
    """Return the formatter that ``CKPTCORE_LOG_FORMAT`` asks for; an unusable value ends the process.

    Args:
        text: The format of lines of text.
    """
    try:
        name = log_format()
    except CkptError as error:
        block(f"{error.code}: {error.message}", err=True)
        sys.exit(error.exit_code)
    return JsonFormatter() if name == "json" else Formatter(text)


class Clean(logging.Filter):
    """Makes records `clean` before other handlers see them: Prefect's terminal and its server."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Accept every record."""
        with contextlib.suppress(TypeError, ValueError):  # a wrong format string is the handler's to report
            record.msg, record.args = clean(record.getMessage(), lines=True), None
        if record.exc_info and not record.exc_text:
            record.exc_text = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        if record.exc_text:
            record.exc_text = clean(record.exc_text, lines=True)
        return True


def plain_handler(of: logging.StreamHandler[TextIO]) -> logging.Handler:
    """Return a handler that writes `clean` lines as they are to the stream of another one, in its format."""
    handler = logging.StreamHandler(of.stream)
    handler.setLevel(of.level)
    handler.setFormatter(of.formatter)
    for log_filter in of.filters:
        handler.addFilter(log_filter)
    if not any(isinstance(log_filter, Clean) for log_filter in handler.filters):
        handler.addFilter(Clean())
    return handler


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the log of a service to standard error, as ``CKPTCORE_LOG_FORMAT`` says."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def guard() -> None:
    """Send the output of Python itself through this module, in processes that ckptcore starts."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets escapes instead of an error
            stream.reconfigure(errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter("%(message)s"))
    handler.setLevel(logging.WARNING)
    logging.lastResort = handler
    warnings.showwarning = _warning
    sys.excepthook = _fatal
    sys.unraisablehook = lambda event: _aside(event.exc_value, event.err_msg or "ignored")
    threading.excepthook = lambda event: _aside(event.exc_value, "in a thread")


def report(error: BaseException) -> None:
    """Write the traceback of an error to standard error."""
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


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a value of JSON with each of its texts and numbers replaced."""
    if isinstance(value, Mapping):
        return {k: _replaced(v, replace) for k, v in value.items()}
    return [_replaced(v, replace) for v in value] if isinstance(value, list | tuple) else replace(value)


def _bare(leaf: Any) -> Any:
    """Redact a URL. Other texts stay as they are: a tensor may be named ``token=1``."""
    return redacted(leaf) if isinstance(leaf, str) and "://" in leaf else leaf


def _finite(leaf: Any) -> Any:
    return str(leaf) if isinstance(leaf, float) and not math.isfinite(leaf) else leaf


def _write(text: str, err: bool) -> None:
    stream = sys.stderr if err else sys.stdout
    stream.write(text)
    stream.flush()


@cache
def _guarded() -> Callable[..., Console]:
    """Return the console class, made on first use because rich takes long to import."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Guarded(Console):
        # Every text, including cells of tables, is cleaned before it is measured.
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(clean(text, lines=True), **options)

        # The last filter for everything that is written.
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
    """Return the parser class, made on first use: most commands of `ckptcore` need none."""
    from argparse import ArgumentParser

    class Guarded(ArgumentParser):
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            arguments = sys.argv[1:] if args is None else list(args)
            for name, value in zip(["", *arguments], arguments, strict=False):
                # What a shell makes of a variable that is not set is not a wish for the default.
                if value == "" or (value.startswith("--") and value.find("=") == len(value) - 1):
                    where = value[:-1] or (name if name.startswith("-") else "")
                    self.error(f"argument {where}: must not be empty" if where else "an argument is empty")
            return super().parse_known_args(arguments, namespace)

        def error(self, message: str) -> NoReturn:
            block(f"{self.format_usage()}{self.prog}: error: {message}", err=True, indent="")
            self.exit(2)

    return Guarded
