"""Define the output and the destination for every checkpoint of a watched root.

A target is a request without its source: the same fields, checked by the same code. Its destination is a
template with a closed set of fields: ``{root}`` the watched root, ``{run}`` the folder that contains the
steps, ``{step}`` the step, ``{name}`` the checkpoint's own name, ``{path}`` its path below the root.
The suffix of a file, such as Lightning's ``.ckpt``, is left out of both: the output has its own.

The target of a root applies to every checkpoint below it, for sweeps and for announcements. So both make the
same request, and one claim prevents a second conversion.

A further target may be an average: with ``merge_last`` (and ``merge_every``, ``merge_decay``) it applies to
the last steps of a run that are multiples of a number, once for each such step.

What a root makes is settled when it is added or changed, instead of at each sweep. It is swept by a worker
that has another working folder: paths are made absolute. Sizes are written as on the command line. A config
or tokenizer that cannot be read is refused then, where it can be corrected.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any, get_type_hints

from blake3 import blake3

from ckptcore.catalog import watched_roots as roots
from ckptcore.catalog.normalize import normal_uri, same_places
from ckptcore.catalog.watched_roots import RootRow
from ckptcore.core.columnar_file import canonical_json
from ckptcore.errors import UsageError
from ckptcore.formats import by_name
from ckptcore.operations.discover import matches, step_and_run
from ckptcore.planning.model_files import require_named_files
from ckptcore.planning.options import request_field
from ckptcore.planning.request import STATED, Request
from ckptcore.store import join_url, local_path
from ckptcore.utils.average_url import average_url, require_weights, weights_for
from ckptcore.utils.text import short_repr as quoted
from ckptcore.utils.units import parse_size

if TYPE_CHECKING:
    from ckptcore.catalog.catalog import Catalog

DESTINATION = "{root}/../exports/{run}/{name}"  # the default
FIELDS = ("root", "run", "step", "name", "path")
_DISTINGUISH = ("step", "name", "path")
_OF_REQUEST = frozenset(STATED) - {"source", "destination", "resume"}
_FILES = ("config", "tokenizer")
_NONE = "none"  # the value of an option that asks for no file
_OF_WINDOW = ("merge_last", "merge_every", "merge_decay")
# Fields that do not change the output.
_NOT_OUTPUT = (
    "source",
    "destination",
    "overwrite",
    "overwrite_foreign",
    "overwrite_in_place",
    "resume",
    "recover",
)


@dataclass(frozen=True, slots=True)
class TemplateFields:
    """The values of a template's fields; step is None if no name has a step number."""

    root: str
    run: str
    step: int | None
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class MergeWindow:
    """Which steps of a run are averaged.

    Attributes:
        merge_last: How many.
        merge_every: Only steps that are multiples of this count.
        merge_decay: Of an exponential moving average; None: all count alike.
    """

    merge_last: int
    merge_every: int = 1
    merge_decay: float | None = None

    def __post_init__(self) -> None:
        if self.merge_every < 1:
            raise UsageError(f"merge_every must be at least 1 (got {self.merge_every})")
        require_weights(self.weights, self.merge_last)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the steps, the oldest first."""
        return weights_for(self.merge_last, None, self.merge_decay)

    def source(self, steps: Mapping[int, str], newest: int) -> str | None:
        """Return the average that ends with a step; None if there is none. steps: step -> its place."""
        counted = [step for step in sorted(steps) if step <= newest and step % self.merge_every == 0]
        window = counted[-self.merge_last :]
        if len(window) < self.merge_last or window[-1] != newest:
            return None
        return average_url([steps[step] for step in window], self.weights)


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A target.

    Attributes:
        destination: The template.
        options: Fields of a `Request` in their JSON form.
        window: The steps that it averages; None where it converts each of them.
    """

    destination: str
    options: Mapping[str, Any]
    window: MergeWindow | None = None

    def request(self, source: str, place: TemplateFields) -> Request:
        """Return the request for one checkpoint; raise `UsageError` if there can be none."""
        form = {**self.options, "source": source, "destination": self.fill(place)}
        return Request.from_dict(form)

    def fill(self, place: TemplateFields) -> str:
        """Return the destination of one checkpoint; raise `UsageError` if it needs a step and has none."""
        fields: dict[str, Any] = {
            "root": place.root.rstrip("/"),
            "run": place.run,
            "step": place.step,
            "name": stem(place.name),
            "path": stem(place.path),
        }
        if place.step is None and "step" in _fields(self.destination):
            raise UsageError(
                f"cannot fill {{step}}: no step number in {place.path!r}",
                hint="use {name} or {path} in the template",
            )
        return _normal(self.destination.format_map(fields))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, which `target_of` reads."""
        window = {} if self.window is None else asdict(self.window)
        return {"destination": self.destination, **self.options, **window}


def target_of(form: Mapping[str, Any]) -> ExportTarget:
    """Read a target from its JSON form: a request's fields, and ``destination`` as a template.

    Raises:
        UsageError: A field, a value or the template is invalid.
    """
    window = {name: value for name, value in form.items() if name in _OF_WINDOW}
    options = {request_field(k): v for k, v in form.items() if k != "destination" and k not in window}
    unknown = sorted(set(options) - _OF_REQUEST)
    if unknown:
        raise UsageError(
            f"a target has no field {', '.join(unknown)}",
            hint=f"fields are destination, {', '.join((*sorted(_OF_REQUEST), *_OF_WINDOW))}",
        )
    _require_types(options)
    destination = _checked(str(form.get("destination") or DESTINATION))
    target = ExportTarget(destination, options, _window_of(window))
    try:
        request = target.request("/a/run/step-1", TemplateFields("/a", "run", 1, "step-1", "run/step-1"))
        by_name(request.format, writes=True)
    except (TypeError, AttributeError) as error:  # a number instead of a text, say
        raise UsageError(f"the target cannot be used: {error}") from error
    return target


def _window_of(form: Mapping[str, Any]) -> MergeWindow | None:
    if not form:
        return None
    if "merge_last" not in form:
        raise UsageError("an average of a root's steps needs merge_last", hint='such as {"merge_last": 8}')
    _require_types(form, MergeWindow)
    return MergeWindow(**form)


def targets_of(root: RootRow) -> tuple[ExportTarget, ...]:
    """Return all targets of a root, its first one first. Raises `UsageError`, as `target_of`."""
    _require_usable(root)
    targets = tuple(target_of(form) for form in (root.target, *root.also))
    require_apart_targets(targets)
    return targets


def _require_usable(root: RootRow) -> None:
    """Raise `UsageError` for a watched root whose row in the catalog is odd."""
    if root.trouble:
        raise UsageError(
            f"the row of the watched root {root.name} cannot be used: {root.trouble}",
            hint="remove the root, and add it again",
        )


def require_apart_targets(targets: Sequence[ExportTarget]) -> None:
    """Raise `UsageError` if two targets of a root would write to one place, or the first is an average."""
    if targets and targets[0].window is not None:
        raise UsageError(
            "the first target of a root cannot be an average: an announced step is converted alone",
            hint="give merge_last in --also, with a destination of its own",
        )
    place = TemplateFields("/a", "run", 1, "step-1", "run/step-1")
    doubled = colliding(target.fill(place) for target in targets)
    if doubled:
        raise UsageError(
            f"two targets of the root would both write to {min(doubled)}",
            hint="give each of --also a destination of its own",
        )


def settled(form: Mapping[str, Any], *, reads: bool = True) -> ExportTarget:
    """Return a target with absolute paths and sizes in bytes.

    Args:
        form: The JSON form of a target, as `target_of` reads it.
        reads: Whether the files that it names are read; another machine may be the one that has them.

    Raises:
        UsageError: A field, a value or the template is invalid, or a named file cannot be read.
    """
    values = dict(form)
    for name in (*_FILES, "destination"):
        value = values.get(name)
        if isinstance(value, str) and value and value != _NONE and not value.startswith("{"):
            path = local_path(value)
            values[name] = value if path is None else os.path.abspath(path)
    size = values.get("max_file_size")
    if isinstance(size, str):
        values["max_file_size"] = parse_size(size)
    target = target_of(values)
    if reads:
        require_readable(target)
    return target


def settled_all(forms: Sequence[Mapping[str, Any]], *, reads: bool = True) -> list[ExportTarget]:
    """Return the targets of one root; raise `UsageError` as `settled`, or if two would write to one place."""
    targets = [settled(form, reads=reads) for form in forms]
    require_apart_targets(targets)
    return targets


def require_readable(target: ExportTarget) -> None:
    """Raise `UsageError` if the config or the tokenizer that a target names cannot be read."""
    require_named_files(*(target.options.get(name) for name in _FILES))


def check_root(root: RootRow) -> None:
    """Raise `UsageError` if a root's targets cannot be used, or the files that they name cannot be read."""
    for target in targets_of(root):
        require_readable(target)


