"""Strict exports: an export of a small model of each type, beside what `save_pretrained` of it writes.

The model is saved and opened by transformers first, so that it has what its class changes of loaded values,
such as rows of padding. What `save_pretrained` then writes is the judge of an export of the live module,
whose source the type's place in the list chooses; with ``--dtype bf16`` it is what the model in bfloat16
writes. `strict_exports.toml` has the result of each type, which a page shows and `make soak` holds against
runs. As a program, this module writes it:

    CKPTCORE_TRANSFORMERS4_PYTHON=PYTHON python tests/helpers/strict_exports.py
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ckptcore
from ckptcore.errors import CkptError

if TYPE_CHECKING:  # the tables of docs/ need no tensors
    import torch

    State = dict[str, torch.Tensor]

FILE = Path(__file__).with_suffix(".toml")
MOST = 20_000_000  # elements of a model
EQUAL = "equal"
UNBUILT = {  # a part of the reason why no model is built -> the reason in the table
    "no class": "no class of the tables for `AutoModel...` is of it alone",
    "ImportError": "it needs another library, or weights from the network",
    " elements": f"no narrow config has under {MOST // 1_000_000} million elements",
    "": "no narrow config of it is one that its class takes",
}
NOT_REOPENED = "transformers does not open what it saves of its small model"
PYTHON = "converted by arbitrary Python, which is refused"  # of transformers' own loader
# Part of a difference -> why it is none of the export's.
DIFFERS = {
    "num_batches_tracked is torch.int64": "a count of batches stays an integer; transformers loads it as "
    "float32 where its module is kept in float32",
    "bf16: config.json has the dtype bfloat16, not float32": "`save_pretrained` names the dtype of the first "
    "tensor in `config.json`, which this class keeps in float32",
    "bf16: config.json differs in down_ops": "its config class adds to a list at every loading",
}
OTHER_KEYS = "other keys: its class has other names than those that transformers 5 saves"
OPENED = "opened"  # by transformers 4.57: nothing missing, unexpected or of another shape


@dataclass(frozen=True)
class Row:
    """A type's result. model: its class. source: of the export. older: what transformers 4.57 does with it.

    differs: the only difference, or "". left_out: why nothing is compared, or "".
    """

    model: str = ""
    source: str = ""
    older: str = ""
    differs: str = ""
    left_out: str = ""


def rows() -> dict[str, Row]:
    """Every type's result, as it is declared."""
    found = tomllib.loads(FILE.read_text("utf-8"))
    return {kind: Row(**of) for kind, of in found["types"].items()}


def versions() -> tuple[str, str]:
    """The versions of transformers that the results are of."""
    found = tomllib.loads(FILE.read_text("utf-8"))
    return found["transformers"], found["older"]


