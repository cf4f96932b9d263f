"""Convert sharded training checkpoints into verified models, in bounded memory.

    import ckptcore
    manifest = ckptcore.open("/runs/llama/step-300")
    report = ckptcore.check(manifest, level="bytes")
    weight = ckptcore.read(manifest, "model.lm_head.weight")
    ckptcore.convert("/runs/llama/step-300", "/models/llama", verb="export")

No code from a checkpoint is executed, memory use is a budget instead of the model's size, and torch is
imported only when tensors are read or written.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# name -> module; imported on first use, so that `import ckptcore` is fast.
_WHERE = {
    "__version__": "ckptcore.utils.version",
    "open": "ckptcore.api",
    "read": "ckptcore.api",
    "load_into": "ckptcore.api",
    "model_part": "ckptcore.api",
    "StorageReader": "ckptcore.storage_reader",
    "from_checkpoint": "ckptcore.live_model.from_checkpoint",
    "check": "ckptcore.api",
    "plan": "ckptcore.api",
    "prepare": "ckptcore.api",
    "execute": "ckptcore.api",
    "publish": "ckptcore.api",
    "convert": "ckptcore.api",
    "merge": "ckptcore.api",
    "diff": "ckptcore.api",
    "Difference": "ckptcore.comparison.result",
    "fingerprint": "ckptcore.api",
    "fingerprint_model": "ckptcore.live_model.fingerprint_model",
    "fingerprint_state": "ckptcore.api",
    "changes": "ckptcore.api",
    "statistics": "ckptcore.api",
    "Fingerprints": "ckptcore.fingerprints.result",
    "verify_export": "ckptcore.api",
    "ExportProof": "ckptcore.checking.export_proof",
    "Composed": "ckptcore.planning.compose",
    "Prepared": "ckptcore.conversion.pipeline",
    "Receipt": "ckptcore.execution.receipts",
    "Manifest": "ckptcore.core.manifest",
    "TensorSpec": "ckptcore.core.manifest",
    "Box": "ckptcore.core.box",
    "Request": "ckptcore.planning.request",
    "Settings": "ckptcore.planning.request",
    "Report": "ckptcore.checking.check",
    "CkptError": "ckptcore.errors",
    "Finding": "ckptcore.errors",
    "Result": "ckptcore.conversion.pipeline",
}

if TYPE_CHECKING:
    from ckptcore.api import (
        changes,
        check,
        convert,
        diff,
        execute,
        fingerprint,
        fingerprint_state,
        load_into,
        merge,
        model_part,
        open,
        plan,
        prepare,
        publish,
        read,
        statistics,
        verify_export,
    )
    from ckptcore.checking.check import Report
    from ckptcore.checking.export_proof import ExportProof
    from ckptcore.comparison.result import Difference
    from ckptcore.conversion.pipeline import Prepared, Result
    from ckptcore.core.box import Box
    from ckptcore.core.manifest import Manifest, TensorSpec
    from ckptcore.errors import CkptError, Finding
    from ckptcore.execution.receipts import Receipt
    from ckptcore.fingerprints.result import Fingerprints
    from ckptcore.live_model.fingerprint_model import fingerprint_model
    from ckptcore.live_model.from_checkpoint import from_checkpoint
    from ckptcore.planning.compose import Composed
    from ckptcore.planning.request import Request, Settings
    from ckptcore.storage_reader import StorageReader
    from ckptcore.utils.version import __version__ as __version__

__all__ = [
    "Box",
    "CkptError",
    "Composed",
    "Difference",
    "ExportProof",
    "Finding",
    "Fingerprints",
    "Manifest",
    "Prepared",
    "Receipt",
    "Report",
    "Request",
    "Result",
    "Settings",
    "StorageReader",
    "TensorSpec",
    "changes",
    "check",
    "convert",
    "diff",
    "execute",
    "fingerprint",
    "fingerprint_model",
    "fingerprint_state",
    "from_checkpoint",
    "load_into",
    "merge",
    "model_part",
    "open",
    "plan",
    "prepare",
    "publish",
    "read",
    "statistics",
    "verify_export",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        module = import_module(_WHERE[name])
        value = getattr(module, name)
        if _WHERE[name] == "ckptcore.api":
            value = module.speaks_python(value)
        return globals().setdefault(name, value)
    raise AttributeError(f"module 'ckptcore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
