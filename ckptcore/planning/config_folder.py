"""Compare an export's names and shapes with the model of its config.json, and write that config.

A config is published as it is, with the dtype of the exported weights. If transformers is installed (extra
``hf``), another process builds the model on the meta device, and every name and shape is compared before any
work.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import Finding, NameMismatch, UsageError, finding
from ckptcore.formats.huggingface.quantized import quantization_of, scaleless
from ckptcore.naming.quantized_names import quantized_weights
from ckptcore.naming.wrapper_prefix import note_of_wrapper, remove_prefix, unneeded_prefix
from ckptcore.planning.hub_files import is_of_diffusers
from ckptcore.planning.kept_answers import ask_once
from ckptcore.planning.transformers_process import Answer
from ckptcore.utils.foreign_text import load_json_object
from ckptcore.utils.text import listed, short_repr

UNSAVED = "computed by the model, and left out by save_pretrained"  # why it is dropped
_DTYPES = ("dtype", "torch_dtype")  # transformers 5 writes the first, earlier ones the second
# Fields that count modules: each module has a tensor of its own, or a row of one.
_QUANTISATION = ("quantization_config", "compression_config")  # the second: older compressed-tensors
_COUNTS = re.compile(r"(?!max_)(?:|.*_)(?:layers?|experts?|blocks?|depth)")
_EXPERTS = re.compile(r"experts?$")
_OF_TOKEN = "num_experts_per_tok"  # transformers builds a model of any number, which fails when it runs
_ALWAYS_POSSIBLE = 1000  # of them: built on the meta device in a few seconds
_ALWAYS_TOGETHER = 1 << 16  # experts of all layers, also of a model of which only a part is exported
_SECONDS = 600  # building a model on the meta device takes a few


Shapes = dict[str, tuple[int, ...] | None]


@dataclass(frozen=True)
class ConfigFolder:
    """The small files of a model folder. url: of the folder. content: name -> bytes, with config.json."""

    url: str
    content: Mapping[str, bytes]

    @cached_property
    def form(self) -> dict[str, Any]:
        """Content of config.json; raises `InvalidText` if it is no JSON object."""
        return load_json_object(self.content["config.json"])

    @property
    def of_diffusers(self) -> bool:
        """Whether diffusers opens the model, and not transformers."""
        return is_of_diffusers(self.form)

    def files(self, dtype: str | None, *, plain: bool = False) -> dict[str, bytes]:
        """Return the files to publish.

        Args:
            dtype: For config.json, in place of any other one; None to keep it.
            plain: Whether quantised weights became values: config.json then has no quantisation.
        """
        out = dict(self.content)
        config = load_json_object(out["config.json"])
        changed = dtype is not None and sum(_name_dtype(part, dtype) for part in _with_nested(config)) > 0
        gone = plain and sum(_drop_quantisation(part) for part in [*_with_nested(config)]) > 0
        if changed or gone:
            out["config.json"] = _dumped(config)
        return out


@dataclass(frozen=True, slots=True)
class Expected:
    """What the model of a config expects of tensors that fit it.

    Attributes:
        ties: (name, name that shares its storage) of the model class.
        warnings: What was not compared.
        names: Name -> what `save_pretrained` of the model calls that tensor, where it is another name.
        inexact: Names of tensors that it does not write.
        model: Name of the class, or "".
        float32: bfloat16 and float16 -> names of tensors that stay in float32 in a model of that dtype; None
            where no model was asked.
        unsaved: Names of what the model computes itself, and `save_pretrained` leaves out.
    """

    ties: tuple[tuple[str, str], ...]
    warnings: tuple[Finding, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    inexact: tuple[str, ...] = ()
    model: str = ""
    float32: Mapping[str, Sequence[str]] | None = None
    unsaved: tuple[str, ...] = ()

    def require_exact(self, *, renaming: bool) -> None:
        """Require the names that `save_pretrained` writes.

        Args:
            renaming: Whether names that are only called otherwise will be the exact ones.

        Raises:
            NameMismatch: With those that are others.
        """
        inexact_names = [*self.inexact, *(() if renaming else self.names)]
        if not inexact_names:
            return
        exact = {name: self.names[name] for name in inexact_names if name in self.names}
        called = "; ".join(f"{name} is {right} there" for name, right in [*exact.items()][:1])
        raise NameMismatch(
            f"{listed(inexact_names)}: not what save_pretrained of {self.model} writes, though transformers "
            f"5 opens it; other readers do not{f' ({called})' if called else ''}",
            hint="--names stored keeps the names as they are; for those of the hub, save the model with "
            "save_pretrained",
            missing=[],
            inexact=inexact_names,
        )

    def kept_names(self) -> tuple[Finding, ...]:
        """Return the warning about names that stay others than those that `save_pretrained` writes."""
        inexact_names = [*self.inexact, *self.names]
        if not inexact_names:
            return ()
        message = f"{listed(inexact_names)}: not what save_pretrained of {self.model} writes"
        return (finding("fused-names", "coverage", message),)


def check_names(
    config: ConfigFolder, tensor_shapes: Mapping[str, tuple[int, ...] | None], arch: str = "auto"
) -> Expected:
    """Compare names and shapes with the model of a config.

    The installed transformers' own loader decides, which renames, stacks and splits
    (`ckptcore.planning.transformers_conversion`). Every tensor must be used once, and every parameter must
    get one value of its shape, or be tied. Names on the hub and names of the live model both fit:
    `Expected.require_exact` tells them apart.

    Args:
        config: With config.json.
        tensor_shapes: Name -> shape; None for one that is unknown, and not compared.
        arch: ``--arch``; of a config that names no class, it may be the class.

    Returns:
        Ties. A warning instead, without transformers, or for a model type that it does not know.

    Raises:
        NameMismatch: With the names that are missing, unexpected, of another shape, or cannot be combined.
        UsageError: transformers builds no model from the config, or would build too many modules.
    """
    library = "diffusers" if config.of_diffusers else "transformers"
    if find_spec(library) is None:
        hint = "pip install diffusers" if config.of_diffusers else "pip install 'ckptcore[hf]'"
        return _unchecked(f"{library} is not installed", hint, tensor_shapes)
    require_possible(
        config.form, f"--config {config.url}", (s for s in tensor_shapes.values() if s is not None)
    )
    answer = _ask_model(config, tensor_shapes, arch)
    if "rejected" in answer:
        raise UsageError(
            f"--config {config.url}: {library} builds no model from config.json: {answer['rejected']}",
            hint="name the folder of the model that was trained, or leave --config out",
        )
    if "unknown" in answer:
        hint = f"install a release of {library} that knows it, and retry the export"
        return _unchecked(answer["unknown"], hint, tensor_shapes)
    if "error" in answer:
        hint = f"check them by opening the result with {library}"
        return _unchecked(answer["error"], hint, tensor_shapes)
    shapes = [f"{n} {list(got)} (config says {list(right)})" for n, got, right in answer["shapes"]]
    kinds = {
        "missing": answer["missing"],
        "unexpected": answer["unexpected"],
        "other shape": shapes,
        "cannot be put together": answer["broken"],
    }
    parts = [f"{kind}: {listed(names)}" for kind, names in kinds.items() if names]
    if parts:
        wrapper = unneeded_prefix(answer["unexpected"], answer["missing"])
        raise NameMismatch(
            f"the checkpoint does not fit {answer['class']}: {'; '.join(parts)}",
            hint=f"add {remove_prefix(wrapper)}: its names begin with it, those of the model do not"
            if wrapper
            else None,
            missing=answer["missing"],
            unexpected=answer["unexpected"],
            shapes=[n for n, _, _ in answer["shapes"]],
            broken=answer["broken"],
        )
    ties = tuple((a, b) for a, b in answer["ties"])
    assumed = []
    if answer.get("assumed"):
        message = f"config.json names no class: the tensors are exactly those of {answer['class']}"
        assumed.append(finding("assumed-class", "coverage", message))
    return Expected(
        ties,
        tuple(assumed),
        answer["names"],
        tuple(answer["inexact"]),
        answer["class"],
        answer["float32"],
        tuple(answer["unsaved"]),
    )


def _ask_model(
    config: ConfigFolder, tensor_shapes: Mapping[str, tuple[int, ...] | None], arch: str = "auto"
) -> Answer:
    """Ask the model of a config; the dtype that the config names makes no other question."""
    form = deepcopy(config.form)
    asked: dict[str, Any]
    if config.of_diffusers:
        asked = {"config": form, "tensors": tensor_shapes}
        return ask_once("ckptcore.planning.diffusers_model", asked, seconds=_SECONDS)
    for part in _with_nested(form):
        for name in _DTYPES:
            part.pop(name, None)
    asked = {"config": form, "tensors": tensor_shapes}
    if not form.get("architectures") and arch.isidentifier() and not arch.islower():  # a class
        asked["class"] = arch
    return ask_once("ckptcore.planning.meta_model", asked, seconds=_SECONDS)


def plain_shapes(config: ConfigFolder, tensors: Sequence[TensorSpec]) -> Shapes:
    """Return the names of a model without its quantisation -> shape; None for packed weights.

    transformers builds quantised modules only with the libraries that compute with them, often only on their
    devices. A plain model has the weights that these modules describe. So each quantised weight counts as its
    weight, where the config states that its module is quantised, and what belongs to it is no name of the
    model.

    Raises:
        NameMismatch: The config states that a weight has a scale, and it has none.
    """
    shapes: Shapes = {t.fqn: t.shape for t in tensors}
    stated = quantization_of(config.form)
    if not stated.method:
        return shapes
    stored_names: set[str] = set()
    for weight in quantized_weights(tensors):
        if stated.ignores(weight.name):
            continue
        stored_names |= {*weight.stored}
        # Before the names are removed: a weight that is not packed is stored under its own.
        shape = None if weight.packed else shapes[weight.name]
        for name in weight.stored:
            shapes.pop(name, None)
        shapes[weight.name] = shape
    lost = [f.fqn for f in scaleless(tensors, stored_names, stated, ()) if f.fqn is not None]
    if lost:
        raise NameMismatch(
            f"--config {config.url} says that weights are quantised ({stated.method}), and no tensor is the "
            f"scale of {listed(lost)}",
            hint="name the config of these weights, or leave --config out",
            missing=lost,
        )
    return shapes


def exact_prefixes(config: ConfigFolder, tensor_shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the prefixes below which names are exactly those of a config's model, the shortest first.

    They are those of its files, or of the live model. There is none where transformers builds no model.

    Args:
        config: With config.json.
        tensor_shapes: Name -> shape.

    Raises:
        UsageError: transformers would build too many modules.
    """
    if find_spec("diffusers" if config.of_diffusers else "transformers") is None:
        return []
    require_possible(config.form, f"--config {config.url}", tensor_shapes.values())
    prefixes: list[str] = _ask_model(config, tensor_shapes).get("prefixes", [])
    return prefixes


