"""Say by its layers why a file alone may be one part of a model, where its name states nothing.

Writers cut a model between two tensors: in the order of its modules (embedding, layers, last norm, head), or
in the order of names. What is left then ends inside the layers. A complete model has layers without a gap, a
tensor before them, one behind them (a norm or a head), and one that follows them by name or in the file: in
GPT-NeoX's names, where ``final_layer_norm`` comes before ``layers``, nothing else shows that the last layers
are there. A config that states how many layers there are decides.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ckptcore.formats.base import natural
from ckptcore.naming.moments import state_of

Fact = TypeVar("Fact")  # about a tensor
_BLOCK = 4  # tensors that a block of a model has at least, if they are not of modules in it
_NUMBERED = re.compile(r"^(.*?(?:^|\.)(?:layers?|(?:res)?blocks?|h)\.)(\d{1,6})\.(.+)$")
# Words of modules behind the layers of models of any kind, and of those before them: a norm of embeddings.
_BEHIND = re.compile(
    r"(?i)norm|(?:^|_)ln(?:_|$)|head|(?:^|_|read)out(?:put)?(?:s|_|$)|classif|cls|score|pool|logit|predict"
    r"|final|(?:^|_)fc|unembed|merger"
)
_BEFORE = re.compile(r"(?i)(?<!un)emb(?!ed_out)|wte|wpe|token|(?:^|_)pre(?:_|$)")
_DIGITS = re.compile(r"\d+")
_BUFFER = re.compile(r"(?i)rotary|rope|freqs|mask")
# What language models have outside of their layers, in the names of the hub, Meta, Megatron and OLMo.
_END = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|wte|wpe|embed_in|embed_out|lm_head|ln_f"
    r"|final_layer_?norm|norm|output_layer|output)\.(?:weight|bias)$"
)
_HEAD = re.compile(r"lm_head\.weight$|^output\.weight$")  # the latter of Meta, Mistral and torchtune
# In torchtune's own names (torchtune/modules/transformer.py), which it saves without a config beside them.
_TORCHTUNE = frozenset({"sa_norm.scale", "mlp_norm.scale"})
# Fields of the configs of transformers, diffusers and Meta.
_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
# A norm follows the last layer in Llama and its relatives.
_LIKE_LLAMA = frozenset({"self_attn.o_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"})


class ModelLayers:
    """The layers in a file, and what is outside of them.

    Args:
        names: The tensors, in their order in the file.

    >>> names = ["embed.w", *(f"layers.{n}.{k}" for n in range(4) for k in "qkvo"), "norm.w"]
    >>> [ModelLayers(names[a:b]).gap() for a, b in ((0, 18), (5, 18), (0, 16))]
    [None, 'layers.0.k', 'layers.3.o']
    >>> [ModelLayers(names[a:b]).open_end({}) for a, b in ((0, 18), (1, 18), (0, 17))]
    [None, 'no tensor is before the layers', 'no norm or head is behind layers.3']
    """

    def __init__(self, names: Iterable[str]) -> None:
        # An optimizer has states of what is trained, which may be some layers.
        self._places = {name: n for n, name in enumerate(names) if state_of(name) is None}
        containers = layers_of(dict.fromkeys(self._places, ""))
        self._blocks = {c: layers for c, layers in containers.items() if _are_blocks(layers)}
        inside = {f"{c}{n}.{k}" for c, layers in self._blocks.items() for n in layers for k in layers[n]}
        self._outside = [name for name in self._places if name not in inside and not _BUFFER.search(name)]

    @property
    def are_several(self) -> bool:
        """Whether the file has layers, or only what language models have outside of them."""
        return bool(self._blocks) or self._are_ends()

    def _are_ends(self) -> bool:
        return bool(self._places) and all(_END.search(name) for name in self._places)

    def gap(self) -> str | None:
        """Return a tensor that the numbers of layers imply and that is not there; None without one.

        Numbers begin at 0 and have no gaps, and what all other layers have is in the first one and in the
        last. Modules of an ``nn.Sequential``, which are numbered with those without weights, have fewer
        tensors.
        """
        for container, layers in self._blocks.items():
            usual, most = Counter(frozenset(layer) for layer in layers.values()).most_common(1)[0]
            absent = next((n for n in range(len(layers)) if n not in layers), None)
            if absent is not None:
                return f"{container}{absent}.{min(usual)}"
            for number in (0, len(layers) - 1):
                layer = layers[number].keys()
                if most > 1 and most == len(layers) - 1 and layer < usual:
                    return f"{container}{number}.{min(usual - layer)}"
        return None

    def stated_beyond(self, config: Mapping[str, Any]) -> str | None:
        """Return the first layer that a config states and that no model in the file has; None without one."""
        counts = _layer_counts(config)
        if len(counts) != 1 or not self._blocks:
            return None
        container, layers = max(self._blocks.items(), key=lambda item: len(item[1]))
        return f"{container}{len(layers)}" if len(layers) < min(counts) else None

    def are_all(self, config: Mapping[str, Any]) -> bool:
        """Return whether a config states as many layers as there are, between two closed ends."""
        counts = _layer_counts(config)
        is_counted = bool(self._blocks) and all(len(layers) in counts for layers in self._blocks.values())
        return is_counted and self.gap() is None and self.open_end(config) is None

    def continuing(self, names: Collection[str]) -> str | None:
        """Return one of other tensors that belongs to the same model; None where none does.

        Its name is that of a tensor in other layers or experts, or of what is before or behind these layers.

        Args:
            names: The tensors of another file.

        >>> layers = ModelLayers(f"layers.{n}.{k}" for n in range(2) for k in "qkvo")
        >>> [layers.continuing([name]) for name in ("layers.2.q", "norm.weight", "layers.1.q", "heads.0.q")]
        ['layers.2.q', 'norm.weight', None, None]
        """
        if not self._blocks or not self._places.keys().isdisjoint(names):
            return None
        patterns = {_DIGITS.sub("#", name) for name in self._places}
        numbered = [name for name in names if _DIGITS.sub("#", name) in patterns]
        # A file with other names beside a norm or a head is another model, or the same in other names.
        if not numbered and all(self._is_end(name) for name in names):
            numbered = list(names)
        return min(numbered, key=natural, default=None)

    def _is_end(self, name: str) -> bool:
        """Return whether a tensor is before or behind layers, in a module that has these."""
        end = _END.search(name)
        return end is not None and any(c.startswith(name[: end.start()]) for c in self._blocks)

    def open_end(self, config: Mapping[str, Any]) -> str | None:
        """Return why tensors before or behind the layers may not be there; None where something shows them.

        Args:
            config: Of the model; {} without one.
        """
        if not self._blocks:
            return "it has no layers" if self._are_ends() else None
        counts = _layer_counts(config)
        closed = set(self._closed())
        behind = [name for name in self._outside if _behind(name) is not None]
        for container, layers in self._blocks.items():
            is_counted = len(layers) in counts
            if is_counted and not any(layer.keys() >= _LIKE_LLAMA for layer in layers.values()):
                continue  # not every model has a norm behind its layers
            last = f"{container}{max(layers)}"
            if container not in closed:
                return f"no norm or head is behind {last}"
            if len(behind) == len(self._outside):
                return "no tensor is before the layers"
            if not is_counted and not self._is_followed(container, layers):
                return f"no name is behind {last}"
            if not is_counted and any(layer.keys() >= _TORCHTUNE for layer in layers.values()):
                return f"nothing states that {last} is the last layer"
        if _has_head(config) and not any(_HEAD.search(name) for name in self._outside):
            return "lm_head.weight is not there, and the config has it"
        return None

    def _is_followed(self, container: str, layers: Mapping[int, Mapping[str, str]]) -> bool:
        """Return whether a tensor outside of the layers comes behind all of a container, by name or place."""
        last = max(layers)
        last_name = max(natural(f"{container}{last}.{k}") for k in layers[last])
        last_place = max(self._places[f"{container}{n}.{k}"] for n in layers for k in layers[n])
        return any(natural(n) > last_name or self._places[n] > last_place for n in self._outside)

    def _closed(self) -> Iterator[str]:
        """Yield the containers that a norm or a head is behind: it is in a module that has the container."""
        modules = {_behind(name) for name in self._outside}
        for container in self._blocks:
            path = container.removesuffix(".").split(".")
            if any(".".join(path[:n]) in modules for n in range(len(path) + 1)):
                yield container


def layers_of(tensors: Mapping[str, Fact]) -> dict[str, dict[int, dict[str, Fact]]]:
    """Return what is before a layer's number -> number -> name in the layer -> fact, such as the file."""
    containers: dict[str, dict[int, dict[str, Fact]]] = {}
    for name, fact in tensors.items():
        match = _NUMBERED.match(name)
        if match:
            layers = containers.setdefault(match[1], {})
            layers.setdefault(int(match[2]), {})[match[3]] = fact
    return containers


