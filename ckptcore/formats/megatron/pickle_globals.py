"""Define the permitted pickle globals of Megatron's torch files, on top of torch's, and their plain values.

Beside plain values Megatron-LM pickles its parsed arguments, random states and a few enums and
dataclasses (megatron/core/safe_globals.py, megatron/training/checkpointing.py). Each becomes a `Named` or
plain value; no code of Megatron or the standard library runs. `read_megatron` reads one file.

Named kinds: ``namespace`` {attribute: value}; ``enum`` [class, name or value]; ``record``
[class, {field: value}].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptcore.core.named_values import CONTAINERS, content_of, with_content
from ckptcore.core.object_tree import Named, Refused
from ckptcore.encodings.pickle.torch_globals import OBJECT_TABLE, REBUILDS, with_attributes
from ckptcore.encodings.pickle.trainer_classes import LINUX_SIGNALS, MEGATRON_ENUMS, MEGATRON_RECORDS
from ckptcore.encodings.pickle.unpickler import Call, Record, record
from ckptcore.encodings.torchzip.reader import Objects, bound_tree, read_objects
from ckptcore.errors import MalformedCheckpoint
from ckptcore.store.subfolder import FileRange

_MAX_DEPTH = 150


def read_megatron(content: FileRange, label: str) -> Objects:
    """Read the complete tree of a torch zip that Megatron wrote, in plain values.

    Args:
        content: The file.
        label: Name of the file, for messages.

    Returns:
        What `read_objects` returns, with every record as plain value or `Named`.

    Raises:
        MalformedCheckpoint: As `read_objects` does.
    """
    objects = read_objects(content, label, MEGATRON_TABLE)
    refused = list(objects.refused)
    tree = plain(objects.tree, content.length, label, refused)
    return replace(objects, tree=tree, refused=tuple(refused))


def plain(tree: Any, nbytes: int, label: str, refused: list[str] | None = None) -> Any:
    """Return a tree of `MEGATRON_TABLE` with every record as `Named` or plain value.

    Args:
        tree: The tree.
        nbytes: Length of the file, which bounds the tree.
        label: Name of the file, for messages.
        refused: Gets the names of values that cannot be built; the tree has `Refused` in their place.

    Raises:
        MalformedCheckpoint: The tree nests too deeply, contains itself, or is too large.
    """
    # By id: a pickle's memo shares values, and each must be converted once, as one object.
    memo: dict[int, Any] = {}
    open_: set[int] = set()  # values above the current one: to meet one again is a cycle

    def note(value: Any) -> Any:
        if type(value) is Refused and refused is not None and value.name not in refused:
            refused.append(value.name)
        return value

    def visit(value: Any, depth: int) -> Any:
        if type(value) is Call:  # a class that the pickle names, but does not call
            return note(Refused(value.name))
        if type(value) is Named and value.kind == "ndarray" and "refused" in value.value:
            return note(Refused(value.value["refused"]))
        kind = value.kind if type(value) is Named and value.kind in CONTAINERS else ""
        if not kind and not isinstance(value, (dict, list, tuple, Record)):
            return value
        if id(value) in memo:
            return memo[id(value)]
        if depth > _MAX_DEPTH or id(value) in open_:
            raise MalformedCheckpoint(f"{label} nests deeper than {_MAX_DEPTH} levels")
        open_.add(id(value))
        if isinstance(value, Record):
            try:
                new = _KINDS[value.kind](value, lambda v: visit(v, depth + 1))
            except ValueError as error:
                raise MalformedCheckpoint(f"{label}: {error}") from error
            new = note(new)
        elif kind:
            inside = visit(content_of(kind, value.value), depth + 1)
            new = Named(kind, with_content(kind, value.value, inside))
        elif isinstance(value, dict):
            new = type(value)((k, visit(v, depth + 1)) for k, v in value.items())
        else:
            new = type(value)([visit(v, depth + 1) for v in value])
        open_.discard(id(value))
        memo[id(value)] = new
        return new

    new = visit(tree, 0)
    # `Named` hides what is below it from the first count.
    bound_tree(_unwrap_named(new), nbytes, label)
    return new


def _unwrap_named(tree: Any) -> Any:
    """Return the tree with `Named` values replaced by their contents, sharing kept."""
    memo: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        value = value.value if isinstance(value, Named) else value
        if not isinstance(value, (dict, list, tuple)):
            return value
        if id(value) not in memo:
            inside = value.items() if isinstance(value, dict) else enumerate(value)
            memo[id(value)] = {k: visit(v) for k, v in inside}
        return memo[id(value)]

    return visit(tree)


# --- what each kind of record becomes -------------------------------------------------------------


def _namespace(value: Record, visit: Any) -> Any:
    state = value.state if value.state is not None else {}
    if type(state) is not dict or any(type(k) is not str for k in state):
        return Refused("a namespace that is not filled by name")
    return Named("namespace", visit(state))


def _dataclass(value: Record, visit: Any) -> Any:
    state = value.state if value.state is not None else {}
    if type(state) is not dict or any(type(k) is not str for k in state):
        return Refused(value.args[0])
    return Named("record", [value.args[0], visit(state)])


def _bytes_io(value: Record, visit: Any) -> Any:
    state = value.state
    if type(state) is tuple and state and type(state[0]) is bytes:
        position = state[1] if len(state) > 1 else 0
        if type(position) is int and 0 <= position < 1 << 62:
            return Named("bytesioat", (state[0], position)) if position else Named("bytesio", state[0])
    return Refused("io.BytesIO")


def _generator(value: Record, visit: Any) -> Any:
    # torch/csrc/Generator.cpp THPGenerator_reduce: Generator(device), then (seed, offset, state).
    return {"device": visit(value.args[0] if value.args else None), "state": visit(value.state)}


_KINDS: dict[str, Any] = {
    "namespace": _namespace,
    "dataclass": _dataclass,
    "bytesio": _bytes_io,
    "generator": _generator,
}


# --- the table ------------------------------------------------------------------------------------


def enum_global(name: str) -> Call:
    """Return the entry of an enum, whose members are kept with their value or with their name (`MEMBERS`)."""

    def build(*args: Any) -> Named:
        if len(args) != 1 or type(args[0]) not in (int, str):
            raise ValueError(f"{name} of something else than one value")
        return Named("enum", [name, args[0]])

    return Call(name, build, member=lambda member: Named("enummember", [name, member]))


def _from_type(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    # torch/_tensor.py _rebuild_from_type_v2: a plain tensor with attributes (Megatron marks the main
    # copies of parameters with `tensor_model_parallel`, `partition_dim`, ...).
    if (
        type(kind) is not Named
        or kind.kind != "class"
        or not any(rebuild is call for call in REBUILDS.values())
        or type(args) is not tuple
    ):
        return kind if type(kind) is Refused else Refused("torch._tensor._rebuild_from_type_v2")
    return with_attributes(rebuild.build(*args), state)


def dataclass_global(name: str) -> Call:
    """Return the entry of a class that is kept as its name and its fields."""
    return Call(name, lambda *args: Record("dataclass", (name,)))


MEGATRON_TABLE: dict[str, Any] = {
    **OBJECT_TABLE,
    # Lib/argparse.py, Lib/types.py: the parsed arguments (megatron/training/checkpointing.py)
    "argparse.Namespace": record("namespace"),
    "types.SimpleNamespace": record("namespace"),
    # Lib/io.py: `_extra_state` of Transformer Engine before 2.0
    "io.BytesIO": record("bytesio"),
    "_io.BytesIO": record("bytesio"),
    # torch/_tensor.py __reduce_ex__: tensors with attributes
    "torch._tensor._rebuild_from_type_v2": Call("_rebuild_from_type_v2", _from_type),
    "torch.Tensor": Named("class", "torch.Tensor"),
    "torch._tensor.Tensor": Named("class", "torch.Tensor"),
    "torch.nn.parameter.Parameter": Named("class", "torch.nn.Parameter"),
    # torch/csrc/Generator.cpp: the CUDA generators that `rng_tracker_states` keeps
    "torch._C.Generator": record("generator"),
    # Lib/enum.py
    **{name: enum_global(name) for name in MEGATRON_ENUMS},
    # CPython 3.11.0 to 3.11.3 pickle a signal as a global: args.exit_signal
    **{f"signal.{name}": Named("enum", ["signal.Signals", number]) for name, number in LINUX_SIGNALS.items()},
    # dataclasses and plain classes that `args` or the optimizer's state hold
    **{name: dataclass_global(name) for name in MEGATRON_RECORDS},
}
