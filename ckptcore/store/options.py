"""Pass options of the user to the file systems of this process, and to nothing that is written or sent.

They go into fsspec's own configuration, beside ``FSSPEC_S3_KEY`` and the like. No plan, journal, result or
row of a catalog has them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ckptcore.errors import UsageError
from ckptcore.utils.foreign_text import InvalidText, load_json

_DEFAULT = "s3"


def use_storage_options(assignments: Sequence[str]) -> None:
    """Use options such as ``profile=team`` or ``gs.token=anon`` for every URL of their scheme (s3 if none).

    A value that is JSON is that value: ``client_kwargs={"verify": false}``.

    Raises:
        UsageError: An option is not NAME=VALUE; its value is not repeated in the message.
    """
    if not assignments:
        return
    from fsspec.config import conf

    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        scheme, dot, option = name.rpartition(".")
        if not equals or not option.isidentifier() or (dot and not scheme.isidentifier()):
            raise UsageError(
                f"--storage-option must be NAME=VALUE or SCHEME.NAME=VALUE (got {name!r})",
                hint="for example --storage-option profile=team",
            )
        conf.setdefault(scheme or _DEFAULT, {})[option] = _parsed(value)


def configured(scheme: str) -> Mapping[str, Any]:
    """Return the options of a scheme in fsspec's configuration: its files, its variables, and ours.

    fsspec, which takes 0.1 s, is not imported where it would find none.
    """
    if "fsspec.config" not in sys.modules:
        folder = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
        if not os.path.isdir(folder) and not any(name.startswith("FSSPEC") for name in os.environ):
            return {}
    from fsspec.config import conf

    options: Mapping[str, Any] = conf.get(scheme) or {}
    return options


def _parsed(value: str) -> Any:
    try:
        json_value = load_json(value)
    except InvalidText:
        return value
    # A key may consist of digits: only values that cannot be meant as text are taken as JSON.
    return json_value if isinstance(json_value, dict | list | bool) else value