def announced_request(
    catalog: Catalog, source: str, step: int | None = None
) -> tuple[RootRow, Request] | None:
    """Return the watched root of an announced source, and the request of its target.

    The innermost root applies, the first by name if several watch one place; paused ones apply, too.

    Args:
        catalog: The catalog.
        source: Path or URL of the source.
        step: The step of the announcement, for templates that need one if no name has it.

    Returns:
        The root and the request; None if the source is below no watched root.

    Raises:
        UsageError: The target cannot be used for the source.
    """
    with catalog.reading() as conn:
        watched_roots = roots.every(conn)
    for root in sorted(watched_roots, key=lambda r: (-len(r.uri), r.name)):
        path = _relative_path(source, root.uri)
        if path is None or not matches(path, root.include):
            continue
        _require_usable(root)
        path_step, run = step_and_run(root.uri, path)
        place = TemplateFields(
            root.uri, run, step if path_step is None else path_step, path.rsplit("/", 1)[-1], path
        )
        # Use the name that a sweep uses, even if the announcement's path has links.
        return root, target_of(root.target).request(join_url(root.uri, path), place)
    return None


def _require_types(options: Mapping[str, Any], kind: type[Any] = Request) -> None:
    """Raise `UsageError` for a value of another type than its field: ``"false"`` would be true."""
    from pydantic import TypeAdapter, ValidationError

    types = get_type_hints(kind)
    for name, value in options.items():
        try:
            # In JSON mode a list is valid for a tuple, and no other value is converted.
            TypeAdapter(types[name]).validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError, ValueError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise UsageError(
                f"the target cannot be used: {name} cannot be {quoted(value)}: {why}",
                hint=f"{name} is of the type {types[name]}",
            ) from error


