"""Which exports come out how: family and source -> what was compared, or why it is refused.

This is the declaration that the table in docs/reference/families.md is written from, and that
`tests/integration/exports/test_families.py` holds every cell against: a cell that says another thing than its
run fails, be it more or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from families import FAMILIES, FORMS, forms

# Source of an export -> what one of them is.
SOURCES = {
    "hf-hub": "a folder that `save_pretrained` wrote, in several files",
    "hf-live": "a transformers module's `state_dict()`, saved by DCP",
    "verl": "verl's rank files of an FSDP2 module, with `huggingface/`",
    "peft": "a DCP folder of a module with a LoRA on every linear layer",
    "megatron": "Megatron-Core's `torch_dist`: layers stacked or apart, experts joined, grouped, sequential",
    "torchtitan": "torchtitan's DCP folders: names until April 2026, `qkv_linear`, and fused `wqkv`",
    "olmo_core": "a step of OLMo-core's trainer",
    "olmo": "allenai/OLMo's unsharded checkpoints",
    "nanotron": "nanotron's step on two tensor-parallel ranks: rotary pairs in halves, or interleaved",
    "gpt_neox": "GPT-NeoX's step on two tensor-parallel ranks: files of layers, or `sequential`",
}
LOGITS = "logits bit-equal"
TENSORS = "tensors bit-equal"


@dataclass(frozen=True)
class Result:
    """What comes of an export. level: `LOGITS`, `TENSORS`, "refused". why: of a refusal, in its message."""

    level: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.level} ({self.why})" if self.why else self.level


@dataclass(frozen=True)
class Cell:
    """An export that is tried. form: one of the source's, of the checkpoint."""

    family: str
    source: str
    form: str

    def __str__(self) -> str:
        return f"{self.family}-{self.source}-{self.form}"


# Where it is not this: logits are equal from every source that there is a map for, the others are refused.
_OTHERWISE: dict[tuple[str, str], Result] = {}
_REFUSED = {"mamba": "Mamba layers have no rules yet", "mamba2": "Mamba layers have no rules yet"}
# Families that transformers 4.57 does not have. All others' cells are the same there.
LACKING_4 = {"minimax_m2", "deepseek_v32", "qwen3_5", "qwen3_5_moe", "nemotron_h"}
# Real trainers' checkpoints: (family, source) -> samples whose export is the folder beside them, bit for bit.
# Both are in tests/fixtures/maps/truths.tar.zst.
REAL: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("llama", "megatron"): (
        ("gpt_llama_tp2pp2_0.19.2/ckpt", "hf_llama"),
        ("gpt_llama_tp2pp2_zarr_0.12.3/ckpt", "hf_llama"),
    ),
    ("qwen2", "megatron"): (("gpt_qwen2_tied_bias_tp2pp2_0.19.2/ckpt", "hf_qwen2"),),
    ("deepseek_v3", "megatron"): (("gpt_deepseekv3_tp2pp2_0.19.2/ckpt", "hf_deepseekv3"),),
    ("olmo3", "olmo_core"): (("olmo3/step3", "olmo3/hf_export"),),
}


def row(family: str) -> tuple[str, ...]:
    """A family's row of the table: what each source's cell says, and what transformers 4.57 does."""
    results = (f"{declared(family, s)}{' †' * ((family, s) in REAL)}" for s in SOURCES)
    return (f"`{family}`", *results, "has no such model" if family in LACKING_4 else "the same")


def has_map(family: str, source: str) -> bool:
    """Whether a family's line in the table names the source; what transformers itself saves needs no line."""
    return source not in FORMS or source in FAMILIES[family][2]


def stand_in(family: str, source: str) -> str:
    """Whose checkpoint a cell is made of: the family's own, or one of the trainer's where it has no map."""
    if has_map(family, source):
        return family
    return next(other for other in FAMILIES if has_map(other, source))


def declared(family: str, source: str) -> Result:
    """What a cell of the table says."""
    if (family, source) in _OTHERWISE:
        return _OTHERWISE[family, source]
    if has_map(family, source):
        return Result(LOGITS)
    why = _REFUSED.get(family, "") if source == "megatron" else ""
    return Result("refused", why or "no map")


def cells() -> Iterator[Cell]:
    """Every export that the table speaks of; a refusal is tried in one form."""
    for family in FAMILIES:
        for source in SOURCES:
            every = forms(stand_in(family, source), source) if source in FORMS else ("one",)
            yield from (Cell(family, source, f) for f in (every if has_map(family, source) else every[:1]))


def short() -> list[Cell]:
    """One export of every family, by the source and form that was taken least often so far; what of trainers'
    forms is left then; and a refusal of each kind."""
    taken: Counter[tuple[str, str]] = Counter()
    able = [c for c in cells() if declared(c.family, c.source).level != "refused"]
    found: list[Cell] = []
    for family in FAMILIES:
        mine = [c for c in able if c.family == family]
        found.append(min(mine, key=lambda c: (taken[c.source, c.form], c.source not in FORMS)))
        taken[found[-1].source, found[-1].form] += 1
    for cell in able:
        if not taken[cell.source, cell.form]:
            taken[cell.source, cell.form] += 1
            found.append(cell)
    seen = set()
    for cell in cells():
        result = declared(cell.family, cell.source)
        if result.level == "refused" and (cell.source, result.why) not in seen:
            seen.add((cell.source, result.why))
            found.append(cell)
    return found
