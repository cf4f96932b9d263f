"""The model of a config.json, on the meta device: do an export's names and shapes fit it?

Run as ``python -m ckptcore.planning.meta_model`` with JSON on standard input: ``{"config": what config.json
holds, "tensors": {name: shape}}``; prints JSON. A process of its own, so that transformers' memory is given
back before any bytes move. No code from the config is run (``trust_remote_code`` stays off), nothing is
fetched, and no weight is allocated.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptcore.planning.transformers_conversion import ModelMismatch, compare


def describe(content: dict[str, Any], tensors: dict[str, list[int]]) -> dict[str, Any]:
    """The model's class, and the `ModelMismatch` of holding tensors against it; or why there is none.

    ``unknown`` instead: the installed transformers has no such model. ``rejected``: it builds none from
    this config. ``error``: it cannot say, for want of another library.
    """
    import transformers

    library: Any = transformers  # ships no complete types
    library.logging.set_verbosity_error()
    kind = content.get("model_type")
    if isinstance(kind, str) and kind not in library.CONFIG_MAPPING:
        return {"unknown": f"transformers {library.__version__} knows no model type {kind!r}"}
    try:
        model = built(content)
    except ImportError as error:  # of a library that only this model needs
        return {"error": _brief(error)}
    except Exception as error:  # any failure of a third-party model class says that the config is not for it
        return {"rejected": _brief(error)}
    own = {name: tuple(t.shape) for name, t in model.state_dict().items() if hasattr(t, "shape")}
    try:
        outcome = compare(model, {name: tuple(shape) for name, shape in tensors.items()})
    except Exception as error:  # the export's fault where the loader takes what the model itself has
        compare(built(content), own)
        outcome = ModelMismatch(broken=[_brief(error)])
    return {"class": type(model).__name__} | outcome.as_dict()


def built(content: Mapping[str, Any]) -> Any:
    """The model of a config.json, on the meta device; raises what transformers raises."""
    import torch
    import transformers

    library: Any = transformers
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    cls = getattr(library, names[0], None) if names else None
    with torch.device("meta"):
        return (
            cls._from_config(config) if cls is not None else library.AutoModelForCausalLM.from_config(config)
        )


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def main() -> None:
    """Answers on standard output; an error becomes ``{"error": text}``."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        asked = json.load(sys.stdin)
        answer = describe(asked["config"], asked["tensors"])
    except Exception as error:  # of transformers' loader, whose inside may change with any version
        answer = {"error": _brief(error)}
    json.dump(answer, answers)
    answers.flush()


if __name__ == "__main__":
    main()
