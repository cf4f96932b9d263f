"""Read what a checkpoint itself stores about its training.

Trainers save their state beside the tensors: the Trainer of transformers `trainer_state.json`, Lightning its
hyperparameters and metrics, Megatron its arguments, OLMo its config and counters. The readers below take what
the manifest holds already, and few small files that are known to be there. Nothing here can fail a
conversion, whose output is published by then: what cannot be read is logged and left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

from ckptcore.catalog.training import TrainingFacts, measured, read_facts
from ckptcore.core.manifest import Manifest
from ckptcore.core.object_tree import Named, Refused, TensorRef, decode
from ckptcore.errors import CkptError
from ckptcore.store import open_store
from ckptcore.utils.foreign_text import InvalidText, load_json, parsing
from ckptcore.utils.plain_yaml import load_yaml

MAX_FILE = 32 << 20  # bytes; the log in a trainer_state.json grows with the run
_MOST_LOGGED = 200_000  # entries of such a log that are read
_log = logging.getLogger("ckptcore")

Form = dict[str, Any]


def stored_facts(manifest: Manifest) -> TrainingFacts:
    """Return the facts about the training that a checkpoint stores; empty if there are none."""
    try:
        with parsing("facts about a training"):
            facts, left_out = read_facts(_merged(manifest))
    except InvalidText as error:
        _log.warning("facts about the training in %s are left out: %s", manifest.root, error)
        return TrainingFacts()
    if left_out:
        _log.info("facts about the training in %s are left out: %s", manifest.root, "; ".join(left_out))
    return facts


def _merged(manifest: Manifest) -> Form:
    form: Form = {}
    for part in _parts(manifest):
        for key, value in part.items():
            if isinstance(value, dict) and isinstance(form.get(key), dict):
                form[key] = {**value, **form[key]}
            else:
                form.setdefault(key, value)
    return form


def _parts(manifest: Manifest) -> Iterator[Form]:
    """Yield forms of facts, the most specific first."""
    for name, read in _OBJECTS:
        try:
            with parsing(name):
                facts = read(_Objects(manifest))
        except (CkptError, InvalidText) as error:
            _log.warning("cannot read %s of %s: %s", name, manifest.root, error)
            continue
        if facts:
            yield facts
    for path, read_bytes in _FILES:
        data = _file(manifest, path)
        if data is None:
            continue
        try:
            with parsing("a trainer's file"):
                yield read_bytes(data)
        except InvalidText as error:
            _log.warning("cannot read %s of %s: %s", path, manifest.root, error)


class _Objects:
    """The objects of a manifest by name, decoded when they are asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self._trees = {b.key: b.tree for b in manifest.blobs if b.known}
        self.format = manifest.format

    def __call__(self, key: str) -> Any:
        """Return a value by its dotted name, or None."""
        if key in self._trees:
            return _bare(decode(self._trees[key]))
        above, _, name = key.rpartition(".")
        value = self(above) if above else None
        return value.get(name) if isinstance(value, Mapping) else None


def _bare(value: Any) -> Any:
    """Return plain values: names such as dtypes become texts, tensors their names."""
    if isinstance(value, Named):
        return _bare(value.value)
    if isinstance(value, TensorRef | Refused):
        return f"tensor {value.fqn}" if isinstance(value, TensorRef) else f"not read: {value.name}"
    if isinstance(value, Mapping):
        return {k: _bare(v) for k, v in value.items()}
    return [_bare(v) for v in value] if isinstance(value, list | tuple) else value


def _trainer(of: _Objects) -> Form:
    state = of("trainer_state")
    return _of_trainer_state(state) if isinstance(state, Mapping) else {}


def _of_trainer_state(state: Mapping[str, Any]) -> Form:
    """Return the facts of the Trainer's state: the last value of each metric up to the saved step.

    transformers, trainer_callback.py, `TrainerState`: log_history holds a dict for each logged step.
    """
    if "global_step" not in state and "log_history" not in state:
        return {}
    last = state.get("global_step")
    metrics: Form = {}
    log = state.get("log_history")
    for entry in log[-_MOST_LOGGED:] if isinstance(log, list) else ():
        if not isinstance(entry, Mapping):
            continue
        step = entry.get("step")
        if isinstance(step, int) and isinstance(last, int) and step > last:
            continue
        for name, value in entry.items():
            if name not in ("step", "epoch") and measured(value) is not None:
                metrics[str(name)] = {"value": value, "step": step}
    best = state.get("best_metric")
    if measured(best) is not None:
        metrics.setdefault("best_metric", best)
    rest = {n: state[n] for n in ("max_steps", "num_train_epochs", "best_model_checkpoint") if state.get(n)}
    return {
        "framework": "transformers",
        "epoch": state.get("epoch"),
        "tokens": state.get("num_input_tokens_seen") or None,
        "metrics": metrics,
        "extra": rest,
    }


