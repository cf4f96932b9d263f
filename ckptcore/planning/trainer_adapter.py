"""Give the LoRA adapters that a Megatron trainer saved the names, layouts and config of peft.

Their names are not those of a live module that peft wrapped: maps of names derive them
(`ckptcore.naming.maps.adapters`). Rank and alpha are in Megatron-Bridge's run_config.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.subset import select
from ckptcore.errors import Finding, UsageError
from ckptcore.naming.maps.adapters import half_of
from ckptcore.naming.maps.tensor_name import NUMBER
from ckptcore.naming.peft import BASE_WEIGHT, BELOW
from ckptcore.naming.rename import MadeTensor, Mapped, without_tensors
from ckptcore.naming.worlds import PEFT, suspected
from ckptcore.planning.config_folder import ConfigFolder
from ckptcore.planning.name_maps import NameRequest, map_names
from ckptcore.planning.stored_configs import stored_section
from ckptcore.utils.text import listed

_MEGATRON = "megatron"
_OF_FUSED = re.compile(r"\.adapter\.adapter_(?:gate|up)\.linear_out\.weight$")
_STATE = "._extra_state"  # of Transformer Engine
_KINDS = ("LoRA", "CanonicalLoRA", "VLMLoRA")  # classes of Megatron-Bridge's peft/*.py
_HINT = "save it with Megatron-Bridge's export_adapter_ckpt; or keep the tensors as they are: --names stored"


def trainer_adapter(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a model that are a Megatron trainer's adapter.

    Raises:
        UsageError: It is an adapter that has no counterpart in peft, or whose layout nothing proves.
    """
    model_names = list(names)
    adapter = [name for name in model_names if BELOW in name]
    if not any(half_of(name) for name in adapter) or suspected(model_names) != _MEGATRON:
        return ()
    odd = next((n for n in adapter if half_of(n) is None and _STATE not in n), None)
    if odd is not None:
        dora = odd.endswith(".weight_magnitude")
        why = "its magnitudes are cut by rank, not by tensor" if dora else "LoRA alone is exported"
        raise UsageError(f"cannot export an adapter that has {odd}: {why}", hint=_HINT)
    experts = next((n for n in adapter if ".experts." in n), None)
    if experts is not None:
        raise UsageError(
            f"cannot export the adapter: {experts} is of experts, which peft adapts in another way",
            hint=_HINT,
        )
    return tuple(name for name in adapter if _STATE not in name)


def trainer_form(source: Manifest, base_model: str) -> Mapping[str, Any] | None:
    """Return adapter_config.json from the run's own config, without what names and shapes give.

    Args:
        source: The checkpoint.
        base_model: Name of the base model on the hub, or "".
    """
    section = stored_section(source, "run_config.yaml", "peft")
    kind = str(section.get("_target_", "")).rpartition(".")[2]
    rank = section.get("dim")
    if kind not in _KINDS or type(rank) is not int:
        return None
    alpha = section.get("alpha")
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": rank if alpha is None else alpha,
        "lora_dropout": section.get("dropout") or 0.0,
        "peft_type": "LORA",
        "r": rank,
        "task_type": "CAUSAL_LM",
    }


def to_peft_names(
    mapped: Mapped, adapter: Iterable[str], *, arch: str, source: Manifest, base: ConfigFolder | None
) -> tuple[Mapped, tuple[Finding, ...]]:
    """Return a trainer's adapter under the names that peft has in a live module, and findings.

    Args:
        mapped: The model part under its stored names.
        adapter: The adapter's names in it.
        arch: Name of an architecture, or ``auto``.
        source: The checkpoint.
        base: Config of the base model, or None.

    Raises:
        NameMismatch: No map fits.
        UsageError: The architecture is unknown, or ambiguous; or the order of rows is unknown.
    """
    adapter_names = frozenset(adapter)
    base_names = [t.fqn for t in mapped.manifest.tensors if t.fqn not in adapter_names]
    adapter_part = without_tensors(mapped, base_names, BASE_WEIGHT)
    _require_known_order(adapter_part.manifest)
    named = map_names(
        adapter_part,
        _MEGATRON,
        NameRequest(
            arch=arch,
            to=PEFT,
            source=source,
            config=None if base is None else base.form,
            url="" if base is None else base.url,
            part=True,
        ),
    )
    return _with_every_half(named.mapped), named.warnings


def _require_known_order(adapter: Manifest) -> None:
    """Require that the rows of a canonical adapter of gate or up have the order of the tensor.

    Megatron-Bridge saves them as if they were gate above up (peft/utils.py, `sharded_state_dict`): each of R
    tensor-parallel ranks writes its first half among the first halves, and its second behind all of these.
    Two boxes are one rank, whose order this is. Of more the order is R's, and of one nothing tells R.
    """
    for row, spec in enumerate(adapter.tensors):
        if _OF_FUSED.search(spec.fqn) is None:
            continue
        first, behind = adapter.chunks.first[row : row + 2]
        starts = {int(lo) for lo in adapter.chunks.lo[first:behind, len(spec.shape) - 2]}
        if starts != {0, spec.shape[-2] // 2}:
            rows = listed([str(n) for n in sorted(starts)])
            raise UsageError(
                f"cannot export the adapter: the rows of {spec.fqn} have the order of its tensor-parallel "
                f"ranks, whose number nothing proves (got boxes from rows {rows})",
                hint=_HINT,
            )


def _with_every_half(mapped: Mapped) -> Mapped:
    """Return the adapter with a ``lora_A`` for each module whose ``lora_B`` is a part of one trainer's half.

    One stored tensor may have all layers: numbers in the new names tell them apart.
    """
    rows = {t.fqn: row for row, t in enumerate(mapped.manifest.tensors)}
    readers: dict[tuple[str, ...], MadeTensor] = {}
    lacking: dict[str, tuple[str, ...]] = {}  # name of a lora_A -> its pair, and its layer
    for adapter_tensor in mapped.made:
        half = half_of(adapter_tensor.sources[0])
        assert half is not None  # rules take nothing else
        key = (half.pair, *NUMBER.findall(adapter_tensor.name))
        if not half.out:
            readers[key] = adapter_tensor
        elif (name := adapter_tensor.name.replace(".lora_B.", ".lora_A.")) not in rows:
            lacking[name] = key
    copies = {name: readers[key] for name, key in lacking.items() if key in readers}
    chosen = [*range(len(rows)), *(rows[adapter_tensor.name] for adapter_tensor in copies.values())]
    return replace(
        mapped,
        manifest=select(mapped.manifest, chosen, [*rows, *copies]),
        made=(*mapped.made, *(adapter_tensor._replace(name=name) for name, adapter_tensor in copies.items())),
    )
