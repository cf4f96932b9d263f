"""Build the model of a config.json on the meta device, and compare an export's names and shapes with it.

The module runs in a process of its own (`ckptcore.planning.transformers_process`). Its input is
``{"config": content of config.json, "tensors": {name: shape, or null}}``. No weight is allocated.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptcore.planning.transformers_conversion import ModelMismatch, compare
from ckptcore.planning.transformers_process import LOCAL, Answer, brief, quiet_transformers, serve


def describe(content: dict[str, Any], tensors: Mapping[str, Sequence[int] | None]) -> Answer:
    """Return the model's class and the fields of `ModelMismatch`, or why there is no model.

    ``unknown``: the installed transformers has no such model. ``rejected``: it builds none from this config.
    ``error``: another library is missing.
    """
    library = quiet_transformers()
    kind = content.get("model_type")
    if isinstance(kind, str) and kind not in library.CONFIG_MAPPING:
        return {"unknown": f"transformers {library.__version__} has no model type {kind!r}"}
    try:
        model = built(content)
    except ImportError as error:  # of a library that only this model needs
        return {"error": brief(error)}
    except Exception as error:  # any failure of a third-party model class: the config does not fit
        return {"rejected": brief(error)}
    own = {name: tuple(t.shape) for name, t in model.state_dict().items() if hasattr(t, "shape")}
    try:
        outcome = compare(
            model, {name: None if shape is None else tuple(shape) for name, shape in tensors.items()}
        )
    except Exception as error:  # the export's fault where the loader takes what the model itself has
        compare(built(content), own)
        outcome = ModelMismatch(broken=[brief(error)])
    return {"class": type(model).__name__} | outcome.as_dict()


def built(content: Mapping[str, Any]) -> Any:
    """Build the model of a config.json on the meta device; raise what transformers raises."""
    import torch

    library = quiet_transformers()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        config = library.AutoConfig.from_pretrained(folder, **LOCAL)
    names = getattr(config, "architectures", None) or []
    cls = getattr(library, names[0], None) if names else None
    with torch.device("meta"):
        return (
            cls._from_config(config) if cls is not None else library.AutoModelForCausalLM.from_config(config)
        )


def answer(asked: dict[str, Any]) -> Answer:
    """Answer `ckptcore.planning.transformers_process.ask`."""
    return describe(asked["config"], asked["tensors"])


if __name__ == "__main__":
    serve(answer)
