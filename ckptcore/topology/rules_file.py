"""Sharding files: placement rules, pipeline stages and experts, as TOML says them.

```
family = "hf"                        # rules of this built-in family come behind one's own
experts = ["*.experts.{n}."]         # whole experts by name, to the ranks of ep

[mesh]                               # if there, it must be the mesh that was asked for
fsdp = 4
tp = 2

[[rule]]                             # the first that matches a parameter's name counts
fqn = ["*.wq.weight", "*.wk.weight"] # globs; * crosses dots
tp = "shard(0)"                      # per axis: shard(DIM), DIM < 0 counts from the end; replicate
fsdp = "shard(0)"                    # the default

[stages]
layers = "layers.{n}."               # how the name of a layer's parameter begins
first = ["tok_embeddings.*"]
last = ["norm.*", "output.*"]
every = ["*freqs_cis"]               # what all stages have: rotary tables
stacked = ["*.all_layers.*"]         # layers in one tensor: pp cuts its dim 0
split = [[0, 2], [2, 4]]             # layers of each stage, half-open; default: even
weights = [1, 1]                     # or even with embeddings and head counted as layers
virtual = 2                          # stages per rank; stage s lies on rank s % pp
```
"""

from __future__ import annotations

import re
import tomllib
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ckptcore.errors import UsageError
from ckptcore.utils.text import shown

_PLACE = re.compile(r"replicate|shard\(\s*-?[0-9]{1,2}\s*\)")
MAX_BYTES = 1 << 20


def _list(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _place(value: Any) -> Any:
    if not isinstance(value, str) or not _PLACE.fullmatch(value):
        raise ValueError(f"{value!r} is no placement: shard(DIM) or replicate")
    return None if value == "replicate" else int(value[len("shard(") : -1])


Texts = Annotated[tuple[str, ...], BeforeValidator(_list)]
Place = Annotated[int | None, BeforeValidator(_place)]  # the dim that is cut, None for replicate
Weight = Annotated[int, Field(ge=0, le=1024)]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list)]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ShardingRule(_Form):
    """Where the parameters of some names go.

    fqn: globs. pp, ep, tp: how those axes cut them; absent: the axis does not (pp, tp), or counts as
    further ranks of fsdp (ep). fsdp: alternatives: the first, unless another axis cuts that dim and it has
    fewer elements than there are pieces; then the second.
    """

    fqn: Texts
    pp: Place = None
    fsdp: Places = (0,)
    ep: Place = None
    tp: Place = None

    def names(self, axis: str) -> bool:
        """Whether the rule speaks of an axis."""
        return axis in self.model_fields_set


class Stages(_Form):
    """Which parameters lie on which pipeline stage.

    layers: how a layer's names begin, a glob with ``{n}`` for its number. first, last: globs. every: globs on
    what all stages have. tied: those of ``first`` that the last stage needs, too, when no name matches
    ``head``. stacked: globs on tensors whose dim 0 counts layers.
    split: [first layer, behind the last] of each stage. virtual: stages per rank. weights: as how many layers
    the embeddings and the head count, when layers are split evenly.
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
    """A whole file. evidence: globs on names that only models of a built-in family have."""

    family: str | None = None
    evidence: Texts = ()
    experts: Texts = ()
    mesh: dict[str, int] | None = None
    rule: tuple[ShardingRule, ...] = ()
    stages: Stages | None = None


def load(text: str, name: str = "--sharding") -> ShardingFile:
    """The file of a text; raises `UsageError` that says where it is wrong."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{name} has {len(text)} characters, more than {MAX_BYTES}")
    try:
        return ShardingFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is no TOML: {error}") from error
    except RecursionError as error:
        raise UsageError(
            f"{name} is nested too deeply", hint="no key of it takes more than lists of pairs"
        ) from error
    except ValidationError as error:
        told = [f"{_where(row['loc'])}: {row['msg']}" for row in error.errors()[:5]]
        hint = "keys are [mesh], [[rule]], [stages], family and experts"
        raise UsageError(f"{name}: {shown('; '.join(told), 500)[1:-1]}", hint=hint) from error


def _where(path: tuple[int | str, ...]) -> str:
    """
    >>> _where(("rule", 0, "tp", 0))
    'rule 1, tp 1'
    """
    return (
        "".join(f" {w + 1}" if isinstance(w, int) else f", {w}" for w in path).removeprefix(", ")
        or "the file"
    )
