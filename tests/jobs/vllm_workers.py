"""Workers of vLLM whose layers multiply by torch: without oneDNN, which keeps weights in a form of its own.

`test_engine.py` names `Plain` as the extension of workers; only an interpreter that has vLLM imports this.
"""

from __future__ import annotations

import vllm._custom_ops as operations  # type: ignore[import-not-found, unused-ignore]

from ckptcore.live_model.vllm_plugin import Fingerprinting

operations._supports_onednn = False


class Plain(Fingerprinting):
    """The methods of the plug-in."""