def check_adapted(config: ConfigFolder | None, sizes: Mapping[str, tuple[int, ...]]) -> tuple[Finding, ...]:
    """Compare the sizes of the modules that an adapter changes with the model of a config.

    Args:
        config: Of the base model, None where none is known.
        sizes: Module -> shape of its weight, according to the adapter.

    Returns:
        A warning where nothing compares them.

    Raises:
        NameMismatch: The class has a module in another shape: its lora_B may be one rank's rows.
    """
    if not sizes:
        return ()
    if config is None:
        why = "neither the weights of the base model nor its config.json are beside the adapter"
        return _unchecked(why, "name the folder with both configs: --config DIR").warnings
    asked = {f"{module}.weight": size for module, size in sizes.items()}
    if all(_usual_size(config.form, name) == size for name, size in asked.items()):
        return ()
    if find_spec("transformers") is None:
        return _unchecked("transformers is not installed", "pip install 'ckptcore[hf]'").warnings
    require_possible(config.form, f"--config {config.url}", sizes.values())
    answer = _ask_model(config, asked)
    reason = next((answer[key] for key in ("rejected", "unknown", "error") if key in answer), None)
    if reason is not None:
        return _unchecked(reason, "open the result with peft").warnings
    odd = [f"{n} {list(got)} (config says {list(right)})" for n, got, right in answer["shapes"]]
    odd = [text for text, (_, got, right) in zip(odd, answer["shapes"], strict=True) if right != got[::-1]]
    if odd:
        raise NameMismatch(
            f"the adapter does not fit {answer['class']} of {config.url}: {listed(odd)}",
            hint="its files may be one rank's: name all of them; or name the right config with --config",
            shapes=[name for name, _, _ in answer["shapes"]],
        )
    return ()


