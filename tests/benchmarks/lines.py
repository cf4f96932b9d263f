"""Define the benchmark lines: checkpoint, contenders and bounds.

This is only a table; run.py or a separate program runs the lines. Each line has a source
(make_ckpt.SOURCES) and a place. On "disk" the base is a plain copy of the source, flushed. "ram" is a RAM
disk, so that the disk does not hide the converter; there the peers do not sync. Sources are as warm or cold
as the previous contender left them, so the first contender changes from round to round. A cold race drops
the source from the page cache before each contender.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BUDGET = "256MiB"
BUDGET_BYTES = 256 << 20
BASE_BYTES = 100_000_000  # all but the tensor buffers
SPREAD = 0.10  # of the mid-range of the peaks, up and down
INSPECT_SECONDS = 0.40
SMALL_SECONDS = 0.65
COVER_SECONDS = 2.0
COVER_BYTES = 2 << 30
MANY_SECONDS = 25.0
MANY_BYTES = 3 << 30
ZERO_SECONDS = 30.0
ZERO_BYTES = 512 << 20
PLAN_SECONDS = 10.0
PLAN_BYTES = 4 << 30
MOE_SECONDS = 60.0
MOE_BYTES = 3 << 30


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to convert.

    Attributes:
        argv: The command; SRC, OUT, PYTHON, PEERS and CKPTCORE are replaced by their paths.
        suffix: Of the output's name; "" for a folder.
        dtype: The cast that it makes, or None.
        verified: Whether the output is compared with the source (a plain copy needs no proof).
    """

    argv: tuple[str, ...]
    suffix: str = ""
    dtype: str | None = None
    verified: bool = True


_PEER = ("PYTHON", "PEERS")
_EXPORT = ("CKPTCORE", "export", "SRC", "OUT")
_RESHARD = ("CKPTCORE", "reshard", "SRC", "OUT", "--to", "dcp", "--mesh", "fsdp=4,tp=2")
_FAST = ("--no-verify", "--no-digest")
_BF16 = ("--dtype", "bf16")
CORES = 16
_PIECES = ("--max-file-size", "500MB")  # a file has one digest and, on a RAM disk, one writer at a time

