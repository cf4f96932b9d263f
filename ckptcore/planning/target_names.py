"""Give a model part the names that an output asks for, through the hub's names where two trainers differ."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptcore.core.manifest import Manifest
from ckptcore.errors import NameMismatch
from ckptcore.naming.rename import Mapped
from ckptcore.naming.worlds import HUB, LIVE, PEFT, parse_world, suspected
from ckptcore.planning.config_folder import ConfigFolder, exact_prefixes
from ckptcore.planning.request import STORED, Request
from ckptcore.planning.stored_configs import stored_configs
from ckptcore.topology.mesh_spec import parse_mesh

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