def options_digest(request: Request) -> str:
    """Return a digest that is equal for requests that make the same bytes from the same source."""
    form = {k: v for k, v in request.anchored().as_dict().items() if k not in _NOT_OUTPUT}
    return blake3(canonical_json({**form, "to": request.format})).hexdigest()


def sources_among(
    uris: Sequence[str], destinations: Sequence[Sequence[str]]
) -> tuple[list[int], frozenset[tuple[int, int]]]:
    """Return which checkpoints are no output of another one, and the targets that would write over a source.

    If each is an output of another, the targets lead back to the sources, and all are sources.

    Args:
        uris: The checkpoints.
        destinations: Of the outputs of each; "" for none.

    Returns:
        Positions of the sources, and (checkpoint, target) of the targets.
    """
    places = [
        [set(same_places(output_uri)) if output_uri else set() for output_uri in outputs]
        for outputs in destinations
    ]
    writers: dict[str, set[int]] = {}
    for n, outputs in enumerate(places):
        for place in set().union(*outputs):
            writers.setdefault(place, set()).add(n)
    source_uris = [normal_uri(uri) for uri in uris]
    sources = [n for n, uri in enumerate(source_uris) if writers.get(uri, set()) <= {n}] or [
        *range(len(source_uris))
    ]
    taken = {source_uris[n] for n in sources}
    back = {(n, k) for n in sources for k, outputs in enumerate(places[n]) if outputs & taken}
    return sources, frozenset(back)


def colliding(destinations: Iterable[str]) -> frozenset[str]:
    """Return the destinations that occur more than once, or that are inside one another."""
    once: set[str] = set()
    doubled: set[str] = set()
    for destination in destinations:
        (doubled if destination in once else once).add(destination)
    for destination in once:
        above = posixpath.dirname(destination)
        while above not in ("", "/") and not above.endswith(":/") and above != posixpath.dirname(above):
            if above in once:
                doubled |= {destination, above}
            above = posixpath.dirname(above)
    return frozenset(doubled)


def _fields(template: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(template) if name is not None]


def _checked(template: str) -> str:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"the destination {template!r} is not a template: {error}") from error
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if name not in FIELDS or conversion:
            raise UsageError(
                f"the destination {template!r} has an unknown field {{{name}}}",
                hint=f"fields are {', '.join('{' + f + '}' for f in FIELDS)}",
            )
        if spec and not (name == "step" and re.fullmatch(r"0?\d{1,2}d?", spec)):
            raise UsageError(
                f"the destination {template!r} formats {{{name}}} as {spec!r}",
                hint="only the step has a format, such as {step:08d}",
            )
    if not any(name in _DISTINGUISH for name in _fields(template)):
        raise UsageError(
            f"the destination {template!r} is the same for every checkpoint",
            hint="use {step}, {name} or {path}",
        )
    return template


def stem(name: str) -> str:
    """Return a file's name without its suffix: the output has its own.

    >>> stem("epoch=1-step=300.ckpt"), stem("step-1.5b")
    ('epoch=1-step=300', 'step-1.5b')
    """
    return re.sub(r"\.(?:ckpt|pt|pth|bin|safetensors)$", "", name)


def _normal(url: str) -> str:
    """Return a URL without ``..``: the target of a write must not depend on links."""
    if local_path(url) is not None:
        return posixpath.normpath(url)
    scheme, sign, rest = url.partition("://")
    path = posixpath.normpath(rest)
    if path.startswith("..") or path in (".", "/"):
        raise UsageError(f"the destination {url} is above its bucket", hint="use fewer ..")
    return f"{scheme}{sign}{path}"


def _relative_path(source: str, root: str) -> str | None:
    """Return the path of a source below a root, or None; links are resolved."""
    source_uri, inside = normal_uri(source), normal_uri(root).rstrip("/") + "/"
    return (
        source_uri[len(inside) :] if source_uri.startswith(inside) and len(source_uri) > len(inside) else None
    )
