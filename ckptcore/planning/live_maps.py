"""Map a live transformers module's names to the hub's, or back, by the model's config.

Families are frozen (`ckptcore.naming.maps.live_families`). For any other model, the installed transformers
builds the model of the config on the meta device, in a process of its own
(`ckptcore.planning.transformers_process`) that runs this module.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from ckptcore.errors import MissingDependency, NameMismatch, UsageError
from ckptcore.naming.maps.conversion import converted
from ckptcore.naming.maps.from_transformers import entries_of, family_of
from ckptcore.naming.maps.hyperparameters import Config
from ckptcore.naming.maps.live_families import (
    LiveFamily,
    LiveFamilyForm,
    called,
    frozen_family,
    hub_map,
    live_map,
    near,
    numbers_of,
    world_of,
)
from ckptcore.naming.maps.live_steps import StepForm
from ckptcore.naming.maps.matching import match, require_fit
from ckptcore.naming.rename import Mapped
from ckptcore.naming.worlds import HUB
from ckptcore.planning.config_folder import require_possible
from ckptcore.planning.kept_answers import ask_once
from ckptcore.planning.meta_model import built
from ckptcore.planning.name_maps import MappedNames, NameMap, NameRequest, composed, lacking
from ckptcore.planning.stored_configs import stored_configs
from ckptcore.planning.transformers_process import Answer, brief, quiet_transformers, serve
from ckptcore.utils.extras import install

_SECONDS = 300  # building a model on the meta device takes a few
_FUSED = (".gate_up_proj", ".experts.down_proj")  # of modules of transformers 5, for all experts together


def map_live_names(
    mapped: Mapped, request: NameRequest, parameters: Iterable[str] | None = None
) -> MappedNames | None:
    """Map a model part to the hub's names, or to those of a live module.

    Args:
        mapped: The model part under its stored names, without ties.
        request: The names that are asked for: ``hf-hub`` or ``hf-live``, of a model type or class.
        parameters: Names of the live module's tensors, where it is built.

    Returns:
        None if the names do not change, or the model is unknown.

    Raises:
        NameMismatch: Tensors do not fit the model's rules.
        UsageError: The architecture is unknown, or no rule can express its conversion.
        MissingDependency: The architecture is not frozen, and transformers is not installed.
    """
    content, source_name = _named_config(request)
    to = request.to
    tensors = mapped.manifest.tensors
    names = [t.fqn for t in tensors]
    family = _family(request.arch, content, {t.fqn: t.shape for t in tensors})
    if family is None:
        if to == HUB:
            return None
        raise NameMismatch(
            f"cannot map to {to}: unknown model",
            hint="try --config FOLDER with the model's config.json, or --arch",
        )
    because = f"--arch {request.arch}" if request.arch != "auto" else f"{source_name} says {family.form.arch}"
    world = world_of(family, names)
    if world == to or (world is None and to == HUB):
        return None
    if world is None:
        raise NameMismatch(
            f"cannot map to {to}: the names are neither a module's of {family.form.arch} nor its files'",
            hint="try another --arch, or --names stored to keep the names as they are",
        )
    shapes = {t.fqn: t.shape for t in tensors}
    if to == HUB:
        rules = live_map(family, names, content, shapes)
    else:
        rules = hub_map(family, names, content, shapes, parameters)
    matched = match(rules, mapped.manifest.tensors, {})
    require_fit(matched, mapped.manifest.tensors, part=request.part)
    conversion = converted(mapped.manifest, matched)
    numbers = {k: (v, source_name) for k, v in numbers_of(family, content or {}).items()}
    name_map = NameMap(rules.arch, world, to, f"{because} ({rules.version})", numbers, rules.digest)
    return MappedNames(composed(mapped, conversion), name_map, conversion, tuple(lacking(matched)))


def _named_config(request: NameRequest) -> tuple[Mapping[str, Any] | None, str]:
    """Return (content of the model's config.json, its name for messages)."""
    if request.config is not None:
        return request.config, f"--config {request.url}"
    beside = next((c for c in stored_configs(request.source, HUB) if c.architectures), None)
    return (None, "") if beside is None else (beside.content, beside.name)


def _family(
    arch: str, config: Mapping[str, Any] | None, tensors: Mapping[str, tuple[int, ...]]
) -> LiveFamily | None:
    """Return the frozen family, else the one of the installed transformers."""
    if arch != "auto":
        family = called(arch) or (
            frozen_family(config) if config is not None and arch in _calls(config) else None
        )
        if family is None:
            similar = ", ".join(near(arch))
            raise UsageError(
                f"no map of live modules is called {arch!r}, or its classes have different ones",
                hint=f"{f'did you mean {similar}? ' if similar else ''}"
                "Try --arch with the class of the model, or --config with its config.json",
            )
        return family
    return family_of_config(config, tensors) if config is not None else None


def _calls(config: Mapping[str, Any]) -> tuple[str, ...]:
    return Config("", HUB, config).architectures


def family_of_config(config: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> LiveFamily | None:
    """Return the frozen family of a config, else the one of the installed transformers.

    Args:
        config: Content of config.json.
        tensors: Name -> shape of the model's tensors.

    Returns:
        None if neither knows it, and no name is one that only modules have.

    Raises:
        MissingDependency: There are such names, and transformers is not installed.
        UsageError: There are such names, and transformers builds no model.
    """
    calls = _calls(config)
    frozen = frozen_family(config)
    if frozen is not None or not calls:
        return frozen
    kind = calls[-1]
    if importlib.util.find_spec("transformers") is None:
        if any(map(_is_fused, tensors)):
            raise MissingDependency(
                f"cannot map the names of {kind}: no frozen map knows it, and transformers is not installed",
                hint=f"{install('hf')}, or --names stored to keep the names as they are",
            )
        return None
    require_possible(config, kind, tensors.values())
    reply = ask_once("ckptcore.planning.live_maps", config, seconds=_SECONDS)
    if "error" in reply:
        if any(map(_is_fused, tensors)):
            raise UsageError(
                f"cannot map the names of {kind}: no frozen map knows it; transformers: {reply['error']}",
                hint="try --names stored to keep the names as they are",
            )
        return None
    entries = {k: tuple(map(StepForm.model_validate, v)) for k, v in reply["entries"].items()}
    form = LiveFamilyForm.model_validate(reply["family"])
    return LiveFamily.of(form, lambda entry: entries[entry], reply["version"])


def _is_fused(name: str) -> bool:
    return name.endswith(_FUSED)


def answer(config: Mapping[str, Any]) -> Answer:
    """Return the family of a config's model and its steps, as JSON; ``error`` if transformers builds none."""
    library = quiet_transformers()
    try:
        model = built(config)
    except Exception as error:  # any failure of a third-party model class: the config does not fit
        return {"error": brief(error)}
    form = family_of(model, model.config.model_type, [type(model).__name__])
    steps = {
        name: [s.model_dump(mode="json", by_alias=True, exclude_defaults=True) for s in entry_steps]
        for name, entry_steps in entries_of(p.entry for p in form.parts).items()
    }
    return {"family": form.model_dump(mode="json"), "entries": steps, "version": library.__version__}


if __name__ == "__main__":
    serve(answer)
