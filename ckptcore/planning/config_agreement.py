"""Compare the config of an export with every other config of its model, at an export and at its verification.

Where two configs of the hub differ in which fields they have, the installed transformers completes both, as
it would to build the model (`answer`, in a process of its own). Without it such fields stay unconfirmed.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError, Finding, NameMismatch, finding
from ckptcore.naming.maps.agreement import HINT, Agreement, agreement
from ckptcore.naming.maps.hub_config import field_of
from ckptcore.naming.maps.hyperparameters import Config
from ckptcore.naming.worlds import HUB, suspected
from ckptcore.planning.config_folder import ConfigFolder
from ckptcore.planning.hub_files import NONE
from ckptcore.planning.kept_answers import ask_once
from ckptcore.planning.model_files import find_files
from ckptcore.planning.request import Request
from ckptcore.planning.stored_configs import stored_configs
from ckptcore.planning.transformers_process import LOCAL, Answer, quiet_transformers, serve
from ckptcore.utils.foreign_text import InvalidText
from ckptcore.utils.text import listed

_NAMED = 12  # fields in a line of text
_TEXTS = 3  # contradictions in one
_SECONDS = 300  # to import transformers takes a few


def agreement_of(config: Config, other_configs: Sequence[Config]) -> Agreement:
    """Compare a config with other ones, as `agreement` does, and complete what only one of two has.

    Raises:
        NameMismatch: A config says a number that no model has.
    """
    first = agreement(config, other_configs)
    of_hub = [config, *(o for o in other_configs if o.world == HUB)]
    if not first.one_sided or importlib.util.find_spec("transformers") is None:
        return first
    asked = {"configs": [dict(c.content) for c in of_hub]}
    answer = ask_once("ckptcore.planning.config_agreement", asked, seconds=_SECONDS)
    forms = answer.get("configs") or []
    if len(forms) != len(of_hub) or None in forms:
        return first
    full = [replace(c, content=form) for c, form in zip(of_hub, forms, strict=True)]
    second = agreement(full[0], full[1:])
    new = [c for c in second.contradictions if field_of(c.field) in first.one_sided]
    confirmed = first.confirmed | (first.one_sided & second.confirmed)
    return Agreement(
        (*first.contradictions, *new),
        confirmed,
        first.one_sided - second.confirmed - {field_of(c.field) for c in new},
        tuple(f for f in first.unconfirmed if f not in confirmed),
    )


def source_configs(manifest: Manifest, names: Iterable[str]) -> list[Config]:
    """Return the configs that a checkpoint itself has: its trainer's, and a config.json.

    Args:
        manifest: The checkpoint.
        names: Of its model's tensors, which show the trainer.
    """
    configs = stored_configs(manifest, suspected(names) or HUB)
    return [c if c.name.startswith("the ") else replace(c, name=f"the source's {c.name}") for c in configs]


def config_beside(request: Request, manifest: Manifest) -> Config | None:
    """Return the config.json that the export named, else the one that it would find, or None."""
    for named in (request.config, None):
        if named == NONE:
            continue
        with suppress(CkptError, InvalidText):  # it is gone, or there are several: no evidence
            beside = find_files(replace(request, config=named, tokenizer=NONE), manifest).config
            if beside is not None:
                return Config(f"{beside.url}/config.json", HUB, beside.form)
    return None


def require_agreement(
    request: Request, config: ConfigFolder, manifest: Manifest, names: Iterable[str]
) -> tuple[Finding, ...]:
    """Require that the config of an export contradicts neither itself nor what the checkpoint has.

    Args:
        request: The export.
        config: The config that is to be published.
        manifest: The checkpoint.
        names: Of its model's tensors.

    Returns:
        A finding with the fields that nothing confirms, and one with what the config.json beside the
        checkpoint contradicts: the config that was named takes precedence over it.

    Raises:
        NameMismatch: Two places differ; with both values.
    """
    checkpoint_configs = source_configs(manifest, names)
    is_of_checkpoint = any(c.content == config.form for c in checkpoint_configs)
    named = Config(f"--config {config.url}", HUB, config.form)
    comparison = agreement_of(named, checkpoint_configs)
    for contradiction in comparison.contradictions:
        raise NameMismatch(contradiction.text, hint=HINT)
    if is_of_checkpoint:
        return ()
    findings = []
    if comparison.unconfirmed:
        text = unconfirmed_text(comparison.unconfirmed)
        findings.append(finding("config-unconfirmed", "coverage", text))
    beside = None if request.config is None else config_beside(replace(request, config=None), manifest)
    contradictions = agreement_of(named, [beside]).contradictions if beside is not None else ()
    if contradictions:
        text = listed([c.text for c in contradictions], _TEXTS)
        findings.append(finding("config-contradicted", "coverage", text))
    return tuple(findings)


def unconfirmed_text(fields: Sequence[str]) -> str:
    """Return fields of config.json that nothing confirms, as a short clause."""
    return f"nothing confirms {listed(fields, _NAMED)} of config.json"


def answer(asked: Mapping[str, Any]) -> Answer:
    """Answer `ckptcore.planning.transformers_process.ask`: configs with every field that their class has."""
    library = quiet_transformers()
    out: list[Any] = []
    for content in asked["configs"]:
        try:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "config.json").write_text(json.dumps(content))
                config = library.AutoConfig.from_pretrained(folder, **LOCAL)
            out.append(json.loads(config.to_json_string(use_diff=False)))
        except Exception:  # of a third-party config class: this config stays as it is
            out.append(None)
    return {"configs": out}


if __name__ == "__main__":
    serve(answer)
