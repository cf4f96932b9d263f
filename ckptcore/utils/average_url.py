"""Spell a weighted average of checkpoints as one source: ``average://[WEIGHT*ROOT,WEIGHT*ROOT]``.

The order of the inputs is that of the sum, so it stays. A root has ``%,[]`` in it as ``%25``, ``%2C``,
``%5B`` and ``%5D``; it may itself be a source of several folders (`ckptcore.utils.merged_url`).

A model with an adapter merged into it is a sum, too: ``adapted://[ADAPTER,BASE]``, in which both count fully.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from urllib.parse import unquote

from ckptcore.errors import UsageError

_SCHEME, _ADAPTED = "average://", "adapted://"
_SPELLED = re.compile(r"a(?:verage|dapted)://\[([^\[\]]+)\](?:/(.*))?", re.DOTALL)
_FOLDER = re.compile(r"@\d+/")
_ESCAPED = {character: f"%{ord(character):02X}" for character in "%,[]"}


def is_average(url: str) -> bool:
    """Report whether a URL names a sum of checkpoints: a weighted average, or a model with an adapter."""
    return url.startswith((_SCHEME, _ADAPTED))


def is_adapted(url: str) -> bool:
    """Report whether a URL names a model with an adapter merged into it."""
    return url.startswith(_ADAPTED)


def adapted_url(base: str, adapter: str) -> str:
    """Return the URL of a model with an adapter merged into it.

    >>> adapted_url("/models/base", "/runs/lora")
    'adapted://[/runs/lora,/models/base]'
    """
    # The base comes last: the names, the config and all else of a sum are its last input's.
    return f"{_ADAPTED}[{escaped(adapter)},{escaped(base)}]"


def with_inputs(url: str, roots: Sequence[str]) -> str:
    """Return the URL of the same sum of other inputs.

    >>> with_inputs("average://[1.0*a,3.0*b]", ["/a", "/b"]), with_inputs("adapted://[a,b]", ["/a", "/b"])
    ('average://[1.0*/a,3.0*/b]', 'adapted://[/a,/b]')
    """
    if is_adapted(url):
        adapter, base = roots
        return adapted_url(base, adapter)
    return average_url(roots, split_average(url)[1])


def average_url(roots: Sequence[str], weights: Sequence[float]) -> str:
    """Return the URL of a weighted average, in the order of the sum.

    >>> average_url(["/run/step-2", "/run/step-1"], [0.75, 0.25])
    'average://[0.75*/run/step-2,0.25*/run/step-1]'

    Raises:
        UsageError: There are fewer than two inputs, or their weights cannot be used.
    """
    require_weights(weights, len(roots))
    parts = (f"{weight!r}*{escaped(root)}" for weight, root in zip(map(float, weights), roots, strict=True))
    return f"{_SCHEME}[{','.join(parts)}]"


def split_average(url: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return the inputs of an average and their weights; nothing for another URL.

    >>> split_average("average://[1.0*/run/a,3.0*merged://%5B/n0%2C/n1%5D]")
    (('/run/a', 'merged://[/n0,/n1]'), (1.0, 3.0))
    >>> split_average("adapted://[/runs/lora,/models/base]")
    (('/runs/lora', '/models/base'), (1.0, 1.0))
    >>> split_average("/run/a")
    ((), ())

    Raises:
        UsageError: The URL begins like one, and is none.
    """
    if not is_average(url):
        return (), ()
    matched = _SPELLED.fullmatch(url)
    parts = matched[1].split(",") if matched is not None else []
    if is_adapted(url):
        if len(parts) != 2 or "" in parts:
            raise UsageError(
                f"cannot read {url}: not an adapter and a base",
                hint="write adapted://[ADAPTER,BASE], with %25, %2C, %5B and %5D for %,[] in names",
            )
        return (unquote(parts[0]), unquote(parts[1])), (1.0, 1.0)
    pairs = [part.partition("*") for part in parts]
    try:
        weights = tuple(float(weight) for weight, _, _ in pairs)
    except ValueError:
        weights = ()
    roots = tuple(unquote(root) for _, _, root in pairs)
    if not weights or "" in roots:
        raise UsageError(
            f"cannot read {url}: not a list of WEIGHT*CHECKPOINT",
            hint="write average://[WEIGHT*ROOT,WEIGHT*ROOT], with %25, %2C, %5B and %5D for %,[] in names",
        )
    require_weights(weights, len(roots))
    return roots, weights


