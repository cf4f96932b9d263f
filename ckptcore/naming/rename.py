"""Select and rename the tensors of a manifest.

Rules act on manifests and move no byte. Every source tensor is either kept or dropped by a rule that names
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from ckptcore.core.manifest import Blob, Manifest
from ckptcore.core.subset import select
from ckptcore.errors import NameMismatch, UsageError
from ckptcore.utils.globs import matches as matches

# Wrappers put these into names: torch.compile, FSDP1, activation checkpointing, adapters of Megatron, DDP.
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "to_wrap.")
LEADING_WRAPPERS = ("module.",)  # only in front: a model may have a submodule of this name
_EVERY_WRAPPER = LEADING_WRAPPERS + WRAPPERS


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor or object of which all or a part is dropped.

    Attributes:
        fqn: Stored name.
        rule: Why.
        part: How many of its elements, where it is not all of them; else None.
        only_zero: Why every element must be zero; "" where its values do not matter.
    """

    fqn: str
    rule: str
    part: int | None = None
    only_zero: str = ""


class MadeTensor(NamedTuple):
    """A tensor that a map of names made.

    Attributes:
        name: In the new world.
        rule: What made it.
        sources: Stored names of what it is made of.
        same: Whether its elements, their order and shape are those of one stored tensor.
    """

    name: str
    rule: str
    sources: tuple[str, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Mapped:
    """The result of remapping.

    Attributes:
        manifest: The kept tensors under their new names.
        renamed: (old, new) where they differ.
        dropped: Tensors and objects that are dropped.
        ties: (dropped name, kept name) whose bytes must be equal.
        twins: The dropped tensor of each tie, as a manifest in the order of ``ties``.
        made: Origin of every tensor, where a map made them.
        map: Digest of the map, or "".
    """

    manifest: Manifest
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[Dropped, ...]
    ties: tuple[tuple[str, str], ...] = ()
    twins: Manifest | None = None
    made: tuple[MadeTensor, ...] = ()
    map: str = ""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Where the model is.

    Attributes:
        prefix: Prefix of its names in the checkpoint.
        because: The evidence, one sentence.
        beside: First path elements of the trainer's own entries below that prefix, to be left out.
        model_names: Names below ``beside`` that are the model's.
        other_prefixes: Prefixes of parts that could be the model too, and are left out.
        strays: Stored names outside of the part that the optimizer has state for, unless the user named it.
    """

    prefix: str
    because: str
    beside: tuple[str, ...] = ()
    model_names: frozenset[str] = frozenset()
    other_prefixes: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()

    def holds(self, name: str) -> bool:
        """Return whether a stored name of a tensor is in the part."""
        return name.startswith(self.prefix) and self.foreign(name[len(self.prefix) :]) is None

    def foreign(self, name: str) -> str | None:
        """Return the rule that drops a name below the prefix; None for the model's own names."""
        for root in self.beside:
            if (name == root or name.startswith(root + ".")) and name not in self.model_names:
                return f"not part of the model ({root})"
        return None


def remap(
    manifest: Manifest,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    model: ModelPart | None = None,
    rename: Sequence[tuple[str, str]] = (),
    tie: Sequence[tuple[str, str]] = (),
) -> Mapped:
    """Apply the rules in order: globs, model part, wrappers, renames, ties.

    Args:
        manifest: The checkpoint.
        include: Globs on stored names; empty for all.
        exclude: Globs on stored names.
        model: Keep only its names, without its prefix and without the parts of wrappers; None keeps all.
        rename: (old, new) as `apply_renames` takes them.
        tie: (name to drop, name to keep), after renaming.

    Raises:
        NameMismatch: Two tensors would have one name, or tied tensors differ in shape or dtype.
        UsageError: A glob or a tie matches nothing.
    """
    _used_globs([t.fqn for t in manifest.tensors] + [b.key for b in manifest.blobs], include, exclude)
    row_by_name: dict[str, int] = {}
    origin: dict[str, str] = {}
    dropped: list[Dropped] = []
    for row, spec in enumerate(manifest.tensors):
        name, rule = _new_name(spec.fqn, include, exclude, model, rename)
        if rule:
            dropped.append(Dropped(spec.fqn, rule))
            continue
        if name in row_by_name:
            raise NameMismatch(
                f"{origin[name]} and {spec.fqn} would both be called {name}",
                hint="rename one with --rename, or leave one out with --exclude",
            )
        row_by_name[name], origin[name] = row, spec.fqn
    ties = tuple((a, b) for a, b in tie)
    for gone, stays in ties:
        for name in (gone, stays):
            if name not in row_by_name:
                raise UsageError(f"--tie names {name}, which is not in the output")
        if manifest.tensors[row_by_name[gone]].shape != manifest.tensors[row_by_name[stays]].shape:
            raise NameMismatch(f"{gone} and {stays} are tied but differ in shape")
        if manifest.tensors[row_by_name[gone]].dtype != manifest.tensors[row_by_name[stays]].dtype:
            raise NameMismatch(f"{gone} and {stays} are tied but differ in dtype")
        if manifest.dequantized & {row_by_name[gone], row_by_name[stays]}:
            raise UsageError(
                f"{gone} and {stays} cannot be tied: they are computed from quantised values",
                hint="leave one out with --exclude, or carry the stored values with --keep-quantized",
            )
    # The one that is dropped is still read: execution compares it with the one that stays.
    gone_names = [a for a, _ in ties]
    twins = select(manifest, [row_by_name[n] for n in gone_names], gone_names) if ties else None
    for gone, stays in ties:
        dropped.append(Dropped(origin[gone], tie_rule(stays)))
        del row_by_name[gone]
    names = list(row_by_name)
    renamed = tuple((origin[n], n) for n in names if origin[n] != n)
    return Mapped(
        select(manifest, [row_by_name[n] for n in names], names), renamed, tuple(dropped), ties, twins
    )


def with_names(mapped: Mapped, names: Mapping[str, str]) -> Mapped:
    """Give tensors other names, one by one.

    Args:
        mapped: Tensors without ties.
        names: Name -> new name; tensors of other names keep theirs.
    """
    tensors = mapped.manifest.tensors
    stored = {new: old for old, new in mapped.renamed}
    new_names = [names.get(t.fqn, t.fqn) for t in tensors]
    renamed = ((stored.get(t.fqn, t.fqn), new) for t, new in zip(tensors, new_names, strict=True))
    return replace(
        mapped,
        manifest=select(mapped.manifest, range(len(tensors)), new_names),
        renamed=tuple((old, new) for old, new in renamed if old != new),
        made=tuple(m._replace(name=names.get(m.name, m.name)) for m in mapped.made),
    )


def without_tensors(mapped: Mapped, names: Collection[str], rule: str) -> Mapped:
    """Drop tensors by their new names.

    Args:
        mapped: Tensors of which some are dropped.
        names: Their names.
        rule: Why they are dropped.
    """
    tensors = mapped.manifest.tensors
    rows = [row for row, spec in enumerate(tensors) if spec.fqn not in names]
    if len(rows) == len(tensors):
        return mapped
    stored = {new: old for old, new in mapped.renamed}
    return replace(
        mapped,
        manifest=select(mapped.manifest, rows, [tensors[row].fqn for row in rows]),
        renamed=tuple((old, new) for old, new in mapped.renamed if new not in names),
        dropped=(
            *mapped.dropped,
            *(Dropped(stored.get(t.fqn, t.fqn), rule) for t in tensors if t.fqn in names),
        ),
        made=tuple(m for m in mapped.made if m.name not in names),
    )


def tie_rule(written: str) -> str:
    """Return the rule that drops a tensor which is tied to another one. written: the other's name."""
    return f"tied to {written}: stored once, equality is checked"


def is_kept(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether the globs keep a tensor or object of this name."""
    return not _glob_rule(name, include, exclude)


def keep_blobs(blobs: Sequence[Blob], include: Sequence[str], exclude: Sequence[str]) -> tuple[Blob, ...]:
    """Return the objects that the globs keep."""
    return tuple(b for b in blobs if is_kept(b.key, include, exclude))


def strip_wrappers(name: str) -> str:
    """Remove the parts that wrappers put into a name.

    >>> strip_wrappers("module.layers.0._checkpoint_wrapped_module._orig_mod.w")
    'layers.0.w'
    >>> strip_wrappers("_orig_mod.module.layers.0.w"), strip_wrappers("auto_wrap.w")
    ('layers.0.w', 'auto_wrap.w')
    """
    for part in _EVERY_WRAPPER:
        if part in name:
            break
    else:  # nearly all names
        return name
    while part := next((p for p in _EVERY_WRAPPER if name.startswith(p)), ""):
        name = name[len(part) :]
    return ".".join(part for part in name.split(".") if f"{part}." not in WRAPPERS)


def apply_renames(name: str, rules: Sequence[tuple[str, str]]) -> str:
    """Return the name after all rules, in order. A rule is a prefix, or a pattern with one ``*``.

    >>> apply_renames("encoder.0.w", [("encoder.", "model.")])
    'model.0.w'
    >>> apply_renames("layers.3.attn.w", [("layers.*.attn.w", "h.*.self.w")])
    'h.3.self.w'
    """
    for old, new in rules:
        if not applies(name, old):
            continue
        if "*" in old:
            head, _, tail = old.partition("*")
            name = new.replace("*", name[len(head) : len(name) - len(tail)])
        else:
            name = new + name[len(old) :]
    return name


def applies(name: str, old: str) -> bool:
    """Return whether the left side of a rename, a prefix or a pattern with one ``*``, fits a name."""
    head, star, tail = old.partition("*")
    fits = name.startswith(head) and name.endswith(tail)
    return fits and (not star or len(name) >= len(head) + len(tail))


def _new_name(
    fqn: str,
    include: Sequence[str],
    exclude: Sequence[str],
    model: ModelPart | None,
    rename: Sequence[tuple[str, str]],
) -> tuple[str, str]:
    rule = _glob_rule(fqn, include, exclude)
    if rule:
        return fqn, rule
    name = fqn
    if model is not None:
        if not fqn.startswith(model.prefix):
            return fqn, f"not part of the model (model prefix {model.prefix!r})"
        reason = model.foreign(fqn[len(model.prefix) :])
        if reason:
            return fqn, reason
        name = strip_wrappers(fqn[len(model.prefix) :])
    name = apply_renames(name, rename)
    if fqn and not name:
        raise NameMismatch(
            f"{fqn} would have an empty name after renaming",
            hint="rename it with --rename to another name, or leave it out with --exclude",
        )
    return name, ""


def _glob_rule(name: str, include: Sequence[str], exclude: Sequence[str]) -> str:
    if include and not matches(name, include):
        return "matches no --include"
    if not exclude:
        return ""
    hit = next((g for g in exclude if fnmatchcase(name, g)), None)
    return f"matches --exclude {hit}" if hit else ""


def _used_globs(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> None:
    for option, globs in (("--include", include), ("--exclude", exclude)):
        for glob in globs:
            if not any(fnmatchcase(n, glob) for n in names):
                raise UsageError(
                    f"{option} {glob} matches nothing", hint="`ckptcore inspect SRC` lists the names"
                )