def _dcp(model: Any, state: State, folder: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": state, "step": torch.tensor(3)}, checkpoint_id=folder, no_dist=True)


def _bare_dcp(model: Any, state: State, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, checkpoint_id=folder, no_dist=True)


def _compiled(model: Any, state: State, folder: Path) -> None:
    import torch

    folder.mkdir()
    torch.save({f"_orig_mod.module.{n}": t for n, t in state.items()}, folder / "model.pt")


def _wrapped(model: Any, state: State, folder: Path) -> None:
    import torch

    folder.mkdir()
    torch.save({"model": {f"net.{n}": t for n, t in state.items()}, "step": 3}, folder / "model.pt")


def _safetensors(model: Any, state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({n: t.clone().contiguous() for n, t in state.items()}, folder / "model.safetensors")


def _ranks(model: Any, state: State, folder: Path) -> None:
    """One file a rank, of rows, as verl saves an FSDP2 module; what has no rows is in each."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder.mkdir()
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = DeviceMesh("cpu", range(2), mesh_dim_names=("fsdp",))
            mine = {}
            for name, tensor in state.items():
                parts = tensor.chunk(2) if tensor.dim() else (tensor,)
                part = tensor if not tensor.dim() else parts[rank] if rank < len(parts) else tensor[:0]
                mine[name] = DTensor.from_local(
                    part.clone(),
                    mesh,
                    [Shard(0) if tensor.dim() else Replicate()],
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
            torch.save(mine, folder / f"model_world_size_2_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))


# Sources of exports; each type is exported from one.
SOURCES: Mapping[str, tuple[str, Callable[[Any, State, Path], None]]] = {
    "dcp": ("a DCP folder with the model below `model.`", _dcp),
    "bare-dcp": ("a DCP folder of the module's `state_dict()` alone", _bare_dcp),
    "wrapped-pt": ("a `.pt` of a program that holds the model in an attribute", _wrapped),
    "compiled-pt": ("a `.pt` of `compile(DDP(model))`", _compiled),
    "safetensors": ("one safetensors file of the live names", _safetensors),
    "ranks": ("one file of each of two FSDP2 ranks", _ranks),
}


@dataclass(frozen=True)
class Engined:
    """A model that vLLM runs. kind: of model, in words. dtype: of its weights."""

    model_type: str
    kind: str
    fields: Mapping[str, Any]
    dtype: str = "fp32"


VLLM = "0.32.0"
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_EXPERTS_OF_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ENGINE: Mapping[str, Engined] = {
    "llama": Engined("llama", "dense, grouped queries", {}),
    "llama-bf16": Engined("llama", "dense, in bfloat16", {}, "bf16"),
    "qwen2": Engined("qwen2", "dense, biases, tied embeddings", {"tie_word_embeddings": True}),
    "qwen3": Engined("qwen3", "dense, norms of queries and keys", {}),
    "mistral": Engined("mistral", "a window in every layer", {"sliding_window": 8}),
    "gemma2": Engined(
        "gemma2", "a window in every second layer, caps of logits, tied", {"sliding_window": 8}
    ),
    "olmo2": Engined("olmo2", "dense, norms behind", {"num_key_value_heads": 2}),
    "phi3": Engined("phi3", "fused projections", {}),
    "mixtral": Engined("mixtral", "experts", _EXPERTS),
    "qwen3_moe": Engined("qwen3_moe", "many experts", _EXPERTS_OF_QWEN),
}


def source_of(model_type: str, every: list[str]) -> str:
    """The source that a type is exported from."""
    return [*SOURCES][every.index(model_type) % len(SOURCES)]


def reopened(model: Any, folder: Path) -> Any:
    """The model as transformers opens what it saved, or None: a small config need not be one it accepts."""
    model.save_pretrained(folder)
    try:
        opened, report = opened_by(type(model), folder, output_loading_info=True)
    except Exception:  # any failure of a model class
        return None
    return None if any(report[f"{k}_keys"] for k in ("missing", "unexpected", "mismatched")) else opened


def opened_by(model_class: Any, folder: Path, **options: Any) -> Any:
    """What `from_pretrained` returns. A class that warns, of parameters without elements, opens its files."""
    with warnings.catch_warnings(action="ignore"):
        return model_class.from_pretrained(folder, **options)


def differences(model: Any, source: str, folder: Path) -> list[str]:
    """How the exports of a model differ from what it saves: none, where both are strict."""
    import torch

    hub, wanted = folder / "hub", folder / "wanted"
    model.save_pretrained(hub)
    state = {n: t.detach().clone() for n, t in model.state_dict().items() if hasattr(t, "shape")}
    SOURCES[source][1](model, state, folder / "source")
    options: dict[str, Any] = {"verb": "export", "config": str(hub), "catalog": False}
    ckptcore.convert(str(folder / "source"), str(folder / "out"), **options)
    ckptcore.convert(str(folder / "source"), str(folder / "bf16"), dtype="bf16", **options)
    opened_by(type(model), hub, dtype=torch.bfloat16).save_pretrained(wanted)
    found = [*folders_differ(folder / "out", hub), *folders_differ(folder / "bf16", wanted)]
    for made in ("out", "bf16"):
        proof = ckptcore.verify_export(str(folder / made), against=str(folder / "source"))
        found += [f"{made}: verify-export says {proof.verdict}: {proof.failures}"] * (proof.verdict != "ok")
    return found


def folders_differ(made: Path, right: Path) -> list[str]:
    """How an export differs from a folder in names, dtypes, shapes, bytes and config.json.

    The dtypes of configs inside of a config are not compared: only a model that was opened once has them.
    """
    import torch

    ours, theirs = tensors(made), tensors(right)
    out = [f"{made.name}: {n} is only in one" for n in sorted(ours.keys() ^ theirs.keys())]
    for name in ours.keys() & theirs.keys():
        one, two = ours[name], theirs[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            out.append(f"{made.name}: {name} is {one.dtype} {[*one.shape]}, not {two.dtype} {[*two.shape]}")
        elif not torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)):
            out.append(f"{made.name}: {name} has other bytes")
    forms = [json.loads((folder / "config.json").read_text()) for folder in (made, right)]
    one, two = map(without_dtypes, forms)
    fields = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
    out += [f"{made.name}: config.json differs in {name}" for name in sorted(fields)]
    if forms[0]["dtype"] != forms[1]["dtype"]:
        out.append(f"{made.name}: config.json has the dtype {forms[0]['dtype']}, not {forms[1]['dtype']}")
    return out


def without_dtypes(form: Any) -> Any:
    """A config without the dtypes in it."""
    if isinstance(form, dict):
        return {k: without_dtypes(v) for k, v in form.items() if k != "dtype"}
    return form


def tensors(folder: Path) -> State:
    """Every tensor of a folder."""
    from safetensors.torch import load_file

    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


def result(model_type: str, source: str, folder: Path, opens: Callable[[Path], str]) -> tuple[Row, list[str]]:
    """A type's result, and how its exports differ from what its model saves.

    opens: what transformers 4.57 does with a folder.
    """
    import small_models

    try:
        model = small_models.filled(model_type, MOST)
    except LookupError as error:
        return Row(left_out=next(why for part, why in UNBUILT.items() if part in str(error))), []
    name = type(model).__name__
    opened = reopened(model, folder / "first")
    if opened is None:
        return Row(name, left_out=NOT_REOPENED), []
    try:
        wrong = differences(opened, source, folder)
    except CkptError as error:
        if "arbitrary Python" in error.message:
            return Row(name, left_out=PYTHON), []
        return Row(name, source), [f"{type(error).__name__}: {error.message}"]
    reasons = {next((why for part, why in DIFFERS.items() if part in text), "") for text in wrong}
    (differs,) = reasons if len(reasons) == 1 else ("",)
    return Row(name, source, opens(folder / "out") or OPENED, differs), [] if differs else wrong


def results(opens: Callable[[Path], str], part: int, parts: int) -> tuple[dict[str, Row], list[str]]:
    """The results of one of so many parts of all types, and every difference."""
    import small_models

    kinds = small_models.model_types()
    found, wrong = {}, []
    for kind in kinds[part::parts]:
        with tempfile.TemporaryDirectory() as folder:
            found[kind], differing = result(kind, source_of(kind, kinds), Path(folder), opens)
        wrong += [f"{kind}: {text}" for text in differing]
        print(kind, found[kind], differing[:3], file=sys.stderr, flush=True)
    return found, wrong


def written(found: Mapping[str, Row], own: str, older: str) -> str:
    """The text of the file of results."""
    lines = ["# Written by tests/helpers/strict_exports.py.", f'transformers = "{own}"', f'older = "{older}"']
    lines += ["", "[types]"]
    for kind, row in found.items():
        fields = ", ".join(f"{k} = {json.dumps(v)}" for k, v in vars(row).items() if v)
        lines.append(f"{json.dumps(kind)} = {{ {fields} }}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all types, and write the file of results if every export is strict."""
    import torch
    from older_transformers import VARIABLE, Older

    from ckptcore.planning import transformers_process

    torch.set_num_threads(1)
    library = quiet()
    transformers_process.ask = ask_here
    older = Older(os.environ[VARIABLE])
    found, wrong = results(lambda folder: older.ask(open=str(folder)), 0, 1)
    FILE.write_text(written(found, library.__version__, older.ask(version=True)), "utf-8")
    older.process.communicate()
    sys.exit("\n".join(wrong))


def ask_here(module: str, asked: object, *, seconds: float | None) -> Any:
    """Answer in this process, which has imported transformers already, in place of one of its own."""
    answer = importlib.import_module(module).answer
    with warnings.catch_warnings(action="ignore"):  # which are no errors in a process of its own
        return json.loads(json.dumps(answer(json.loads(json.dumps(asked)))))


def quiet() -> Any:
    """transformers, without bars and warnings."""
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


if __name__ == "__main__":
    main()
