"""Say in words what the catalog stores in short: the options of a conversion, and codes of errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from ckptcore.errors import FINDINGS, error_classes
from ckptcore.planning.options import Options, options_of, request_field
from ckptcore.planning.request import Request
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.late_pattern import late_pattern

_CODE = late_pattern(r"(?:^|[\s(])([a-z]+(?:-[a-z0-9]+)*)(?=:\s|$)")
_DISPLAYED_ABOVE = ("source", "destination", "verb")  # the page has them above


@dataclass(frozen=True, slots=True)
class StatedOption:
    """An option that is not at its default, as the command line calls it. effect: what it does."""

    name: str
    value: str
    effect: str


def stated(request: Mapping[str, Any]) -> list[StatedOption]:
    """Return the options of a conversion that are not at their defaults.

    >>> [(o.name, o.value) for o in stated({"verb": "export", "recover": True, "dtype": "bf16"})]
    [('--allow-incomplete', 'yes'), ('--dtype', 'bf16')]
    """
    defaults = {f.name: f.default for f in fields(Request) if f.default is not MISSING}
    names = {request_field(name): name for name in options_of(Options)}
    options = []
    for field, value in request.items():
        default = defaults.get(field)
        plain = tuple(map(_frozen, value)) if isinstance(value, list) else value
        if field in _DISPLAYED_ABOVE or plain == default or plain in (None, (), ""):
            continue
        name = names.get(field, field)
        effect = options_of(Options)[name][1].help if name in options_of(Options) else ""
        off = value is False
        options.append(
            StatedOption(f"--{'no-' if off else ''}{name.replace('_', '-')}", _rendered(value), effect)
        )
    return options


def next_step(text: str | None) -> str:
    """Return the next step for the first code of an error or a finding in a text; "" without one.

    >>> next_step("worker-lost: the process was ended")
    "check the workers' logs and memory, then run the command again: finished files are kept"
    >>> next_step("next try at 12:00:00 UTC: not-complete: .metadata is missing")
    'wait until the save has finished, then run the command again'
    >>> next_step("all is well")
    ''
    """
    steps = _steps()
    codes = (match[1] for match in _CODE.finditer(str(text or "")))
    return next((steps[code] for code in codes if code in steps), "")


@cache
def _steps() -> dict[str, str]:
    return {code: step for code, (_, _, step) in FINDINGS.items()} | {
        error.code: error.default_hint for error in error_classes()
    }


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rendered(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(
            "=".join(map(str, element)) if isinstance(element, list) else str(element) for element in value
        )
    return str(value)
