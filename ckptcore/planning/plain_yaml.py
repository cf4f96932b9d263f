"""Read untrusted YAML: plain values only, in time proportional to the text.

A module of its own: configs and model cards use it, and neither knows the other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

MOST = 256 << 10  # bytes; the parser reads some 100,000 a second, and no trainer's config is a tenth of it


def plain_yaml(text: str | bytes) -> Any:
    """Return the value of a YAML text, with None for tagged objects; None if it is no YAML.

    Merge keys are ignored: merges of merges grow without bound, and no trainer writes them.

    >>> plain_yaml("a: [1, !!python/name:os.system x]"), plain_yaml("[")
    ({'a': [1, None]}, None)
    """
    import yaml

    if len(text) > MOST:
        return None
    try:
        return yaml.load(text, _loader())
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


@cache
def _loader() -> Any:
    import yaml

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            pass

    Plain.add_multi_constructor("", lambda loader, suffix, node: None)
    return Plain
