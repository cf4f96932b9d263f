"""Give a model part the names that an output asks for, through the hub's names where two trainers differ.

An output whose loaders look for other names than the hub's is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptcore.core.manifest import Manifest
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.formats.base import Writer
from ckptcore.naming.rename import Mapped
from ckptcore.naming.worlds import HUB, LIVE, PEFT, parse_world, suspected
from ckptcore.planning.config_folder import ConfigFolder, exact_prefixes
from ckptcore.planning.request import STORED, Request
from ckptcore.planning.stored_configs import stored_configs
from ckptcore.topology.mesh_spec import parse_mesh
from ckptcore.utils.text import some

if TYPE_CHECKING:
    from ckptcore.planning.name_maps import MappedNames, NameRequest


def of_trainer(names: str) -> bool:
    """Return whether names are those of a trainer's own modules, which no config of transformers proves."""
    return names not in (STORED, PEFT) and target(names)[0] not in (HUB, LIVE)


def target(names: str) -> tuple[str, str]:
    """Return the world and the generation of names; verl's actors are transformers' modules."""
    world, generation = parse_world(names)
    return LIVE if world == "verl" else world, generation


def in_world(
    request: Request, source: Manifest, bare: Mapped, config: ConfigFolder | None
) -> MappedNames | None:
    """Return the model part in the requested world of names; None if its names stay.

    Between two trainers, and from a trainer to modules of transformers, the hub's names are on the way.
    """
    if request.names == STORED or (config is not None and config.of_diffusers and request.names == HUB):
        return None
    to, generation = target(request.names)
    world = suspected(t.fqn for t in bare.manifest.tensors)
    if to == HUB or (to == LIVE and world is None):
        return _mapped_to(request, source, bare, config, world, to)
    first = _mapped_to(request, source, bare, config, world, HUB)
    on_hub = bare if first is None else first.mapped
    if to == LIVE:
        second = _mapped_to(request, source, on_hub, config, None, LIVE)
    else:
        from ckptcore.planning.name_maps import map_names

        name_request = replace(
            _name_request(request, source, config, to),
            generation=generation,
            untried=request.allow_untried,
            tp=dict(parse_mesh(request.mesh).axes).get("tp", 1) if request.mesh else 1,
        )
        if first is not None:
            name_request = replace(name_request, arch=first.map.arch, because=first.map.because)
        second = map_names(on_hub, HUB, name_request)
    if first is None or second is None:
        return second or first
    return replace(
        second, map=replace(second.map, via=first.map), warnings=(*first.warnings, *second.warnings)
    )


def _name_request(request: Request, source: Manifest, config: ConfigFolder | None, to: str) -> NameRequest:
    from ckptcore.planning.name_maps import NameRequest

    return NameRequest(
        to=to,
        source=source,
        arch=request.arch,
        config=None if config is None else config.form,
        url=config.url if config is not None else "",
        part=bool(request.include or request.exclude),
    )


def _mapped_to(
    request: Request, source: Manifest, bare: Mapped, config: ConfigFolder | None, world: str | None, to: str
) -> MappedNames | None:
    """Return a model part in the names of the hub or of modules; None if its names stay.

    world: the trainer's world of its names, or None.
    """
    if world is not None:
        from ckptcore.planning.name_maps import map_names

        try:
            return map_names(bare, world, _name_request(request, source, config, to))
        except NameMismatch:  # a model of the hub may have a trainer's names itself
            shapes = {t.fqn: t.shape for t in bare.manifest.tensors}
            if config is None or "" not in exact_prefixes(config, shapes):
                raise
    asked = to == LIVE or request.arch != "auto" or config is not None
    if not asked and not any(c.architectures for c in stored_configs(source, HUB)):
        return None  # unknown model
    from ckptcore.planning.live_maps import map_live_names  # imports pydantic

    return map_live_names(bare, _name_request(request, source, config, to))


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
