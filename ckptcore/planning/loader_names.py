"""Refuse an output whose loaders look for other names than the hub's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ckptcore.errors import UsageError
from ckptcore.formats.base import Writer
from ckptcore.naming.worlds import HUB, suspected
from ckptcore.planning.request import Request
from ckptcore.utils.text import some

# Names in models of the hub, which are in no trainer's own modules.
_OF_THE_HUB = re.compile(
    r"(?:.*\.)?(?:layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)"
    r"|h\.\d+\.attn\.c_attn|layer\.\d+\.attention\.self\.(?:query|key|value))\..+"
)


def require_loaded_names(
    request: Request, writer: Writer, names: Collection[str], config: Mapping[str, Any] | None
) -> None:
    """Require names that the loaders of an output look for.

    Args:
        request: The output.
        writer: Of its format.
        names: Of the tensors as they are written.
        config: Content of the model's config.json, or None.

    Raises:
        UsageError: The names are the hub's, and loaders of the output look for a trainer's.
    """
    if writer.world and suspected(names) != writer.world:
        hub = [name for name in names if _OF_THE_HUB.fullmatch(name)]
        if hub or (config is not None and request.names == HUB):
            display = some(hub or [*names])
            raise UsageError(
                f"cannot write {request.to or request.format} with names of the hub ({display}): "
                f"its loaders look for those of {writer.world}",
                hint=f"add --names {writer.world}, or write another format: --to dcp",
            )
    if request.verb != "export" or request.names != HUB or writer.hub is not None or config is None:
        return
    changed = _other_in_modules(config, names)
    if changed:
        raise UsageError(
            f"cannot write {request.to or request.format} with names of the hub ({some(changed)}): "
            "no module has them, and this format is loaded into modules",
            hint="add --names hf-live for the names of transformers' own modules, or --names stored",
        )


def _other_in_modules(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Return the names of files that modules of the config's model have under others."""
    from ckptcore.naming.maps.live_families import frozen_family, world_of  # imports pydantic
    from ckptcore.naming.maps.live_steps import live_names

    family = frozen_family(config)
    if family is None or world_of(family, names) != HUB:
        return []
    loaded = live_names(family.steps, names, refuse=False)
    return [name for name, live in loaded.items() if live != (name,)]
