"""The runs of Megatron-Core's own training that resume from what ckptcore wrote; without torch, for docs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

RELEASES = ("0.12.3", "0.15.3", "0.16.1", "0.19.2")
WITH_BUCKETS = RELEASES[1:]
MODEL_SPACE, RESHARDABLE = "fully_sharded_model_space", "fully_reshardable"
BUCKETS, GATHERED = "dp_reshardable", "dp_zero_gather_scatter"
LAYERS = 4
IN_0_12 = {RESHARDABLE: MODEL_SPACE}  # 0.12 has not yet what later releases call so
# What the state is saved as, too, because the release's own resume on other ranks needs it.
BESIDE = {
    BUCKETS: f"; for its own resume `{RESHARDABLE}`",
    GATHERED: f"; for its own resume `{RESHARDABLE}`, in 0.12 and 0.15 `{MODEL_SPACE}`",
}


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run; data-parallel ones are what is left of ``ranks``.

    Attributes:
        first: Layers of the first stage, None: as many as the others have.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    first: int | None = None

    @property
    def written(self) -> str:
        """Return the mesh that a reshard is asked for."""
        dp = self.ranks // (self.tp * self.pp)
        sizes = {"pp": self.pp, "fsdp": dp // self.ep, "ep": self.ep, "tp": self.tp}
        return ",".join(f"{name}={n}" for name, n in sizes.items() if n > 1) or "tp=1"

    @property
    def text(self) -> str:
        """Return the ranks as the docs name them."""
        sizes = {"pp": self.pp, "vpp": self.vpp or 1, "tp": self.tp, "ep": self.ep}
        sizes["dp"] = self.ranks // (self.tp * self.pp * self.ep)
        found = " ".join(f"{name}={n}" for name, n in sizes.items() if n > 1) or "1 rank"
        return found if self.first is None else f"{found} with {self.first} and {LAYERS - self.first} layers"

    def form(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """A checkpoint, and the ranks that resume from it.

    Attributes:
        model: What the docs call it.
        name: A name of the job's `MODELS`.
        saved: The ranks that save.
        on: The ranks that resume, natively and from what was written for them.
        layout: How the optimizer's state is saved; None: by a job without the distributed optimizer.
        releases: Releases with this layout.
    """

    model: str
    name: str
    saved: Ranks
    on: tuple[Ranks, ...]
    layout: str | None = RESHARDABLE
    releases: tuple[str, ...] = RELEASES

    @property
    def text(self) -> str:
        """Return what runs, as the docs name it."""
        if self.layout is None:
            optimizer = "and its optimizer of float16 parameters"
        else:
            old = IN_0_12.get(self.layout)
            named = f"`{self.layout}`" if old is None else f"`{self.layout}`, in 0.12 `{old}`"
            named += BESIDE.get(self.layout, "")
            optimizer = f"and its DistributedOptimizer (saved as {named})"
        return f"Megatron-Core {', '.join(self.releases)}: its GPTModel ({self.model}) {optimizer}"

    def layout_in(self, release: str) -> str | None:
        """Return how a release saves the state that is written for other ranks."""
        old = self.layout is not None and release.startswith("0.12.")
        return IN_0_12.get(str(self.layout), self.layout) if old else self.layout

    def native_in(self, release: str) -> str | None:
        """Return how a release saves the same state for its own resume on other ranks."""
        if self.layout == GATHERED:
            return MODEL_SPACE if release in RELEASES[:2] else RESHARDABLE
        return RESHARDABLE if self.layout == BUCKETS else self.layout_in(release)


TP1, TP2, PP2 = Ranks(1), Ranks(2, tp=2), Ranks(2, pp=2)
CASES = {
    "dense": Case(
        "dense",
        "dense",
        Ranks(4, tp=2),
        (Ranks(2), PP2, Ranks(2, pp=2, vpp=2), Ranks(2, pp=2, first=1), Ranks(4, tp=2, pp=2)),
    ),
    "tied": Case("tied embeddings", "tied", Ranks(4, tp=2, pp=2), (TP1, PP2)),
    # Megatron-Core has an optimizer of its own for experts where ep > 1 alone: no other ep resumes from ep=1.
    "moe": Case("mixture of experts", "moe", Ranks(2, ep=2), (Ranks(4, ep=4), Ranks(4, pp=2, ep=2))),
    "padded": Case("padded vocabulary", "padded", TP2, (TP1, Ranks(4, tp=4))),
    "float32": Case("dense, float32", "float32", Ranks(2), (TP2,)),
    "replicated": Case("dense", "dense", TP2, (Ranks(2), PP2), layout=None),
    "model-space": Case("dense", "dense", Ranks(4, tp=2), (Ranks(2), PP2), MODEL_SPACE, ("0.15.3",)),
    "buckets": Case(
        "dense",
        "dense",
        Ranks(4, tp=2),
        (Ranks(2), PP2, Ranks(4, tp=2, pp=2), Ranks(2, pp=2, vpp=2)),
        BUCKETS,
        WITH_BUCKETS,
    ),
    "buckets-tied": Case("tied embeddings", "tied", Ranks(4, tp=2, pp=2), (TP1, PP2), BUCKETS, WITH_BUCKETS),
    "buckets-virtual": Case("dense", "dense", Ranks(2, pp=2, vpp=2), (TP2, PP2), BUCKETS, WITH_BUCKETS),
    "buckets-moe": Case(
        "mixture of experts",
        "moe",
        Ranks(2, ep=2),
        (Ranks(4, ep=4), Ranks(4, pp=2, ep=2)),
        BUCKETS,
        WITH_BUCKETS,
    ),
    "gathered": Case("dense", "dense", Ranks(4, tp=2), (Ranks(2), PP2, Ranks(4, tp=2, pp=2)), GATHERED),
    "gathered-moe": Case(
        "mixture of experts", "moe", Ranks(2, ep=2), (Ranks(4, ep=4), Ranks(4, pp=2, ep=2)), GATHERED
    ),
}
ROWS = tuple((release, name) for release in RELEASES for name, c in CASES.items() if release in c.releases)