def _usual_size(form: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    """Return the shape that a weight with this name has in Llama and its relatives, where a config tells."""
    sizes = [form.get(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads")]
    width, inner, heads = (n if type(n) is int else 0 for n in sizes)
    head = form.get("head_dim") or width // max(heads, 1)
    groups = form.get("num_key_value_heads", heads)
    if min(width, inner, heads) < 1 or type(head) is not int or type(groups) is not int:
        return None
    ends = {
        "q_proj": (heads * head, width),
        "k_proj": (groups * head, width),
        "v_proj": (groups * head, width),
        "o_proj": (width, heads * head),
        "gate_proj": (inner, width),
        "up_proj": (inner, width),
        "down_proj": (width, inner),
    }
    return ends.get(name.removesuffix(".weight").rpartition(".")[2])


def require_possible(form: Mapping[str, Any], label: str, shapes: Iterable[tuple[int, ...]]) -> None:
    """Require that a checkpoint can have a tensor, or a row of one, for every module of a config.

    transformers would build all of them, whatever time and memory that takes. Each layer has a tensor, and
    each of its experts has one, or a row of the layer's router.

    Args:
        form: Content of config.json.
        label: Name of the config, for the error.
        shapes: Of the checkpoint's tensors, elements.

    Raises:
        UsageError: The config counts more modules, or its counts multiplied do; or a token would visit more
            experts than there are.
    """
    rows = [max(shape, default=1) if all(shape) else 0 for shape in shapes]
    most, together = max([len(rows), *rows]), max(sum(rows), _ALWAYS_TOGETHER)
    for part in _with_nested(dict(form)):
        counts = {name: count for name, count in part.items() if _is_count(name, count)}
        name = max(counts, key=counts.__getitem__, default="")
        if name and counts[name] > max(most, _ALWAYS_POSSIBLE):
            raise UsageError(
                f"{label}: config.json says {name} = {short_repr(counts[name])}, "
                f"the checkpoint has {most} at most",
                hint="name the folder of the model that was trained, or leave --config out",
            )
        layers = max((n for name, n in counts.items() if not _EXPERTS.search(name)), default=1)
        experts = max((n for name, n in counts.items() if _EXPERTS.search(name)), default=1)
        if max(layers, 1) * max(experts, 1) > together:
            raise UsageError(
                f"{label}: config.json says {short_repr(layers)} layers of {short_repr(experts)} experts, "
                f"the checkpoint's tensors have {together} rows",
                hint="name the folder of the model that was trained, or leave --config out",
            )
        of_token = part.get(_OF_TOKEN)
        if experts > 1 and isinstance(of_token, int) and not 1 <= of_token <= experts:
            raise UsageError(
                f"{label}: config.json says {_OF_TOKEN} = {short_repr(of_token)}, which must be from 1 to "
                f"{short_repr(experts)}, its experts",
                hint="name the folder of the model that was trained, or leave --config out",
            )


def _is_count(name: str, value: object) -> bool:
    """Return whether a field of a config counts modules."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    return number and _COUNTS.fullmatch(name) is not None


def _dumped(config: dict[str, Any]) -> bytes:
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair has no bytes, but as an escape
        return (json.dumps(config, indent=2) + "\n").encode()


def _with_nested(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a config and those of its parts: text_config, vision_config, ....

    transformers loads with the dtype of the outer config. If that has none, vLLM uses the text model's.
    """
    yield config
    for name, part in config.items():
        if isinstance(part, dict) and name.endswith("_config") and name not in _QUANTISATION:
            yield from _with_nested(part)


def _drop_quantisation(part: dict[str, Any]) -> bool:
    """Remove the quantisation from a part of a config; return whether it had one."""
    return sum(part.pop(name, None) is not None for name in _QUANTISATION) > 0


def _name_dtype(part: dict[str, Any], dtype: str) -> bool:
    """Set the dtype of a part of a config; return whether it had another one."""
    changes = {k: dtype for k in _DTYPES if isinstance(part.get(k), str) and part[k] not in (dtype, "auto")}
    part |= changes
    return bool(changes)


def _unchecked(reason: str, hint: str, names: Collection[str] = ()) -> Expected:
    note, advice = note_of_wrapper(names)
    message = f"names and shapes were not checked against the model: {reason}{note}"
    next_step = f"{hint}; or add {advice}" if advice else hint
    return Expected((), (finding("names-unchecked", "coverage", message, hint=next_step),))
