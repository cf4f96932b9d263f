"""Find the model in a checkpoint, and the evidence for it.

Trainers nest the model differently: ``model.*``, ``app.model.*``, ``state_dict.*``, or at the top
beside the optimizer (torchtitan). The first evidence in this order decides, and the user sees it:

1. the prefix that the user names, or else where the format itself keeps the model;
2. the optimizer: its states name the model's parameters (``...state.<fqn>.exp_avg``), and the
   model is where those names are found;
3. the container paths that the writer recorded, without those that hold optimizer state;
4. known container names.

Of two candidates, the one with a name that trainers use is the model, and the other is a finding: a moving
average (EMA) has the model's names, too. Otherwise two candidates are an error that lists both: a wrong guess
would export the wrong weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from ckptcore.core.manifest import Manifest
from ckptcore.core.tree_paths import Paths
from ckptcore.errors import AmbiguousModel
from ckptcore.naming.rename import LEADING_WRAPPERS, WRAPPERS, strip_wrappers
from ckptcore.utils.dataclass import dataclass
from ckptcore.utils.late_pattern import late_pattern

_STATE = late_pattern(r"^(?:(?P<root>.*?)\.)?state\.(?P<fqn>.+)\.(?P<key>[A-Za-z0-9_]+)$")
_MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq", "step", "sum", "square_avg"}
# Containers beside a top-level model that are the trainer's own (torchtitan, OLMo, Lightning, Megatron's
# ``rng_state/shard_...``).
_TRAINER = late_pattern(
    r"^(optim|optimizer|optimizers|optimizer_\d+|lr_scheduler|scheduler|dataloader|train_state|rng"
    r"|rng_state|trainer|extra|ema_state|param_groups|chained_\d+)(\.|/|$)"
)
_CONTAINERS = ("model", "module", "state_dict", "model_state_dict", "app.model")
# Names of copies of a model that were not trained themselves: suggested last.
_COPY = late_pattern(
    r"(^|[._])(ema|swa|averaged?|shadow|teacher|target|ref|reference|old|best)([._]|$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Where the model is.

    Attributes:
        prefix: Prefix of its names in the checkpoint.
        because: The evidence, one sentence.
        beside: First path elements of the trainer's own entries below that prefix, to be left out.
        others: Prefixes of parts that could be the model too, and are left out.
    """

    prefix: str
    because: str
    beside: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def foreign(self, name: str) -> str | None:
        """Return the rule that drops a name below the prefix; None for the model's own names."""
        for root in self.beside:
            if name == root or name.startswith(root + "."):
                return f"not part of the model ({root})"
        return None


def find_model(manifest: Manifest, prefix: str | None = None) -> ModelPart:
    """Return the model part of a checkpoint.

    Args:
        manifest: The checkpoint.
        prefix: Prefix that the user named, or None to find it.

    Raises:
        AmbiguousModel: With the candidates.
    """
    names = [t.fqn for t in manifest.tensors]
    if not names:
        raise AmbiguousModel(
            f"cannot find the model: the checkpoint has no tensor (got {len(manifest.blobs)} plain values)",
            hint="try consolidate or reshard, which write plain values, too",
            candidates=[],
        )
    if prefix is not None:
        return _part_below(names, prefix)
    known = manifest.origin.get("model")
    if known and any(n.startswith(known["prefix"]) for n in names):
        return ModelPart(known["prefix"], known["because"])
    _require_shapes(names)
    states = _optimizer(names)
    if states:
        found = _by_optimizer(names, states)
        if found:
            return found
    candidates = _containers(manifest, set(states))
    if len(candidates) == 1:
        root, count = candidates[0]
        if root == "":
            beside = _beside("", names, set(states))
            return ModelPart("", f"{count} tensors are at the top level", beside)
        return ModelPart(root, f"{root[:-1]} is the only part that is not the trainer's ({count} tensors)")
    called = _called([r for r, _ in candidates])
    if called is not None:
        others = tuple(r for r, _ in candidates if r != called)
        return ModelPart(called, f"{called[:-1]} is what trainers call the model", others=others)
    parts = ", ".join(f"{r or 'top level'} ({n} tensors)" for r, n in candidates[:8]) or "none"
    raise AmbiguousModel(
        f"cannot choose the part of the checkpoint that is the model; candidates: {parts}",
        hint=f"name it: --model-prefix {_likeliest([r for r, _ in candidates])}",
        candidates=[r for r, _ in candidates],
    )


