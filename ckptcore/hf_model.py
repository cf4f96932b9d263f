"""The model of a config.json, on the meta device: which tensors, which shapes, which are tied?

Run as ``python -m ckptcore.hf_model`` with config.json on standard input; prints JSON. A process of
its own, so that transformers' memory is given back before any bytes move. No code from the
config is run (``trust_remote_code`` stays off) and nothing is fetched.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any


def describe(config_json: bytes) -> dict[str, Any]:
    """class, tensors {name: shape}, ties [(name, kept name)], optional names, renamed patterns."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    library: Any = transformers  # ships no complete types
    library.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config_json)
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    cls = getattr(library, names[0], None) if names else None
    with torch.device("meta"):
        model: Any = (
            cls._from_config(config) if cls is not None
            else library.AutoModelForCausalLM.from_config(config)
        )  # fmt: skip
    tensors = {name: list(t.shape) for name, t in model.state_dict().items()}
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or []
    return {
        "class": type(model).__name__,
        "tensors": tensors,
        "ties": _ties(model, config, tensors),
        "optional": [n for n in tensors if any(re.search(p, n) for p in ignored)],
        "renamed": _renamed(config, model),
    }


def _ties(model: Any, config: Any, tensors: dict[str, Any]) -> list[tuple[str, str]]:
    """(dropped, kept) names that share a storage when the config ties them."""
    keys = getattr(model, "all_tied_weights_keys", None)
    if isinstance(keys, dict) and keys:  # transformers 5: already resolved for this config
        return [(a, b) for a, b in keys.items() if a in tensors and b in tensors]
    if not getattr(config, "tie_word_embeddings", False):
        return []
    shared = getattr(model, "_tied_weights_keys", None) or []
    if isinstance(shared, dict):
        return [(a, b) for a, b in shared.items() if a in tensors and b in tensors]
    kept = next((n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
    return [(a, kept) for a in shared if kept and a in tensors]


def _renamed(config: Any, model: Any) -> list[str]:
    """Patterns of names that transformers converts while loading, on either side."""
    try:
        library: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # before transformers 5
        return []
    found: list[str] = []
    for rule in library.get_checkpoint_conversion_mapping(config.model_type) or []:
        for side in ("source_patterns", "target_patterns"):
            value = getattr(rule, side, None) or []
            found += [value] if isinstance(value, str) else list(value)
    return found


def main() -> None:
    """Answers on standard output; an error becomes ``{"error": text}``."""
    try:
        answer = describe(sys.stdin.buffer.read())
    except Exception as error:  # any failure of a third-party model class is an answer here
        answer = {"rejected": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