def _are_blocks(layers: Mapping[int, Mapping[str, str]]) -> bool:
    """Return whether layers are blocks of modules, not modules that have a weight and a bias themselves.

    A part may hold the last tensors of one block: ``mlp.down_proj.weight``, or a norm.
    """
    return any(
        len(layer) >= _BLOCK or any(k.count(".") > 1 or "norm." in k for k in layer)
        for layer in layers.values()
    )


def _behind(name: str) -> str | None:
    """Return the module that has a norm or a head behind its layers; None for another tensor.

    >>> [_behind(n) for n in ("model.norm.weight", "cls.predictions.bias", "projector.norm.weight")]
    ['model', '', 'projector']
    >>> [_behind(n) for n in ("bert.embeddings.LayerNorm.weight", "wte.weight")]
    [None, None]
    """
    path = name.split(".")
    for n, module in enumerate(path):
        if _BEFORE.search(module):
            return None
        if _BEHIND.search(module):
            return ".".join(path[:n])
    return None


def _layer_counts(config: Mapping[str, Any]) -> set[int]:
    """Return the numbers of layers in a config, and in those of the models inside it."""
    forms = [config, *(form for form in config.values() if isinstance(form, dict))]
    return {form[key] for form in forms for key in _COUNTS if type(form.get(key)) is int}


def _has_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config is of a language model with output weights of its own."""
    classes = config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return config.get("tie_word_embeddings") is False and any(n.endswith("ForCausalLM") for n in names)


def torn_layers(layers: Mapping[int, Collection[str]]) -> Iterator[tuple[int, str]]:
    """Yield (layer, name) of a tensor that a layer lacks: its names are some of those of another layer.

    Layers of two kinds, such as dense ones and those with experts, each have names of their own.

    Args:
        layers: Number -> names of its tensors, behind the number.

    >>> list(torn_layers({0: ["q", "k"], 1: ["q"], 2: ["experts"]}))
    [(1, 'k')]
    """
    kinds = {frozenset(names) for names in layers.values()}
    fuller = {kind: min((k for k in kinds if kind < k), key=sorted, default=kind) for kind in kinds}
    for number, names in sorted(layers.items()):
        lost = fuller[frozenset(names)] - frozenset(names)
        if lost:
            yield number, min(lost)