def in_model(manifest: Manifest, prefix: str | None) -> Callable[[str], str | None]:
    """Return a function from stored names to names inside the model.

    It gives None for names outside of the model, and the name itself if the model cannot be found. Objects
    that are no tensors are never inside. The model is searched for at the first call.
    """
    objects = {b.key for b in manifest.blobs if b.unread is None}
    part: list[ModelPart | None] = []

    def inside(name: str) -> str | None:
        if not part:
            try:
                part.append(find_model(manifest, prefix))
            except AmbiguousModel:
                part.append(None)
        found = part[0]
        if found is None:
            return None if name in objects else name
        inner = name[len(found.prefix) :]
        own = name.startswith(found.prefix) and name not in objects and found.foreign(inner) is None
        return inner if own else None

    return inside


def _part_below(names: Sequence[str], prefix: str) -> ModelPart:
    root = prefix if prefix == "" or prefix.endswith(".") else prefix + "."
    count = sum(n.startswith(root) for n in names)
    if not count:
        tops = sorted({n.split(".")[0] for n in names})
        raise AmbiguousModel(
            f"no tensor's name starts with {root}", hint=f"the top-level parts are: {', '.join(tops[:12])}"
        )
    states = _optimizer(names)
    beside = _beside(root, names, set(states)) if root == "" else ()
    return ModelPart(root, f"--model-prefix {prefix} ({count} tensors)", beside)


def _require_shapes(names: Sequence[str]) -> None:
    """Reject OLMo-core's direct saves, which keep weights only as the optimizer's flat ``<fqn>.main``."""
    flat = [n for n in names if n.endswith(".main")]
    known = set(names) if flat else set()
    flat = [n for n in flat if n.removesuffix("main") + "exp_avg" in known]
    if flat:
        raise AmbiguousModel(
            f"{len(flat)} weights are stored flat, like the optimizer's {flat[0]}: no shapes are stored",
            hint="load it with OLMo-core and save the model's state dict; consolidate keeps them flat",
        )


def _state_of(name: str) -> re.Match[str] | None:
    """Return the match of an optimizer's state, by the parameter's name or number."""
    found = _STATE.match(name) if "state." in name else None
    return found if found and found["key"] in _MOMENTS else None


def _optimizer(names: Sequence[str]) -> dict[str, set[str]]:
    """Return optimizer root -> the parameter FQNs that it has state for."""
    found: dict[str, set[str]] = {}
    for name in names:
        m = _state_of(name)
        if m and not m["fqn"].isdigit():
            found.setdefault(m["root"] or "", set()).add(m["fqn"])
    return found


