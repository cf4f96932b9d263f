"""Targets: what is made of every checkpoint of a watched root, and where does it go?

A target is a request without its source: the same fields, checked by the same code. Its destination is a
template with a closed set of fields: ``{root}`` the watched root, ``{run}`` the folder that keeps the steps,
``{step}`` the step, ``{name}`` the checkpoint's own name, ``{path}`` its path below the root.

What a root is watched for holds for all below it, whoever names it: a sweep and an announcement then want the
same thing, and one claim keeps them from making it twice.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from string import Formatter
from typing import TYPE_CHECKING, Any, get_type_hints

from blake3 import blake3

from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.normalize import normal_uri
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import UsageError
from ckptcore.formats import by_name
from ckptcore.operations.discover import matches, step_and_run
from ckptcore.planning.options import request_field
from ckptcore.planning.request import Request
from ckptcore.store import join_url, local_path
from ckptcore.utils.text import shown as quoted

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

DESTINATION = "{root}/../exports/{run}/{name}"  # where nothing else is asked for
FIELDS = ("root", "run", "step", "name", "path")
_DISTINGUISH = ("step", "name", "path")
_OF_REQUEST = frozenset(f.name for f in fields(Request)) - {"source", "destination", "resume"}
# What decides whether it is done, not what is made.
_NOT_OUTPUT = ("source", "destination", "overwrite", "overwrite_foreign", "resume", "recover")


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """What a template is filled with; step is None where no name tells it."""

    root: str
    run: str
    step: int | None
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """options: fields of a `Request` in their JSON form. destination: the template."""

    destination: str
    options: Mapping[str, Any]

    def request(self, source: str, place: TemplateFields) -> Request:
        """What to make of one checkpoint; raises `UsageError`."""
        form = {**self.options, "source": source, "destination": self.fill(place)}
        return Request.from_dict(form)

    def fill(self, place: TemplateFields) -> str:
        """The destination of one checkpoint; raises `UsageError` when it has no step and one is needed."""
        given: dict[str, Any] = {
            "root": place.root.rstrip("/"),
            "run": place.run,
            "step": place.step,
            "name": _stem(place.name),
            "path": place.path,
        }
        if place.step is None and "step" in _fields(self.destination):
            raise UsageError(
                f"no name in {place.path} tells a step, and the destination needs one",
                hint="use {name} or {path} in the template",
            )
        return _normal(self.destination.format_map(given))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, which `target_of` reads."""
        return {"destination": self.destination, **self.options}


def target_of(form: Mapping[str, Any]) -> ExportTarget:
    """The target of its JSON form: a request's fields, and ``destination`` as a template.

    Raises `UsageError` for a field, a value or a template that can make nothing.
    """
    options = {request_field(k): v for k, v in form.items() if k != "destination"}
    unknown = sorted(set(options) - _OF_REQUEST)
    if unknown:
        raise UsageError(
            f"a target has no field {', '.join(unknown)}",
            hint=f"destination, {', '.join(sorted(_OF_REQUEST))}",
        )
    _require_types(options)
    target = ExportTarget(_checked(str(form.get("destination") or DESTINATION)), options)
    try:
        request = target.request("/a/run/step-1", TemplateFields("/a", "run", 1, "step-1", "run/step-1"))
        by_name(request.format, writes=True)
    except (TypeError, AttributeError) as error:  # a number where a text is meant, say
        raise UsageError(f"the target cannot be used: {error}") from error
    return target


def announced_request(
    catalog: Catalog, source: str, step: int | None = None
) -> tuple[RootRow, Request] | None:
    """The watched root that a source lies below, and what its target makes of it; None below no watched root.

    The innermost root counts, by name where several watch one place; paused ones count too. step: what the
    announcement says, for templates that need one where no name tells it. Raises `UsageError` when the
    target cannot be used for it.
    """
    with catalog.reading() as conn:
        every = roots.every(conn)
    for root in sorted(every, key=lambda r: (-len(r.uri), r.name)):
        path = _relative_path(source, root.uri)
        if path is None or not matches(path, root.include):
            continue
        told, run = step_and_run(root.uri, path)
        place = TemplateFields(root.uri, run, step if told is None else told, path.rsplit("/", 1)[-1], path)
        # Under the name by which a sweep knows it, also where links lead there under another.
        return root, target_of(root.target).request(join_url(root.uri, path), place)
    return None


def _require_types(options: Mapping[str, Any]) -> None:
    """Raises `UsageError` for a value of another type than its field: ``"false"`` would be true."""
    from pydantic import TypeAdapter, ValidationError

    types = get_type_hints(Request)
    for name, value in options.items():
        try:
            # As JSON: a list is a tuple there, and nothing else is taken for something else.
            TypeAdapter(types[name]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError, ValueError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise UsageError(
                f"the target cannot be used: {name} cannot be {quoted(value)}: {why}",
                hint=f"{name} is of the type {types[name]}",
            ) from error


def options_digest(request: Request) -> str:
    """Equal for requests that make the same bytes of the same source."""
    form = {k: v for k, v in request.as_dict().items() if k not in _NOT_OUTPUT}
    return blake3(canonical_json({**form, "to": request.format})).hexdigest()


def colliding(destinations: Iterable[str]) -> frozenset[str]:
    """The destinations that are named more than once, or lie in one another."""
    once: set[str] = set()
    again: set[str] = set()
    for each in destinations:
        (again if each in once else once).add(each)
    for each in once:
        above = posixpath.dirname(each)
        while above not in ("", "/") and not above.endswith(":/") and above != posixpath.dirname(above):
            if above in once:
                again |= {each, above}
            above = posixpath.dirname(above)
    return frozenset(again)


def _fields(template: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _checked(template: str) -> str:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"the destination {template!r} is no template: {error}") from error
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in FIELDS or conversion:
            raise UsageError(
                f"the destination {template!r} has a field {{{name}}}",
                hint=f"fields are {', '.join('{' + f + '}' for f in FIELDS)}",
            )
        if spec and not (name == "step" and re.fullmatch(r"0?\d{1,2}d?", spec)):
            raise UsageError(
                f"the destination {template!r} formats {{{name}}} as {spec!r}",
                hint="only {step:08d} and the like",
            )
    if not any(name in _DISTINGUISH for name in _fields(template)):
        raise UsageError(
            f"the destination {template!r} is the same for every checkpoint",
            hint="use {step}, {name} or {path}",
        )
    return template


def _stem(name: str) -> str:
    """A file's name without its suffix: what is made of it has its own.

    >>> _stem("epoch=1-step=300.ckpt"), _stem("step-1.5b")
    ('epoch=1-step=300', 'step-1.5b')
    """
    return re.sub(r"\.(?:ckpt|pt|pth|bin|safetensors)$", "", name)


def _normal(url: str) -> str:
    """Without ``..``: nothing written may depend on where links lead."""
    if local_path(url) is not None:
        return posixpath.normpath(url)
    scheme, sign, rest = url.partition("://")
    path = posixpath.normpath(rest)
    if path.startswith("..") or path in (".", "/"):
        raise UsageError(f"the destination {url} lies above its bucket", hint="use fewer ..")
    return f"{scheme}{sign}{path}"


def _relative_path(source: str, root: str) -> str | None:
    """The path of a source below a root, or None; links are resolved."""
    here, inside = normal_uri(source), normal_uri(root).rstrip("/") + "/"
    return here[len(inside) :] if here.startswith(inside) and len(here) > len(inside) else None
