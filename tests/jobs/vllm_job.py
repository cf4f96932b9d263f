"""A job that generates greedily with vLLM on the CPU, in an environment of its own.

Run as a program: ``vllm_job.py TOKENS FOLDER...``. Each folder is a model; ``prompts.json`` in it has lists
of token ids, ``dtype`` for the weights, and what else the engine is started with. The ids that follow are
written to ``generated.json``, with the version of vLLM, and with fingerprints where workers compute them.
Each model has a fork of the process that has imported it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def generate(library: Any, folder: Path, tokens: int) -> None:
    """One model: what follows its prompts."""
    asked = json.loads((folder / "prompts.json").read_text())
    options = {"model": str(folder), **asked.get("engine", {})}
    ranks = options.get("tensor_parallel_size", 1)
    if ranks > 1:  # each is a process, on a core of its own
        cores = sorted(os.sched_getaffinity(0))[:ranks]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    engine = library.LLM(
        **options, dtype=asked["dtype"], skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
    )
    settings = library.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in asked["ids"]], settings)
    out = {"version": library.__version__, "ids": [list(a.outputs[0].token_ids) for a in answers]}
    if "worker_extension_cls" in options:
        for moment, named in (("loaded", {"loaded": True}), ("now", {})):
            try:
                (form, *_) = engine.collective_rpc("ckptcore_fingerprint", kwargs=named)
                out[moment] = form["fingerprint"]
            except Exception as error:  # of a worker; another process wraps it
                out[moment] = str(error)
    (folder / "generated.json").write_text(json.dumps(out))


def main(tokens: int, folders: list[Path]) -> None:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    import vllm  # type: ignore[import-not-found, unused-ignore]

    failed = 0
    for folder in folders:
        child = os.fork()
        if not child:
            try:
                generate(vllm, folder, tokens)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        failed += os.waitpid(child, 0)[1] != 0
    sys.exit(failed)


if __name__ == "__main__":
    main(int(sys.argv[1]), [*map(Path, sys.argv[2:])])