CONTENDERS = {
    "cp": Contender(("sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', "SRC", "OUT"), verified=False),
    "dcp_to_torch_save": Contender((*_PEER, "dcp_to_torch_save", "SRC", "OUT"), ".pt"),
    "dcp_to_torch_save+cast": Contender((*_PEER, "dcp_to_torch_save", "SRC", "OUT", *_BF16), ".pt", "bf16"),
    "load+save_file": Contender((*_PEER, "load_and_save_file", "SRC", "OUT"), ".safetensors"),
    "load+save_file+cast": Contender(
        (*_PEER, "load_and_save_file", "SRC", "OUT", *_BF16), ".safetensors", "bf16"
    ),
    "consolidate_checkpoint": Contender(
        (
            "LIGHTNING",
            "-m",
            "lightning.pytorch.utilities.consolidate_checkpoint",
            "SRC",
            "--output_file",
            "OUT",
        ),
        ".ckpt",
    ),
    "unshard_checkpoint": Contender(("OLMO", "PEERS", "unshard_checkpoint", "SRC", "OUT")),
    "zero_to_fp32": Contender(
        ("DEEPSPEED", "-m", "deepspeed.utils.zero_to_fp32", "SRC", "OUT", "--safe_serialization")
    ),
    "verl merger": Contender(("VERL", "PEERS", "verl_merge", "SRC", "OUT")),
    "ckptcore to lightning": Contender(
        ("CKPTCORE", "consolidate", "SRC", "OUT", "--to", "lightning"), ".ckpt"
    ),
    "ckptcore unshard": Contender(
        ("CKPTCORE", "consolidate", "SRC", "OUT", "--include", "model.*", "--rename", "model.="), ".pt"
    ),
    "ckptcore merge": Contender(_EXPORT),
    # Default mode: checksums verified, digest, fsync, catalog.
    "ckptcore": Contender(_EXPORT),
    "ckptcore+cast": Contender((*_EXPORT, *_BF16), dtype="bf16"),
    "ckptcore+stats": Contender((*_EXPORT, "--stats")),
    "ckptcore fast": Contender((*_EXPORT, *_FAST)),
    "load+save job": Contender((*_PEER, "reshard_job", "SRC", "OUT")),
    "ckptcore reshard": Contender(_RESHARD),
    # transformers builds the model on the meta device first, which no peer does.
    "ckptcore+cast+config": Contender((*_EXPORT, *_BF16, "--config", "SRC/hf.json"), dtype="bf16"),
    "ckptcore fast+cast": Contender((*_EXPORT, *_FAST, *_BF16), dtype="bf16"),
    "consolidate_safetensors_files_on_every_rank": Contender(
        (*_PEER, "consolidate_safetensors", "SRC", "OUT")
    ),
    # Shards of torch's writer record no number of ranks, so that their end cannot be proven.
    "ckptcore of shards": Contender((*_EXPORT, "--allow-incomplete")),
    "ckptcore on one core": Contender(("taskset", "-c", "CORE", *_EXPORT, *_PIECES, "--workers", "1")),
    f"ckptcore on {CORES} cores": Contender((*_EXPORT, *_PIECES, "--workers", str(CORES))),
}


@dataclass(frozen=True, slots=True)
class AtMost:
    """``subject`` takes at most ``factor`` times ``base`` plus ``plus`` seconds."""

    subject: str
    base: str
    factor: float
    plus: float

    def figure(self, medians: Mapping[str, float]) -> float:
        """Return the measured factor, without ``plus``."""
        return (medians[self.subject] - self.plus) / medians[self.base]

    def holds(self, medians: Mapping[str, float]) -> bool:
        """Return whether the medians, in seconds, keep the bound."""
        return self.figure(medians) <= self.factor

    def text(self) -> str:
        """Return the bound as text."""
        return f"≤ {self.factor:g} x {self.base} + {self.plus:g} s"


@dataclass(frozen=True, slots=True)
class Faster:
    """``subject`` is at least ``times`` times as fast as ``base``."""

    subject: str
    base: str
    times: float

    def figure(self, medians: Mapping[str, float]) -> float:
        """Return how many times as fast it was."""
        return medians[self.base] / medians[self.subject]

    def holds(self, medians: Mapping[str, float]) -> bool:
        """Return whether the medians, in seconds, keep the bound."""
        return self.figure(medians) >= self.times

    def text(self) -> str:
        """Return the bound as text."""
        return f"≥ {self.times:g} x {self.base}"


@dataclass(frozen=True, slots=True)
class Race:
    """Contenders in turn on one source, each in its own process; bounds on the medians.

    Attributes:
        name: Of the line.
        place: Where it runs.
        source: The checkpoint.
        bounds: On the medians.
        cold: Whether the source leaves the page cache before each contender.
        cores: How many cores it needs.
    """

    name: str
    place: str
    source: str
    bounds: tuple[AtMost | Faster, ...]
    cold: bool = False
    cores: int = 1

    @property
    def contenders(self) -> tuple[str, ...]:
        """The contenders of all bounds, each once."""
        return tuple(dict.fromkeys(n for b in self.bounds for n in (b.base, b.subject)))


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory of one conversion under `BUDGET`.

    group: the writer whose peaks must be equal within `SPREAD`, or None where only the bound counts.
    """

    name: str
    place: str
    source: str
    contender: Contender
    group: str | None


@dataclass(frozen=True, slots=True)
class Start:
    """A command that is mostly start and end: the median of whole processes (seconds), without torch."""

    name: str
    place: str
    source: str
    argv: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Cover:
    """A command that works from metadata alone, in bounded time (seconds) and memory (bytes)."""

    name: str
    place: str
    source: str
    argv: tuple[str, ...] = ("CKPTCORE", "validate", "SRC", "--level", "coverage")
    seconds: float = COVER_SECONDS
    peak: int = COVER_BYTES


@dataclass(frozen=True, slots=True)
class Program:
    """A program beside this file that measures and judges its own bound.

    Attributes:
        name: Of the line.
        place: Where it runs.
        source: None where it needs none.
        argv: The program's name, and its arguments.
        quick: More arguments where bounds are not judged.
    """

    name: str
    place: str
    source: str | None
    argv: tuple[str, ...]
    quick: tuple[str, ...] = ()


Line = Race | Peak | Start | Cover | Program


def _overhead(server: str) -> Program:
    argv = ("overhead.py", "SRC", "OUT", "--server", server, "--ckptcore", "CKPTCORE")
    return Program(f"flow/server-{server}", "ram", "files-20", argv, ("--runs", "1"))


def _objects(milliseconds: int) -> Program:
    argv = ("objects.py", "SRC", "OUT", "--latency", str(milliseconds / 1000), "--ckptcore", "CKPTCORE")
    return Program(f"objects/row-2gb/{milliseconds}-ms", "ram", "row-2gb", argv, ("--runs", "1"))


def _gpu(*options: str) -> Program:
    name = "-".join(option.lstrip("-") for option in options)
    return Program(f"gpu/{name}", "ram", "fp32-4gb", ("gpu.py", "SRC", "OUT", *options), ("--runs", "1"))


def _disk(source: str, factor: float, subject: str = "ckptcore", plus: float = 1.0) -> Race:
    return Race(f"disk/{source}", "disk", source, (AtMost(subject, "cp", factor, plus),))


def _ram(
    source: str, times: float, times_fast: float | None = None, times_torch: float | None = None
) -> Race:
    """Return a line against both peers; ``times_torch`` is the bound against `dcp_to_torch_save`."""
    cast = "+cast" if source.startswith("fp32") else ""
    subjects = [(f"ckptcore{cast}", times, times_torch or times)]
    if times_fast is not None:
        subjects.append((f"ckptcore fast{cast}", times_fast, times_fast))
    bounds = []
    for who, by, by_torch in subjects:
        bounds.append(Faster(who, f"dcp_to_torch_save{cast}", by_torch))
        bounds.append(Faster(who, f"load+save_file{cast}", by))
    return Race(f"ram/{source}", "ram", source, tuple(bounds))


def _trainer(source: str, peer: str, subject: str) -> Race:
    return Race(f"ram/{source}", "ram", source, (Faster(subject, peer, 2.0),))


def _zero(source: str) -> Race:
    bounds = (
        Faster("ckptcore+cast", "zero_to_fp32", 4.0),
        AtMost("ckptcore+cast+config", "ckptcore+cast", 1.0, plus=12.0),
    )
    return Race(f"ram/{source}", "ram", source, bounds)


def _shape(source: str, times: float = 2.0) -> Race:
    return Race(f"ram/{source}", "ram", source, (Faster("ckptcore", "dcp_to_torch_save", times),))


WRITERS = {
    "safetensors": Contender(
        ("CKPTCORE", "consolidate", "SRC", "OUT", "--to", "safetensors", "--memory", BUDGET)
    ),
    "torch_save": Contender(
        ("CKPTCORE", "consolidate", "SRC", "OUT", "--to", "torch_save", "--memory", BUDGET), ".pt"
    ),
    "lightning": Contender(
        ("CKPTCORE", "consolidate", "SRC", "OUT", "--to", "lightning", "--memory", BUDGET), ".ckpt"
    ),
    "cast": Contender((*_EXPORT, *_BF16, "--memory", BUDGET), dtype="bf16"),
    "reshard": Contender((*_RESHARD, "--memory", BUDGET)),
}


def _peaks(source: str, place: str, writers: tuple[str, ...], equal: bool) -> tuple[Peak, ...]:
    """Return one line per writer with 1 and with 4 workers."""
    return tuple(
        Peak(
            f"memory/{source}/{writer}/workers-{workers}",
            place,
            source,
            Contender(
                (*WRITERS[writer].argv, "--workers", str(workers)),
                WRITERS[writer].suffix,
                WRITERS[writer].dtype,
            ),
            writer if equal else None,
        )
        for writer in writers
        for workers in (1, 4)
    )


_RESHARDED = Race(
    "disk/training-8gb", "disk", "training-8gb", (AtMost("ckptcore reshard", "cp", 2.5, plus=1.5),)
)
_RESHARDED_RAM = Race(
    "ram/training-4gb", "ram", "training-4gb", (Faster("ckptcore reshard", "load+save job", 3.0),)
)
_STATS = tuple(
    Race(f"ram/{source}/stats", "ram", source, (AtMost("ckptcore+stats", "ckptcore", 1.1, plus=0.0),))
    for source in ("row-4gb", "fp32-4gb")
)
_COLD = Race("cold/row-8gb", "disk", "row-8gb", (AtMost("ckptcore", "cp", 1.1, plus=0.0),), cold=True)
_CORES = Race(
    f"cores/row-8gb/{CORES}",
    "ram",
    "row-8gb",
    (Faster(f"ckptcore on {CORES} cores", "ckptcore on one core", 8.0),),
    cores=CORES,
)
_SHARDS = Race(
    "ram/hf-shards-2gb",
    "ram",
    "hf-shards-2gb",
    (Faster("ckptcore of shards", "consolidate_safetensors_files_on_every_rank", 2.0),),
)
_BOTH = ("safetensors", "torch_save")

# The default budget of metadata refuses these two.
_LARGE_METADATA = ("env", "CKPTCORE_METADATA_MEMORY=8GiB")

LINES: tuple[Line, ...] = (
    Start("inspect/row-2gb", "ram", "row-2gb", ("CKPTCORE", "inspect", "SRC"), INSPECT_SECONDS),
    Start("export/row-10mb", "ram", "row-10mb", _EXPORT, SMALL_SECONDS),
    Cover("cover/chunks-1m", "ram", "chunks-1m"),
    Cover(
        "cover/chunks-10m",
        "ram",
        "chunks-10m",
        (*_LARGE_METADATA, "CKPTCORE", "validate", "SRC", "--level", "coverage"),
        MANY_SECONDS,
        MANY_BYTES,
    ),
    Cover("cover/zero3-512", "ram", "zero3-512", seconds=ZERO_SECONDS, peak=ZERO_BYTES),
    *(
        Cover(
            f"plan/405b-1024/{mesh}",
            "ram",
            "405b-1024",
            ("CKPTCORE", "plan", "SRC", "OUT", "--to", "dcp", "--mesh", mesh),
            PLAN_SECONDS,
            PLAN_BYTES,
        )
        for mesh in ("fsdp=512", "fsdp=64,tp=8")
    ),
    Cover(
        "plan/moe-1t-2048/safetensors",
        "ram",
        "moe-1t-2048",
        (*_LARGE_METADATA, "CKPTCORE", "plan", "SRC", "OUT", "--to", "safetensors"),
        MOE_SECONDS,
        MOE_BYTES,
    ),
    _ram("row-2gb", 2.0, times_torch=8.0),
    _ram("col-2gb", 2.0, times_torch=6.5),
    _ram("fp32-2gb", 2.0, times_torch=6.0),
    _ram("row-4gb", 2.5, 3.0),
    _ram("col-4gb", 2.5, 3.0),
    _ram("fp32-4gb", 2.5, 3.0),
    _overhead("none"),
    _overhead("running"),
    Program("flow/two-workers", "ram", "fp32-3gb", ("workers.py", "SRC", "OUT"), ("--seconds", "0")),
    Program("model/row-2gb", "disk", "row-2gb", ("models.py", "SRC", "OUT"), ("--runs", "1")),
    Program(
        "export/megatron-8gb",
        "disk",
        None,
        ("megatron.py", "export", "OUT", "--ckptcore", "CKPTCORE"),
        ("--layers", "2", "--scale", "16", "--runs", "1"),
    ),
    Program(
        "map/47000-tensors", "ram", None, ("megatron.py", "map", "OUT"), ("--experts", "8", "--runs", "1")
    ),
    _objects(0),
    _objects(30),
    Program(
        "sweep/1000-small",
        "disk",
        "small-10mb",
        ("many.py", "SRC", "OUT", "--ckptcore", "CKPTCORE"),
        ("--count", "20"),
    ),
    Program("custody/gate-1000000", "disk", None, ("custody_gate.py",), ("--count", "20000", "--runs", "1")),
    Program("receiver/200-a-second", "disk", None, ("receiver.py",), ("--seconds", "2")),
    _trainer("lightning-2gb", "consolidate_checkpoint", "ckptcore to lightning"),
    _trainer("olmo-2gb", "unshard_checkpoint", "ckptcore unshard"),
    _trainer("verl-2gb", "verl merger", "ckptcore merge"),
    _zero("zero3-2gb"),
    _SHARDS,
    _CORES,
    _gpu("--dtype", "bf16"),
    _gpu("--dtype", "float8_e4m3fn"),
    _gpu("--fingerprint"),
    _shape("many-small", 5.0),
    _shape("many-small-8way"),
    _shape("1024-way"),
    _shape("transposed-2gb", 1.5),
    *_peaks("row-0.5gb", "ram", _BOTH, equal=True),
    *_peaks("row-2gb", "ram", _BOTH, equal=True),
    *_peaks("row-8gb", "disk", _BOTH, equal=True),
    *_peaks("big-row", "ram", _BOTH, equal=True),
    *_peaks("big-col", "ram", _BOTH, equal=True),
    *_peaks("col-2gb", "ram", _BOTH, equal=False),
    *_peaks("fp32-2gb", "ram", ("cast",), equal=False),
    *_peaks("lightning-2gb", "ram", ("lightning",), equal=False),
    *_peaks("olmo-2gb", "ram", ("safetensors",), equal=False),
    *_peaks("verl-2gb", "ram", ("safetensors",), equal=False),
    *_peaks("zero3-2gb", "ram", ("cast",), equal=False),
    *_peaks("1024-way", "ram", ("safetensors",), equal=False),
    *_peaks("many-small", "ram", ("safetensors",), equal=False),
    _RESHARDED_RAM,
    *_STATS,
    *_peaks("training-4gb", "ram", ("reshard",), equal=False),
    *_peaks("big-row", "ram", ("reshard",), equal=False),
    _disk("row-2gb", 1.6),
    _disk("col-2gb", 2.5),
    _disk("fp32-2gb", 2.5, "ckptcore+cast"),
    _disk("row-8gb", 1.0, plus=0.3),
    _COLD,
    _RESHARDED,
)
