"""Parse sharding files: placement rules, pipeline stages and experts, in TOML.

```
family = "hf"                        # rules of this built-in family come after the file's own
experts = ["*.experts.{n}."]         # complete experts by name, to the ranks of ep

[mesh]                               # optional; must be the requested mesh
fsdp = 4
tp = 2

[[rule]]                             # the first that matches a parameter's name applies
fqn = ["*.wq.weight", "*.wk.weight"] # globs; * crosses dots
tp = "shard(0)"                      # per axis: shard(DIM), DIM < 0 counts from the end; replicate
fsdp = "shard(0)"                    # the default

[stages]
layers = "layers.{n}."               # how the name of a layer's parameter begins
first = ["tok_embeddings.*"]
last = ["norm.*", "output.*"]
every = ["*freqs_cis"]               # on all stages: rotary tables
stacked = ["*.all_layers.*"]         # layers in one tensor: pp cuts its dim 0
split = [[0, 2], [2, 4]]             # layers of each stage, half-open; default: even
weights = [1, 1]                     # or even with embeddings and head counted as layers
virtual = 2                          # stages per rank; stage s is on rank s % pp
```
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ckptcore.errors import UsageError
from ckptcore.utils.foreign_text import InvalidText, load_toml
from ckptcore.utils.text import short_repr

_PLACE = re.compile(r"replicate|shard\(\s*-?[0-9]{1,2}\s*\)")
MAX_BYTES = 1 << 20


def _list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _place(value: Any) -> Any:
    if not isinstance(value, str) or not _PLACE.fullmatch(value):
        raise ValueError(f"placement must be shard(DIM) or replicate (got {value!r})")
    return None if value == "replicate" else int(value[len("shard(") : -1])


Texts = Annotated[tuple[str, ...], BeforeValidator(_list)]
Place = Annotated[int | None, BeforeValidator(_place)]  # the dim to cut, None for replicate
Weight = Annotated[int, Field(ge=0, le=1024)]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardingRule(_Form):
    """Placement of the parameters of some names.

    Attributes:
        fqn: Globs.
        pp: Dim that pp cuts; absent: none.
        fsdp: Alternatives: the first, unless another axis cuts that dim and it has fewer elements than there
            are pieces; then the second.
        ep: Dim that ep cuts; absent: ep counts as further ranks of fsdp.
        tp: Dim that tp cuts; absent: none.
    """

    fqn: Texts
    pp: Place = None
    fsdp: Places = (0,)
    ep: Place = None
    tp: Place = None

    def names(self, axis: str) -> bool:
        """Report whether the rule has an entry for an axis."""
        return axis in self.model_fields_set


class Stages(_Form):
    """Which parameters are on which pipeline stage.

    Attributes:
        layers: How a layer's names begin, a glob with ``{n}`` for its number.
        stacked: Globs on tensors whose dim 0 counts layers.
        first: Globs.
        last: Globs.
        every: Globs on parameters of all stages.
        tied: Those of ``first`` that the last stage needs, too, when no name matches ``head``.
        head: Globs.
        split: [first layer, end] of each stage.
        virtual: Stages per rank.
        weights: How many layers the embeddings and the head count as, when layers are split evenly.
    """

    layers: Texts = ()
    stacked: Texts = ()
    first: Texts = ()
    last: Texts = ()
    every: Texts = ()
    tied: Texts = ()
    head: Texts = ()
    split: tuple[tuple[int, int], ...] | None = None
    virtual: int = Field(default=1, ge=1, le=1024)
    weights: tuple[Weight, Weight] = (0, 0)


class ShardingFile(_Form):
    """A complete file; ``evidence`` is globs on names that only models of a built-in family have."""

    family: str | None = None
    evidence: Texts = ()
    experts: Texts = ()
    mesh: dict[str, int] | None = None
    rule: tuple[ShardingRule, ...] = ()
    stages: Stages | None = None


def load(text: str, name: str = "--sharding") -> ShardingFile:
    """Parse a file's text; raises `UsageError` with the position of an error."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{name} must have at most {MAX_BYTES} characters (got {len(text)})")
    try:
        return ShardingFile.model_validate(load_toml(text))
    except InvalidText as error:
        raise UsageError(f"cannot read {name} as TOML: {error}") from error
    except ValidationError as error:
        wrong = [f"{_where(row['loc'])}: {row['msg']}" for row in error.errors()[:5]]
        hint = "keys are [mesh], [[rule]], [stages], family and experts"
        raise UsageError(f"{name}: {short_repr('; '.join(wrong), 500)[1:-1]}", hint=hint) from error


def _where(path: tuple[int | str, ...]) -> str:
    """Format the position of an error in the file.

    >>> _where(("rule", 0, "tp", 0))
    'rule 1, tp 1'
    """
    return (
        "".join(f" {w + 1}" if isinstance(w, int) else f", {w}" for w in path).removeprefix(", ")
        or "the file"
    )