def _by_optimizer(names: Sequence[str], states: dict[str, set[str]]) -> ModelPart | None:
    wanted: set[str] = set().union(*states.values())
    bare = wanted | {strip_wrappers(w) for w in wanted}
    votes: Counter[str] = Counter()
    for name in names:
        # Every way to read a name as prefix + parameter.
        at, wrapped = -1, any(w in name for w in (*LEADING_WRAPPERS, *WRAPPERS))
        while True:
            if name[at + 1 :] in bare or (wrapped and strip_wrappers(name[at + 1 :]) in bare):
                votes[name[: at + 1]] += 1
            at = name.find(".", at + 1)
            if at < 0:
                break
    roots = [
        (root, count)
        for root, count in votes.items()
        if not any(
            root == r + "." or root.startswith(f"{r}.state") or (r == "" and root.startswith("state."))
            for r in states
        )
    ]
    best = max((c for _, c in roots), default=0)
    full = [(r, c) for r, c in roots if c == best]
    # "model." and "model._orig_mod." are one place: they differ by wrappers only.
    shorter = [r for r, _ in full]
    full = [(r, c) for r, c in full if not any(_wraps(s, r) for s in shorter)]
    if not full or best * 2 < len(wanted):
        return None
    places = [r for r, _ in sorted(full)]
    called = _called(places) if len(full) > 1 else None
    if len(full) > 1 and called is None:
        parts = ", ".join(f"{r or 'top level'} ({c} parameters)" for r, c in sorted(full))
        raise AmbiguousModel(
            f"the optimizer's parameters are found in more than one part: {parts}",
            hint=f"name one: --model-prefix {_likeliest(places)}",
            candidates=[r for r, _ in full],
        )
    root = full[0][0] if called is None else called
    optimizer = ", ".join(sorted(r or "the top level" for r in states))
    place = f"under {root}" if root else "at the top level"
    because = f"{best} of the {len(wanted)} parameters that {optimizer} has state for are {place}"
    others = tuple(r for r in places if r != root)
    if others:
        because += f", and {root[:-1]} is what trainers call the model"
    return ModelPart(root, because, _beside(root, names, set(states)), others)


def _called(roots: Sequence[str]) -> str | None:
    """Return the only one of several parts with a name that trainers use for the model, or None."""
    known = [root for root in roots if root[:-1] in _CONTAINERS]
    return known[0] if len(known) == 1 else None


def _likeliest(roots: Sequence[str]) -> str:
    """Return the part to suggest: with a name that trainers use, and no copy; the first of equals."""
    if not roots:
        return "PREFIX"
    best = min(roots, key=lambda root: (root[:-1] not in _CONTAINERS, bool(_COPY.search(root))))
    return best or "''"


def _wraps(shorter: str, longer: str) -> bool:
    return longer != shorter and longer.startswith(shorter) and not strip_wrappers(longer[len(shorter) :])


def _beside(root: str, names: Sequence[str], optimizers: set[str]) -> tuple[str, ...]:
    """Return first path elements below a root that are not the model's, if the model has no container."""
    if root:
        return ()
    tops = {n.split(".")[0] for n in names}
    own = {o.split(".")[0] for o in optimizers if o} | ({"state"} if "" in optimizers else set())
    return tuple(sorted({t for t in tops if t in own or _TRAINER.match(t)}))


def _containers(manifest: Manifest, optimizers: set[str]) -> list[tuple[str, int]]:
    """Return (prefix, tensors) of each part that may be the model, most tensors first."""
    recorded = Paths.of(manifest)
    roots = [recorded.container(t.fqn) for t in manifest.tensors]
    numbered = {m["root"] for t in manifest.tensors if (m := _state_of(t.fqn)) and m["root"]}
    own = tuple(f"{o}." for o in optimizers | numbered if o)
    count = Counter(roots)
    top = count.pop("", 0)
    for root in list(count):
        if root.startswith(own) or root in optimizers or _TRAINER.match(root):
            del count[root]
    if top:
        bare = (t.fqn for t, root in zip(manifest.tensors, roots, strict=True) if not root)
        top = sum(not _TRAINER.match(name) for name in bare)
    if top:
        count[""] = top
    if len(count) == 1 and "" in count:
        return _by_name(manifest, count[""])
    return sorted(count.items(), key=lambda row: (-row[1], row[0]))


def _by_name(manifest: Manifest, total: int) -> list[tuple[str, int]]:
    """Return the parts by known container names, or the top level, where no container was recorded."""
    kept = [t.fqn for t in manifest.tensors if not _TRAINER.match(t.fqn)]
    for name in ("state_dict", "model_state_dict"):
        inside = sum(n.startswith(name + ".") for n in kept)
        if inside:
            return [(name + ".", inside)]
    return [("", total)]
