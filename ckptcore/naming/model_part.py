"""Find the model in a checkpoint, and the evidence for it.

Trainers nest the model differently: ``model.*``, ``app.model.*``, ``state_dict.*``, or at the top
beside the optimizer (torchtitan). The first evidence in this order decides, and the user sees it:

1. the prefix that the user names, or else where the format itself keeps the model;
2. the optimizer: its states name the model's parameters (``...state.<fqn>.exp_avg``), and the
   model is where those names are found. Two optimizers may train two models;
3. the container paths that the writer recorded, without those that hold optimizer state;
4. known container names.

Of two candidates, the one with a name that trainers use is the model, and the other is a finding: a moving
average (EMA) has the model's names, too. Otherwise two candidates are an error that lists both: a wrong guess
would export the wrong weights. A tensor that the optimizer has state for is the model's, also below a name
such as ``scheduler``; one outside of the part is a stray, about which an export asks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ckptcore.core.manifest import Manifest
from ckptcore.core.tree_paths import Paths
from ckptcore.errors import AmbiguousModel
from ckptcore.naming.moments import SHAPED, endings, state_of, trained_parameters
from ckptcore.naming.rename import LEADING_WRAPPERS, WRAPPERS, ModelPart, strip_wrappers
from ckptcore.naming.training_state import StoredKinds, below, below_states, is_average

# Names of entries beside a top-level model that are the trainer's own (torchtitan, OLMo, Lightning,
# Megatron's ``rng_state/shard_...``), if what is below them is.
_TRAINER = re.compile(
    r"^(optim|optimizer|optimizers|optimizer_\d+|lr_scheduler|scheduler|dataloader|train_state|rng"
    r"|rng_state|trainer|extra|ema_state|param_groups|chained_\d+)(\.|/|$)"
)
# Nothing tells what trainers keep below these.
_WEIGHTLESS = re.compile(r"^(trainer|extra)(\.|/|$)")
_OPTIMIZER = re.compile(r"^(optim|optimizers?|optimizer_\d+|chained_\d+|state)(\.|/|$)")
# Names of copies of a model that were not trained themselves.
_COPY = re.compile(
    r"(^|[._])(ema|swa|averaged?|shadow|teacher|target|ref|reference|old|best)([._]|$)", re.IGNORECASE
)
# Composer's own record of a model that it wraps: HuggingFaceModel keeps it in an attribute
# (composer/models/huggingface.py, `get_metadata`).
_COMPOSER = re.compile(r"^((?:state\.)?)integrations(\.huggingface(?:\.|$)|$)")
_CONTAINERS = ("model", "module", "state_dict", "model_state_dict", "app.model")


def find_model(manifest: Manifest, prefix: str | None = None) -> ModelPart:
    """Return the model part of a checkpoint.

    Args:
        manifest: The checkpoint.
        prefix: Prefix that the user named, or None to find it.

    Raises:
        AmbiguousModel: With the candidates.
    """
    stored = _Stored(manifest, [t.fqn for t in manifest.tensors])
    if not stored.names:
        raise AmbiguousModel(
            f"cannot find the model: the checkpoint has no tensor (got {len(manifest.blobs)} plain values)",
            hint="try consolidate or reshard, which write plain values, too",
            candidates=[],
        )
    # What the user names is not judged, only looked up.
    if prefix is not None:
        return _part_below(stored, prefix)
    part = _part_by_evidence(stored)
    strays = _find_strays(stored, part)
    return replace(part, strays=strays) if strays else part


def _part_by_evidence(stored: _Stored) -> ModelPart:
    """Return the part that the evidence names."""
    manifest = stored.manifest
    recorded_part = manifest.origin.get("model")
    # Only if it holds something: a format records its usual place, and a save may lack a model there.
    if recorded_part and any(n.startswith(recorded_part["prefix"]) for n in stored.names):
        return ModelPart(recorded_part["prefix"], recorded_part["because"])
    _require_shapes(stored.names)
    composed = _composed(stored)
    if composed is not None:
        return composed
    # Before containers: optimizers name parameters, and an average of weights is a container, too.
    if stored.states:
        part = _by_optimizer(stored)
        if part is not None:
            return part
    candidates = _containers(stored)
    if len(candidates) == 1:
        root, count = candidates[0]
        if root == "":
            return ModelPart("", f"{count} tensors are at the top level", *stored.beside(""))
        return ModelPart(root, f"{root[:-1]} is the only part that is not the trainer's ({count} tensors)")
    usual_root = _usual_root([r for r, _ in candidates])
    if usual_root is not None:
        other_roots = tuple(r for r, _ in candidates if r != usual_root)
        # What is not chosen is still recorded: an export reports it.
        return ModelPart(
            usual_root, f"{usual_root[:-1]} is what trainers call the model", other_prefixes=other_roots
        )
    parts = ", ".join(f"{r or 'top level'} ({n} tensors)" for r, n in candidates[:8]) or "none"
    raise AmbiguousModel(
        f"cannot choose the part of the checkpoint that is the model; candidates: {parts}",
        hint=f"name it: --model-prefix {_likeliest([r for r, _ in candidates])}",
        candidates=[r for r, _ in candidates],
    )


def _composed(stored: _Stored) -> ModelPart | None:
    """Return the model that Composer wrapped, of which its integration with the hub keeps a record."""
    for blob in stored.manifest.blobs:
        match = _COMPOSER.match(blob.key)
        if match is None or not (match[2] or (type(blob.tree) is dict and "huggingface" in blob.tree)):
            continue
        root = f"{match[1]}model.model."
        count = sum(name.startswith(root) for name in stored.names)
        if count:
            because = f"Composer's HuggingFaceModel keeps the model's {count} tensors in its attribute model"
            return ModelPart(root, because)
    return None


def in_model(manifest: Manifest, prefix: str | None) -> Callable[[str], str | None]:
    """Return a function from stored names to names inside the model.

    It gives None for names outside of the model, and the name itself if the model cannot be found. Objects
    that are no tensors are never inside. The model is searched for at the first call.
    """
    objects = {b.key for b in manifest.blobs if b.unread is None}
    part: list[ModelPart | None] = []

    def inside(name: str) -> str | None:
        # Once, and only when asked: most commands never need the model.
        if not part:
            try:
                part.append(find_model(manifest, prefix))
            except AmbiguousModel:
                part.append(None)
        model_part = part[0]
        if model_part is None:
            return None if name in objects else name
        return name[len(model_part.prefix) :] if name not in objects and model_part.holds(name) else None

    return inside


@dataclass(frozen=True)
class _Stored:
    """A checkpoint, the names of its tensors, and what the optimizer says about them."""

    manifest: Manifest
    names: Sequence[str]

    @cached_property
    def kinds(self) -> StoredKinds:
        """What names outside of a model are."""
        return StoredKinds(self.manifest)

    @cached_property
    def states(self) -> dict[str, set[str]]:
        """Optimizer -> names of the parameters that it has state for."""
        # A number names no parameter, so it cannot be searched for in names.
        named = {
            root: {p for p in parameters if not p.isdigit()} for root, parameters in self.numbered.items()
        }
        return {root: parameters for root, parameters in named.items() if parameters}

    @cached_property
    def numbered(self) -> dict[str, set[str]]:
        """The same, with parameters that the optimizer has by number."""
        return trained_parameters(self.names)

    @cached_property
    def tops(self) -> dict[str, list[str]]:
        """First path element -> names."""
        below: dict[str, list[str]] = {}
        for name in self.names:
            below.setdefault(name.split(".")[0], []).append(name)
        return below

    @cached_property
    def trainers(self) -> frozenset[str]:
        """First path elements below which the trainer keeps its own entries."""
        return frozenset(top for top in self.tops if self._is_trainers(top))

    def is_trainers(self, name: str) -> bool:
        """Return whether a name or a prefix is below an entry of the trainer."""
        return name.split(".")[0] in self.trainers

    def beside(self, root: str) -> tuple[tuple[str, ...], frozenset[str]]:
        """Return `ModelPart.beside` and `ModelPart.model_names` of a model at a root."""
        if root:
            return (), frozenset()
        optimizers = {o.split(".")[0] for o in self.states if o} | ({"state"} if "" in self.states else set())
        beside = tuple(sorted(top for top in self.tops if top in optimizers or top in self.trainers))
        trained = {strip_wrappers(p) for parameters in self.states.values() for p in parameters}
        model_names: set[str] = set()
        for top in beside:
            unknown = [n for n in self.tops[top] if self.kinds.kind_of(n) is None and not below_states(n)]
            mine = {n for n in unknown if strip_wrappers(n) in trained}
            # One trained tensor shows that the entry is a module of the model. An optimizer may keep tensors
            # of unknown keys: below its name only what is trained is the model's.
            model_names |= {n for n in unknown if mine} if not _OPTIMIZER.match(top) else mine
        return beside, frozenset(model_names)

    def _is_trainers(self, top: str) -> bool:
        below, kinds = self.tops[top], self.kinds
        if _TRAINER.match(top):
            # A submodule may have such a name, too: then it has weights, and nothing that a trainer saves.
            weights = _WEIGHTLESS.match(top) is None and any(kinds.is_weight_like(n) for n in below)
            return not weights or kinds.has_state(top) or any(below_states(n) for n in below)
        return kinds.is_container(top) and all(kinds.kind_of(n) is not None for n in below)


def _part_below(stored: _Stored, prefix: str) -> ModelPart:
    root = prefix if prefix == "" or prefix.endswith(".") else prefix + "."
    count = sum(n.startswith(root) for n in stored.names)
    if not count:
        tops = sorted(stored.tops)
        raise AmbiguousModel(
            f"no tensor's name starts with {root}", hint=f"the top-level parts are: {', '.join(tops[:12])}"
        )
    return ModelPart(root, f"--model-prefix {prefix} ({count} tensors)", *stored.beside(root))


def _require_shapes(names: Sequence[str]) -> None:
    """Reject OLMo-core's direct saves, which keep weights only as the optimizer's flat ``<fqn>.main``."""
    flat = [n for n in names if n.endswith(".main")]
    all_names = set(names) if flat else set()
    flat = [n for n in flat if n.removesuffix("main") + "exp_avg" in all_names]
    if flat:
        raise AmbiguousModel(
            f"{len(flat)} weights are stored flat, like the optimizer's {flat[0]}: no shapes are stored",
            hint="load it with OLMo-core and save the model's state dict; consolidate keeps them flat",
        )


def _by_optimizer(stored: _Stored) -> ModelPart | None:
    places, votes = _places(stored)
    if not places:
        return None
    parameters = {p for named in stored.states.values() for p in named}
    one_model = len(parameters) == sum(map(len, stored.states.values()))  # no parameter has two optimizers
    shared = set.intersection(*places.values()) if one_model else set()
    union = set().union(*places.values())
    # The top level counts only if nothing else does: an empty prefix fits every name.
    candidates = sorted(shared or (union - {""} or union))
    usual_root = _usual_root(candidates) if len(candidates) > 1 else None
    if len(candidates) > 1 and usual_root is None:
        parts = ", ".join(f"{r or 'top level'} ({votes[r]} parameters)" for r in candidates)
        raise AmbiguousModel(
            f"the optimizer's parameters are found in more than one part: {parts}",
            hint=f"name one: --model-prefix {_likeliest(candidates)}",
            candidates=candidates,
        )
    root = candidates[0] if usual_root is None else usual_root
    optimizer = ", ".join(sorted(r or "the top level" for r in stored.states))
    place = f"under {root}" if root else "at the top level"
    because = f"{votes[root]} of the {len(parameters)} parameters that {optimizer} has state for are {place}"
    other_roots = tuple(r for r in candidates if r != root)
    if other_roots:
        because += f", and {root[:-1]} is what trainers call the model"
    return ModelPart(root, because, *stored.beside(root), other_roots)


def _places(stored: _Stored) -> tuple[dict[str, set[str]], Counter[str]]:
    """Return (optimizer -> prefixes below which most of its parameters are, votes for each prefix)."""
    owners: dict[str, set[str]] = {}
    for root, parameters in stored.states.items():
        for parameter in parameters:
            for name in {parameter, strip_wrappers(parameter)}:
                owners.setdefault(name, set()).add(root)
    votes: Counter[str] = Counter()
    by_optimizer: dict[str, Counter[str]] = {root: Counter() for root in stored.states}
    for name in stored.names:
        # Every way to read a name as prefix + parameter.
        wrapped = any(w in name for w in (*LEADING_WRAPPERS, *WRAPPERS))
        start = 0
        while True:
            ending = name[start:]
            of = owners.get(ending) or (owners.get(strip_wrappers(ending)) if wrapped else None)
            if of:
                votes[name[:start]] += 1
                for root in of:
                    by_optimizer[root][name[:start]] += 1
            start = name.find(".", start) + 1
            if not start:
                break
    places: dict[str, set[str]] = {}
    for root, counts in by_optimizer.items():
        outside = {p: n for p, n in counts.items() if not any(_is_inside(p, r) for r in stored.states)}
        best = max(outside.values(), default=0)
        full = [p for p, n in outside.items() if n == best]
        # Half of the parameters at least: a few common names, such as a norm's, are found anywhere.
        if full and best * 2 >= len(stored.states[root]):
            # "model." and "model._orig_mod." are one place: they differ by wrappers only.
            places[root] = {p for p in full if not any(_wraps(s, p) for s in full)}
    return places, votes


def _is_inside(prefix: str, optimizer: str) -> bool:
    """Return whether a prefix is that of states of an optimizer, or of an average that it holds."""
    if optimizer == "":
        return prefix.startswith("state.")
    inside = prefix == optimizer + "." or prefix.startswith(f"{optimizer}.state")
    return inside or (prefix.startswith(f"{optimizer}.") and is_average(prefix[len(optimizer) + 1 :]))


def _usual_root(roots: Sequence[str]) -> str | None:
    """Return the only one of several parts with a name that trainers use for the model, or None."""
    usual_roots = [root for root in roots if root[:-1] in _CONTAINERS]
    return usual_roots[0] if len(usual_roots) == 1 else None


def _likeliest(roots: Sequence[str]) -> str:
    """Return the part to suggest: with a name that trainers use, and no copy; the first of equals."""
    if not roots:
        return "PREFIX"
    best = min(roots, key=lambda root: (root[:-1] not in _CONTAINERS, bool(_COPY.search(root))))
    return best or "''"


def _wraps(shorter: str, longer: str) -> bool:
    return longer != shorter and longer.startswith(shorter) and not strip_wrappers(longer[len(shorter) :])


def _containers(stored: _Stored) -> list[tuple[str, int]]:
    """Return (prefix, tensors) of each part that may be the model, most tensors first."""
    recorded = Paths.of(stored.manifest)
    roots = [recorded.container(name) for name in stored.names]
    # States of an optimizer are in containers of their own.
    optimizer_prefixes = tuple(f"{o}." for o in stored.numbered if o)
    count = Counter(roots)
    top = count.pop("", 0)
    # What the trainer keeps beside the model is no candidate.
    for root in list(count):
        if root.startswith(optimizer_prefixes) or root in stored.states or stored.is_trainers(root):
            del count[root]
    if top and stored.trainers:
        bare = (name for name, root in zip(stored.names, roots, strict=True) if not root)
        top = sum(not stored.is_trainers(name) for name in bare)
    if top:
        count[""] = top
    if len(count) == 1 and "" in count:
        return _by_name(stored, count[""])
    return sorted(count.items(), key=lambda row: (-row[1], row[0]))


def _by_name(stored: _Stored, total: int) -> list[tuple[str, int]]:
    """Return the parts by known container names, or the top level, where no container was recorded."""
    for container in {"state_dict", "model_state_dict"} & stored.tops.keys() - stored.trainers:
        inside = sum(name != container for name in stored.tops[container])
        if inside:
            return [(container + ".", inside)]
    return [("", total)]


def _find_strays(stored: _Stored, part: ModelPart) -> tuple[str, ...]:
    """Return the stored names of strays, in the checkpoint's order.

    The state of an optimizer names its parameters, or numbers them. A name is a stray if the part lacks it
    and it is stored elsewhere. Numbers tell shapes alone: where an optimizer has state for more tensors of a
    shape than the part has, those of that shape outside are strays.
    """
    # At the top level everything belongs to the model, and only shapes can show a stray.
    strays = _strays_by_name(stored, part) if part.prefix else set()
    strays |= _strays_by_shape(stored, part)
    return tuple(name for name in stored.names if name in strays)


def _strays_by_name(stored: _Stored, part: ModelPart) -> set[str]:
    """Return tensors outside the model part that have the names of parameters with states."""
    names, states, kinds = stored.names, stored.states, stored.kinds
    inner = {strip_wrappers(n[len(part.prefix) :]) for n in names if n.startswith(part.prefix)}
    parts = part.prefix.split(".")[:-1]
    heads = ("", *(".".join(parts[n:]) + "." for n in range(len(parts))))
    trained, missing = set[str](), set[str]()
    for parameters in states.values():
        for parameter in parameters:
            bare = strip_wrappers(parameter)
            inside = any(bare.startswith(head) and bare[len(head) :] in inner for head in heads)
            (trained if inside else missing).add(bare)
    if not missing:
        return set()
    strays: dict[str, set[str]] = {}
    for name in _outside(names, part, states):
        bare = strip_wrappers(name)
        for ending in endings(bare):
            # One element at the end of a longer name, such as ``scale``, proves nothing.
            if ending in missing and ("." in ending or ending == bare) and kinds.kind_of(name) is None:
                strays.setdefault(bare[: len(bare) - len(ending)], set()).add(name)
                break
    bare_names = set(map(strip_wrappers, names))
    copies = {
        prefix
        for prefix in strays
        if prefix
        and (_COPY.search(prefix) or 2 * sum(prefix + n in bare_names for n in trained) > len(trained))
    }
    return {name for prefix, same in strays.items() if prefix not in copies for name in same}


def _strays_by_shape(stored: _Stored, part: ModelPart) -> set[str]:
    """Return tensors outside the model part that have the shapes of parameters that states number."""
    manifest, names, kinds = stored.manifest, stored.names, stored.kinds
    moments: dict[tuple[str, str], tuple[int, ...]] = {}
    for spec in manifest.tensors:
        state = state_of(spec.fqn) if "state." in spec.fqn else None
        if state is None or state.key not in SHAPED or not spec.numel > 1:
            continue
        if not state.parameter.isdigit():
            # One parameter with a name: then names decide, and shapes would only guess.
            return set()  # names tell more: `_strays_by_name`
        moments[state.root, state.parameter] = spec.shape
    if not moments:
        return set()
    missing_by_shape = Counter(moments.values())
    shapes = {spec.fqn: spec.shape for spec in manifest.tensors}
    for name in names:
        if part.holds(name):
            missing_by_shape[shapes[name]] -= 1
    outside = [
        name
        for name in _outside(names, part, dict.fromkeys(root for root, _ in moments))
        if missing_by_shape[shapes[name]] > 0 and kinds.is_weight_like(name) and kinds.kind_of(name) is None
        if not _COPY.search(name)
    ]
    outside_by_shape = Counter(shapes[name] for name in outside)
    return {n for n in outside if outside_by_shape[shapes[n]] >= missing_by_shape[shapes[n]]}


def _outside(names: Sequence[str], part: ModelPart, optimizers: Mapping[str, object]) -> Iterator[str]:
    """Yield names outside of the model part, of other candidates for it, and of optimizers' own states."""
    for name in names:
        if part.holds(name):
            continue
        if name.startswith(part.other_prefixes or ("\0",)) or state_of(name) is not None:
            continue
        if not any(below(name, f"{root}.state" if root else "state") for root in optimizers):
            yield name
