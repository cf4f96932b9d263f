"""Measure how fast a checkpoint becomes a model of transformers that answers.

    python models.py SRC OUT [--runs 3] [--json]

One process opens the Llama in SRC with `from_checkpoint` and computes the logits of one token; the other
exports it to OUT first, and opens that with `from_pretrained`. They take turns, a different one first in each
round, and their logits must be equal bit for bit. Wall time begins when the libraries that both need are
imported. Exit status 1 when the median of the ratios is above 0.6.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import remove
from verdicts import ended

BOUND = 0.6
CONTENDERS = ("from_checkpoint", "export, from_pretrained")


def config_of(source: Path) -> dict[str, Any]:
    """Return a config for the shapes of a Llama's tensors: 8 heads of keys and values."""
    import ckptcore

    shapes = {spec.fqn.rpartition("model.")[2]: spec.shape for spec in ckptcore.open(source).tensors}
    vocab, hidden = shapes["embed_tokens.weight"]
    head_dim = shapes["layers.0.self_attn.k_proj.weight"][0] // 8
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": shapes["layers.0.mlp.up_proj.weight"][0],
        "num_hidden_layers": sum(name.endswith("q_proj.weight") for name in shapes),
        "num_attention_heads": hidden // head_dim,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def first_logits(contender: str, source: str, config: str, out: str) -> tuple[float, str]:
    """Open the model as a contender does; return the seconds to its first logits, and their digest."""
    import torch
    import transformers

    import ckptcore

    library: Any = transformers
    opener = library.LlamaForCausalLM.from_pretrained  # imports the class
    begin = time.perf_counter()
    if contender == CONTENDERS[0]:
        model = ckptcore.from_checkpoint(source, config)
    else:
        ckptcore.convert(source, out, verb="export", config=config, catalog=False)
        model = opener(out)
    with torch.no_grad():
        logits = model(input_ids=torch.ones(1, 1, dtype=torch.int64)).logits
    seconds = time.perf_counter() - begin
    print(f"{time.process_time():.1f} s of processor time", file=sys.stderr)
    return seconds, hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def measure(source: Path, out: Path, runs: int) -> list[dict[str, float]]:
    """Return the seconds of each contender, round by round."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(source)))
        # A question to transformers is asked once, by whoever is first.
        env = {**os.environ, "CKPTCORE_CACHE": folder}
        for number in range(runs + 1):
            seconds, digests = dict[str, float](), set[str]()
            for contender in CONTENDERS if number % 2 else CONTENDERS[::-1]:
                argv = [sys.executable, __file__, str(source), str(out), "--job", contender]
                done = subprocess.run([*argv, "--config", folder], env=env, capture_output=True, text=True)
                remove(out)
                if done.returncode:
                    raise RuntimeError(f"{contender}: exit {done.returncode}: {done.stderr[-1000:]}")
                *_, taken, digest = done.stdout.split()
                seconds[contender] = float(taken)
                digests.add(digest)
            if len(digests) > 1:
                raise RuntimeError("the logits of both models differ")
            rounds.append(seconds)
    return rounds[1:]  # the first asks, and reads the source into the page cache


def verdict(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Judge the rounds; return figures and texts for the table."""
    ours, theirs = ([each[contender] for each in rounds] for contender in CONTENDERS)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "figure": ratio,
        "measured": f"{ratio:.2f} x: {statistics.median(ours):.1f} s, with an export between "
        f"{statistics.median(theirs):.1f} s",
        "bound": f"≤ {BOUND:g} x of an export and from_pretrained, to the first logits",
        "ok": ratio <= BOUND,
    }


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--job", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--config", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job is not None:
        print(*first_logits(given.job, str(given.source), given.config, str(given.out)))
        return 0
    load = os.getloadavg()[0]
    rounds = measure(given.source, given.out, given.runs)
    return ended(verdict(rounds), load, as_json=given.json, runs=rounds)


if __name__ == "__main__":
    sys.exit(main())
