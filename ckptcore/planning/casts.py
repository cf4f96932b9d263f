"""Decide which tensors of an output are cast: ``--dtype``, its exceptions, and what is never cast.

The values of quantised tensors are codes, which mean something with their scales only
(`ckptcore.naming.quantized_names`). ``--dtype`` leaves both as they are stored, with a finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptcore.core import dtype as dtypes
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import Finding, UsageError, finding
from ckptcore.naming.quantized_names import bound, is_code
from ckptcore.naming.rename import Mapped, matches
from ckptcore.planning.request import Request
from ckptcore.utils.text import count, some

if TYPE_CHECKING:
    from ckptcore.planning.name_maps import NameMap

_HALF = ("bfloat16", "float16")
# Tensors that most classes which have them keep in float32 (`_keep_in_fp32_modules_strict` of transformers).
_OFTEN_FLOAT32 = re.compile(r"(e_score_correction_bias|expert_bias|balancing_biases|\.A_log|\.inv_freq)$")


@dataclass(frozen=True, slots=True)
class Casts:
    """The casts of an output.

    Attributes:
        dtypes: Name -> output dtype, where it differs from the stored one.
        findings: What ``--dtype`` leaves as it is stored.
    """

    dtypes: dict[str, str]
    findings: tuple[Finding, ...] = ()


def half_dtype(dtype: str | None) -> str:
    """Return the name of a dtype of ``--dtype`` in which models keep some tensors in float32, else ""."""
    name = dtypes.get(dtype).name if dtype else ""
    return name if name in _HALF else ""


def frozen_float32(
    dtype: str | None, naming: NameMap | None, config: Mapping[str, Any] | None, mapped: Mapped
) -> frozenset[str] | None:
    """Return the names of tensors that stay in float32 in a cast to 16 bits, by the frozen families.

    Args:
        dtype: Of ``--dtype``, or None.
        naming: How names were mapped, if they were.
        config: Content of config.json, or None.
        mapped: The tensors under the output's names.

    Returns:
        None if no frozen family is that of the model.
    """
    half = half_dtype(dtype)
    if not half or (config is None and naming is None):
        return None
    from ckptcore.naming.maps.live_families import called, float32_names, frozen_family  # imports pydantic

    family = frozen_family(config) if config is not None else None
    if family is None and naming is not None:
        family = called(naming.arch)
    names = [t.fqn for t in mapped.manifest.tensors]
    return None if family is None else frozenset(float32_names(family, names, half))


def loaded_as(dtype: str | None, specs: Iterable[TensorSpec], written: Mapping[str, str]) -> str | None:
    """Return the dtype for a model's config: the only one of the weights, or that of the cast.

    dtype: of ``--dtype``, or None. written: name -> dtype of the tensors that are cast.
    """
    floats = {d for t in specs if dtypes.get(d := written.get(t.fqn, t.dtype)).is_float}
    if len(floats) == 1:
        return floats.pop()
    cast = dtypes.get(dtype).name if dtype else None
    return cast if cast in floats else None


def find_casts(request: Request, source: Manifest, mapped: Mapped, float32: Set[str] | None = None) -> Casts:
    """Return the casts of the tensors of an output.

    Args:
        request: The output.
        source: The checkpoint. What belongs to a tensor need not be part of the output.
        mapped: The tensors under the output's names.
        float32: Names of tensors that a model of a 16-bit dtype has in float32; None where no model is known.

    Raises:
        UsageError: A cast is asked for that would not keep values.
    """
    general = dtypes.get(request.dtype) if request.dtype else None
    if general is not None and not general.is_float:
        raise UsageError(f"--dtype {request.dtype} is not a floating-point dtype")
    exceptions = [(g, None if d == "keep" else dtypes.get(d)) for g, d in request.dtype_for]
    tensors = mapped.manifest.tensors
    # A glob without a match is a misspelt name, whose tensor would be cast or kept silently.
    for glob, _ in exceptions:
        if not any(matches(t.fqn, [glob]) for t in tensors):
            raise UsageError(f"--dtype-for {glob} matches nothing")
    usual = _usual_dtypes(mapped.manifest)
    if general is None and not exceptions:
        return Casts(usual)
    partners = _partners(source, mapped)
    cast_dtypes: dict[str, str] = {}
    quantized: list[str] = []
    wide: list[str] = []
    for spec in tensors:
        # The first glob that matches counts, not the narrowest.
        is_exception, target_dtype = next(
            ((True, d) for g, d in exceptions if matches(spec.fqn, [g])), (False, general)
        )
        if target_dtype is None and spec.fqn in usual:
            cast_dtypes[spec.fqn] = usual[spec.fqn]
        if target_dtype is None or target_dtype.name == spec.dtype:
            continue
        if not dtypes.get(spec.dtype).is_float or not target_dtype.is_float:
            # --dtype is about the floating-point tensors of any model; a glob names this very tensor.
            if is_exception:
                raise UsageError(
                    f"--dtype-for would cast {spec.fqn} from {spec.dtype} to {target_dtype.name}; "
                    "only floating-point dtypes are cast"
                )
            continue
        code, partner = is_code(spec.dtype), partners.get(spec.fqn)
        # The code of a quantised value means something only with its scale, which would not be cast with it.
        if is_exception and code and partner is not None:
            raise UsageError(
                f"--dtype-for would cast {spec.fqn} from {spec.dtype} to {target_dtype.name}, without "
                f"{partner}, which its values need",
                hint="leave it out of the globs",
            )
        if not is_exception and (partner is not None or (code and request.keep_quantized)):
            quantized.append(spec.fqn)
            continue
        # transformers would widen it at loading, when the bits are gone.
        if not is_exception and float32 is not None and spec.fqn in float32 and half_dtype(target_dtype.name):
            wide.append(spec.fqn)
            target_dtype = dtypes.get("float32")
            # It is stored in float32 already.
            if spec.dtype == target_dtype.name:
                continue
        cast_dtypes[spec.fqn] = target_dtype.name
    findings = _of_cast("kept-quantized", request.dtype, "leaves", quantized, " of quantised values")
    findings += _of_cast("kept-float32", request.dtype, "leaves", wide, " in float32")
    if request.verb == "export" and float32 is None and half_dtype(request.dtype):
        rounded = [
            name for name in cast_dtypes if _OFTEN_FLOAT32.search(name) and half_dtype(cast_dtypes[name])
        ]
        findings += _of_cast("rounded-float32", request.dtype, "rounds", rounded)
    return Casts(cast_dtypes, tuple(findings))


def _usual_dtypes(manifest: Manifest) -> dict[str, str]:
    """Return name -> dtype in which a weighted sum is written unless another is asked: that of all inputs.

    Where these differ it is the dtype of the sum, which holds the values of each.
    """
    usual: dict[str, str] = {}
    for tensor, node in manifest.derived.items():
        if node.is_of_checkpoints and manifest.inputs is not None:
            # Of an adapter and a weight it is the weight's.
            summed = node.inputs if node.is_sum else node.inputs[:1]
            dtypes = {manifest.inputs.tensors[number].dtype for number in summed}
            spec = manifest.tensors[tensor]
            if len(dtypes) == 1 and dtypes != {spec.dtype}:
                usual[spec.fqn] = dtypes.pop()
    return usual


def _partners(source: Manifest, mapped: Mapped) -> dict[str, str]:
    """Return output name -> stored name of a tensor that its values mean something with."""
    # Of the tensors that are stored: computed ones have their values.
    stored = bound([t for n, t in enumerate(source.tensors) if n not in source.derived])
    if not stored:
        return {}
    old = {new: (name,) for name, new in mapped.renamed} | {m.name: m.sources for m in mapped.made}
    partners = {
        t.fqn: next((stored[n] for n in old.get(t.fqn, (t.fqn,)) if n in stored), None)
        for t in mapped.manifest.tensors
    }
    return {name: partner for name, partner in partners.items() if partner is not None}


def _of_cast(code: str, dtype: str | None, does: str, names: list[str], of: str = "") -> list[Finding]:
    """Return the finding about tensors that a cast does not treat like the others; none about no tensors."""
    message = f"--dtype {dtype} {does} {count(len(names), 'tensor')}{of}: {some(names)}"
    return [finding(code, "coverage", message)] if names else []
