"""Find the prefix that a trainer put in front of every name of a model, to suggest its removal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

# First parts of names below ``model.`` that models on the Hugging Face hub have themselves.
_OF_THE_HUB = frozenset({"decoder", "embed_tokens", "encoder", "layers", "norm", "rotary_emb", "shared"})
# What trainers call the attribute that holds the model (Lightning, DDP, torch.compile, own classes).
_ATTRIBUTES = frozenset({"_orig_mod", "llm", "lm", "model", "module", "net", "network", "policy", "student"})
_MOST_PARTS = 3


def unneeded_prefix(unexpected: Collection[str], missing: Collection[str]) -> str:
    """Return the prefix without which most of the unexpected names are missing ones, or "".

    >>> unneeded_prefix(["net.h.0.w", "net.head.w", "net.mask"], ["h.0.w", "head.w"])
    'net.'
    >>> unneeded_prefix(["h.0.w"], ["head.w"])
    ''
    """
    missing_names = set(missing)
    prefix = ""
    for _ in range(_MOST_PARTS):
        prefix = _longer(unexpected, prefix)
        if not prefix:
            return ""
        if 2 * sum(name[len(prefix) :] in missing_names for name in unexpected) > len(unexpected):
            return prefix
    return ""


def possible_wrapper(names: Collection[str]) -> str:
    """Return the prefix of every name that may be a wrapper's, or "" where it is the model's own.

    >>> possible_wrapper(["model.bert.embeddings.w", "model.cls.w"])
    'model.'
    >>> possible_wrapper(["model.layers.0.w", "model.norm.w"])
    ''
    """
    prefix = _longer(names, "")
    if prefix[:-1] not in _ATTRIBUTES:
        return ""
    below = {name[len(prefix) :].partition(".")[0] for name in names}
    return "" if prefix == "model." and below <= _OF_THE_HUB else prefix


def note_of_wrapper(names: Collection[str]) -> tuple[str, str]:
    """Return what to say, and to advise, of names that may be below a wrapper; "" and "" for others.

    >>> note_of_wrapper(["net.h.0.w", "net.head.w"])[1]
    "--rename net.= if the model's names do not begin with it"
    >>> note_of_wrapper(["model.layers.0.w", "model.norm.w"])
    ('', '')
    """
    prefix = possible_wrapper(names)
    if not prefix:
        return "", ""
    return (
        f"; every name begins with {prefix}, which may be a trainer's wrapper around the model",
        f"{remove_prefix(prefix)} if the model's names do not begin with it",
    )


def prefix_of_taken(names: Collection[str], taken: Callable[[Sequence[str]], int]) -> str:
    """Return the prefix without which a map takes most names, or "".

    Args:
        names: Those that it does not take with their prefix. Some may be of another part.
        taken: Returns how many of some names the map takes.

    >>> prefix_of_taken(["model.h.0.w", "model.h.1.w", "args.x"], lambda names: sum("h." in n for n in names))
    'model.'
    """
    for parts in range(1, _MOST_PARTS + 1):
        starts = Counter(".".join(name.split(".", parts)[:parts]) + "." for name in names)
        prefix = max(starts, key=starts.__getitem__, default="")
        below = [name[len(prefix) :] for name in names if name.startswith(prefix)]
        if 2 * taken(below) > len(names):
            return prefix
    return ""


def remove_prefix(prefix: str) -> str:
    """Return the option that removes a prefix."""
    return f"--rename {prefix}="


def _longer(names: Collection[str], prefix: str) -> str:
    """Return the prefix with the next part of every name, or "" where they differ in it."""
    parts = {name[len(prefix) :].partition(".")[:2] for name in names}
    if len(parts) != 1:
        return ""
    ((part, dot),) = parts
    return f"{prefix}{part}." if dot else ""