def file_of_average(url: str) -> str:
    """Return where a file is that the URL of an average names behind it; "" for the average itself.

    >>> file_of_average("average://[1.0*/run/a,1.0*/run/b]/@1/model/x"), file_of_average("average://[1.0*a,1.0*b]")
    ('/run/a/model/x', '')
    >>> file_of_average("average://[1.0*/run/a,1.0*/run/b]/config.json")
    '/run/b/config.json'
    """
    matched = _SPELLED.fullmatch(url)
    path = (matched[2] or "").strip("/") if matched is not None else ""
    if not path:
        return ""
    roots, _ = split_average(url)
    for place, root in enumerate(roots):
        folder = folder_of_input(place, len(roots))
        if path.startswith(folder):
            return f"{root.rstrip('/')}/{path.removeprefix(folder)}"
    return ""


def require_weights(weights: Sequence[float], inputs: int) -> None:
    """Require at least two inputs, a finite weight for each, and a sum that is not zero.

    Raises:
        UsageError: They are not so.
    """
    if inputs < 2:
        raise UsageError(
            f"an average needs at least two checkpoints (got {inputs})",
            hint="name every checkpoint of the window",
        )
    if len(weights) != inputs:
        raise UsageError(
            f"--weights needs one number for each checkpoint: {inputs} (got {len(weights)})",
            hint="give them in the order of the checkpoints, such as --weights 1,2,3",
        )
    odd = next((weight for weight in weights if not math.isfinite(weight)), None)
    if odd is not None:
        raise UsageError(f"a weight must be a finite number (got {odd})")
    if not normalized(weights):
        raise UsageError(f"weights must not sum to zero (got {', '.join(map(str, weights))})")


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights divided by their sum, exactly rounded; nothing where that is no finite number.

    >>> normalized([1, 1, 2]), normalized([1, -1])
    ((0.25, 0.25, 0.5), ())
    """
    try:
        total = math.fsum(weights)
    except OverflowError:
        return ()
    shares = tuple(weight / total for weight in weights) if total else ()
    return shares if all(map(math.isfinite, shares)) else ()


def decaying(decay: float, inputs: int) -> tuple[float, ...]:
    """Return the weights of an exponential moving average that begins with the first input.

    The average of the first is itself; each later one is ``decay * average + (1 - decay) * input``.

    >>> decaying(0.5, 3)
    (0.25, 0.25, 0.5)

    Raises:
        UsageError: The decay is not between 0 and 1.
    """
    if not 0 < decay < 1:
        raise UsageError(f"--decay must be between 0 and 1 (got {decay})", hint="try --decay 0.9")
    later = ((1 - decay) * decay ** (inputs - 1 - place) for place in range(1, inputs))
    return (decay ** (inputs - 1), *later)


def folder_of_input(place: int, inputs: int) -> str:
    """Return the folder, with its slash, of an input's files: "" for the last one.

    >>> folder_of_input(0, 3), folder_of_input(2, 3)
    ('@1/', '')
    """
    return "" if place == inputs - 1 else f"@{place + 1}/"


def is_of_last(path: str) -> bool:
    """Report whether a file's name in an average is one of the last input."""
    return _FOLDER.match(path) is None


def weights_for(count: int, weights: Sequence[float] | None, decay: float | None) -> tuple[float, ...]:
    """Return the weights of so many inputs: those that are given, those of a decay, or equal ones.

    >>> weights_for(2, None, None), weights_for(2, None, 0.75)
    ((1.0, 1.0), (0.75, 0.25))

    Raises:
        UsageError: Both are given.
    """
    if weights is not None and decay is not None:
        raise UsageError(
            "--weights and --decay both say how much a checkpoint counts", hint="name one of them"
        )
    if weights is not None:
        return tuple(map(float, weights))
    return (1.0,) * count if decay is None else decaying(decay, count)


def sum_url(
    roots: Sequence[str],
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    adapter: str | None = None,
) -> str:
    """Return the URL of an average, or of a base with an adapter.

    Raises:
        UsageError: Weights do not fit, or an adapter has several bases or weights.
    """
    if adapter is None:
        return average_url(roots, weights_for(len(roots), weights, decay))
    if len(roots) != 1 or weights is not None or decay is not None:
        raise UsageError(
            f"--adapter is merged into one base, without weights (got {len(roots)} checkpoints)",
            hint="ckptcore merge BASE DST --adapter ADAPTER",
        )
    return adapted_url(roots[0], adapter)


def escaped(root: str) -> str:
    """Return a URL as one of a list of URLs, without the characters that the list has."""
    return "".join(_ESCAPED.get(character, character) for character in root)
