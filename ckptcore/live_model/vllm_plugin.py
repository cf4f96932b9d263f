"""Load a checkpoint of any format into vLLM, without an export between (``--load-format ckptcore``).

vLLM calls `register` in each of its processes, by the entry point in the group ``vllm.general_plugins``.
``--model`` is the folder of the model's config.json and tokenizer. ``--model-loader-extra-config`` may have:

- ``source``: path or URL of the checkpoint, or a list of the folders that hold it; without it, ``--model``.
- ``config``, ``names``, ``arch``, ``model_prefix``: as for an export. The config is the engine's.
- ``fingerprint``: true fingerprints what is loaded; see `Fingerprinting`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckptcore.core.manifest import TensorSpec
from ckptcore.errors import CkptError, UsageError
from ckptcore.fingerprints.result import Fingerprints
from ckptcore.live_model.exported_tensors import ExportedTensors, open_tensors
from ckptcore.live_model.fingerprint_engine import fingerprint_engine
from ckptcore.planning.request import Request
from ckptcore.store.merged import source_url
from ckptcore.utils.near_names import did_you_mean
from ckptcore.utils.text import listed

LOAD_FORMAT = "ckptcore"
_OF_EXPORT = ("config", "names", "arch", "model_prefix")
_HINT = "ask for the fingerprint of what was loaded: loaded=True"
_loaded: WeakKeyDictionary[Any, _Loaded] = WeakKeyDictionary()  # by model


def register() -> None:
    """Register the load format. A process of vLLM calls this, and no other: it imports vLLM."""
    import vllm.model_executor.model_loader as loaders  # type: ignore[import-not-found, unused-ignore]

    loaders.register_model_loader(LOAD_FORMAT)(loader_class(loaders.DefaultModelLoader))


def loader_class(base: Any) -> Any:
    """Return the loader. base: vLLM's loader of files, which iterates over tensors, and counts them."""

    class CkptcoreLoader(base):  # type: ignore[misc]
        """vLLM's own loader, with the tensors of an export in place of those of files."""

        def __init__(self, load_config: Any) -> None:
            options = load_config.model_loader_extra_config
            require_options(options)
            load_config.model_loader_extra_config = {}  # those that the base class does not refuse
            try:
                super().__init__(load_config)
            finally:
                load_config.model_loader_extra_config = options

        def download_model(self, model_config: Any) -> None:
            """Refuse what cannot be loaded. There is nothing to download."""
            with open_tensors(request_of(self.load_config, model_config)):
                pass

        def load_model(self, *arguments: Any, **named: Any) -> Any:
            """Load a model, and note which weights the engine rearranges behind that."""
            model = super().load_model(*arguments, **named)
            if model in _loaded:
                _loaded[model] = _loaded[model].noting_changes_of(model)
            return model

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Load all weights, and fingerprint them where that is asked for."""
            with open_tensors(request_of(self.load_config, model_config)) as tensors:
                self._tensors: ExportedTensors = tensors
                super().load_weights(model, model_config)
                if not tensors.are_proven:  # an iteration that was left early has verified no more
                    raise UsageError(f"cannot load {model_config.model}: vLLM left out tensors of it")
                if self.load_config.model_loader_extra_config.get("fingerprint"):
                    _loaded[model] = _Loaded(tensors.specs, fingerprint_engine(model, tensors.specs))

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            """Yield the tensors. The base class asks for them while it loads."""
            self.counter_before_loading_weights = time.perf_counter()
            yield from self._tensors

    return CkptcoreLoader


@dataclass(frozen=True)
class _Loaded:
    """What was loaded into a model.

    Attributes:
        specs: The tensors of the files.
        fingerprints: Of what the model held before the engine rearranged it.
        rearranged: Why the model is not comparable since then, or None.
    """

    specs: Sequence[TensorSpec]
    fingerprints: Fingerprints
    rearranged: CkptError | None = None

    def noting_changes_of(self, model: Any) -> _Loaded:
        """Return it with what the engine has done to a model that nothing else has changed."""
        try:
            names = fingerprint_engine(model, self.specs).differing(self.fingerprints)
        except CkptError as error:  # it removes weights that it keeps in another form
            return replace(self, rearranged=error)
        if not names:
            return self
        reason = f"vLLM has rearranged {listed(names)} after loading"
        return replace(
            self, rearranged=UsageError(f"cannot fingerprint: not comparable: {reason}", hint=_HINT)
        )


class Fingerprinting:
    """What each worker gets by ``--worker-extension-cls ckptcore.live_model.vllm_plugin.Fingerprinting``."""

    get_model: Any

    def ckptcore_fingerprint(self, *, loaded: bool = False) -> dict[str, Any]:
        """Return the fingerprint of the engine's weights, as `Fingerprints.as_dict` has it.

        Call it with ``collective_rpc``: all ranks exchange their sums, and return the same.

        Args:
            loaded: What was loaded, instead of what is in memory now.

        Raises:
            UsageError: It is not comparable: the engine has rearranged weights, or began without the option
                ``fingerprint``.
        """
        model = self.get_model()
        if model not in _loaded:
            raise UsageError(
                "cannot fingerprint: what this engine loaded was not fingerprinted",
                hint=f'start it with --load-format {LOAD_FORMAT}, and {{"fingerprint": true}} for its loader',
            )
        loaded_model = _loaded[model]
        if loaded:
            return loaded_model.fingerprints.as_dict()
        if loaded_model.rearranged is not None:
            raise loaded_model.rearranged
        return fingerprint_engine(model, loaded_model.specs).as_dict()


def require_options(options: Any) -> None:
    """Require that ``--model-loader-extra-config`` has options of this loader, and no others."""
    texts = {"source": (str, list), "fingerprint": bool, **dict.fromkeys(_OF_EXPORT, str)}
    if not isinstance(options, Mapping):
        raise UsageError(f"--model-loader-extra-config must be a JSON object (got {options!r})")
    for name, value in options.items():
        if name not in texts:
            raise UsageError(
                f"--model-loader-extra-config has no option {name!r} for the load format {LOAD_FORMAT}",
                hint=did_you_mean(name, texts, f"options are {', '.join(texts)}"),
            )
        if not isinstance(value, texts[name]):  # type: ignore[arg-type]
            raise UsageError(
                f"{name} in --model-loader-extra-config must have another type (got {type(value).__name__})"
            )


def request_of(load_config: Any, model_config: Any) -> Request:
    """Return the export whose tensors an engine loads.

    Args:
        load_config: vLLM's `LoadConfig`.
        model_config: vLLM's `ModelConfig`: its folder, and that of its config where it is another one.
    """
    options = load_config.model_loader_extra_config
    source = options.get("source", model_config.model)
    # The config that the engine runs decides names, too.
    config = model_config.hf_config_path or (model_config.model if "source" in options else None)
    fields = {"config": config, **{name: options[name] for name in _OF_EXPORT if name in options}}
    return Request(source_url(source), "memory://vllm", verb="export", **fields)