def _lightning(of: _Objects) -> Form:
    """lightning, trainer/connectors/checkpoint_connector.py, `dump_checkpoint`."""
    if of("global_step") is None or (of("loops") is None and of("pytorch-lightning_version") is None):
        return {}
    metrics: Form = {}
    for name, value in _items(of("callback_metrics")):
        if measured(value) is not None:
            metrics[name] = value
    for callback, state in _items(of("callbacks")):
        monitor = state.get("monitor") if isinstance(state, Mapping) else None
        if not callback.startswith("ModelCheckpoint") or not isinstance(monitor, str):
            continue
        if measured(state.get("current_score")) is not None:
            metrics.setdefault(monitor, state["current_score"])
    config = of("hyper_parameters")
    return {
        "framework": "lightning",
        "epoch": of("epoch"),
        "metrics": metrics,
        "config": config if isinstance(config, Mapping) else None,
    }


def _megatron(of: _Objects) -> Form:
    """Megatron-LM, training/checkpointing.py, `generate_state_dict`: args is a namespace."""
    args = of("args")
    if not isinstance(args, Mapping) or not {"num_layers", "hidden_size"} & set(args):
        return {}
    samples, length = args.get("consumed_train_samples"), args.get("seq_length")
    is_countable = isinstance(samples, int) and isinstance(length, int)
    tokens = samples * length if is_countable else 0  # type: ignore[operator]  # both are integers
    data = args.get("data_path")
    return {
        "framework": "megatron",
        "samples": samples,
        "tokens": tokens or None,
        "dataset": " ".join(map(str, data)) if isinstance(data, list | tuple) else data,
        "config": dict(args),
    }


def _olmo(of: _Objects) -> Form:
    """OLMo, train.py, `trainer_state_dict`; OLMo-core, train/trainer.py, `state_dict`."""
    if of("train.global_step") is None:
        return {}
    tokens, loader = of("train.global_train_tokens_seen"), of("train.data_loader")
    epoch = loader.get("epoch") if isinstance(loader, Mapping) else of("train.epoch")
    return {
        "framework": "olmo",
        "epoch": epoch,
        "tokens": tokens,
        "samples": of("train.global_train_examples_seen_this_epoch"),
    }


def _deepspeed(of: _Objects) -> Form:
    """DeepSpeed, runtime/engine.py, `_save_checkpoint`."""
    samples = of("global_samples")
    if samples is None or of("ds_version") is None:
        return {}
    config = of("ds_config")
    return {
        "framework": "deepspeed",
        "samples": samples,
        "config": config if isinstance(config, Mapping) else None,
    }


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    for name, stored in value.items() if isinstance(value, Mapping) else ():
        yield str(name), stored


def _json_state(data: bytes) -> Form:
    state = load_json(data)
    return _of_trainer_state(state) if isinstance(state, Mapping) else {}


def _olmo_core_config(data: bytes) -> Form:
    """OLMo-core, train/callbacks/config_saver.py. A hub's config has the same name, and none of its keys."""
    config = load_json(data)
    is_config = isinstance(config, dict) and {"trainer", "train_module", "data_loader"} & set(config)
    return {"config": config} if is_config else {}


def _yaml_config(data: bytes) -> Form:
    config = load_yaml(data)
    if not isinstance(config, dict):
        return {}
    return {"config": config, "extra": {"run_name": config["run_name"]} if config.get("run_name") else {}}


def _file(manifest: Manifest, path: str) -> bytes | None:
    """Return a small file of the checkpoint, or None if it is not among its listed files."""
    if manifest.origin.get("file") is not None:
        return None
    sizes = {f.path: f.size for f in (*manifest.files, *manifest.beside)}
    size = sizes.get(path)
    if not size:
        return None
    if size > MAX_FILE:
        _log.warning("%s of %s is not read: it has more than %d bytes", path, manifest.root, MAX_FILE)
        return None
    try:
        with closing(open_store(manifest.root)) as store:
            return bytes(store.read(path, 0, size))
    except CkptError as error:
        _log.warning("cannot read %s of %s: %s", path, manifest.root, error.message)
        return None


_OBJECTS: tuple[tuple[str, Callable[[_Objects], Form]], ...] = (
    ("the Trainer's state", _trainer),
    ("Lightning's state", _lightning),
    ("Megatron's arguments", _megatron),
    ("OLMo's trainer state", _olmo),
    ("DeepSpeed's state", _deepspeed),
)
_FILES: tuple[tuple[str, Callable[[bytes], Form]], ...] = (
    ("trainer_state.json", _json_state),
    ("config.yaml", _yaml_config),  # OLMo
    ("config.json", _olmo_core_config),
    ("run_config.yaml", _yaml_config),  # Megatron-Bridge
)
