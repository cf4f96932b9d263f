"""Plan an output: the bytes of each file, from stored items of a source.

1. The target format arranges the wanted tensors into file layouts (names, offsets, literal bytes).
2. Per output file, the chunks that overlap its tensors become *reads* (`ckptcore.planning.file_plan`): a box,
   the item that holds it, and whether it is placed or only compared (replicas, tied tensors).
3. A plan is a folder: ``head.json`` and one frame per file, each readable alone on any worker.

Plans are pure values: equal manifests and targets give equal bytes and one digest. A plan holds
overlapping boxes, never byte runs, so its size is that of the manifest, not of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from ckptcore.core import columnar_file as frame
from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.core.subset import describe_derived
from ckptcore.core.tree_paths import Path
from ckptcore.errors import DamagedCheckpoint, MalformedCheckpoint, SourceChanged
from ckptcore.naming.rename import MadeTensor, Mapped
from ckptcore.planning.file_plan import FilePlan
from ckptcore.planning.file_planner import file_plans, followers_of
from ckptcore.planning.request import Settings
from ckptcore.planning.tiles import Budget
from ckptcore.store import Store, fetch, local_path, put_each
from ckptcore.topology.layout import Topology
from ckptcore.utils.command_process import process_count
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing

if TYPE_CHECKING:
    from ckptcore.formats.base import Arrangement, Layout

HEAD = "head.json"
_KEPT_BYTES = 64 << 20
_DEPTH = 700  # containers of the JSON form: those of an object, and a few around it
_LARGE = 100_000  # chunks of a manifest whose digest takes longer than starting a thread
# Resident before any buffer, on a CPU and with a device. Both have torch in them: whether a stored view needs
# it (a conjugate does) is known when its item is read. Without it, 94 MiB are usual.
_BASE_MEMORY = {"cpu": 286 << 20, "device": 446 << 20}


@dataclass(frozen=True, slots=True)
class Target:
    """The requested output.

    Attributes:
        format: Name of the writer's format.
        single: Name of the only output file, or None for a folder.
        max_file_bytes: Tensor bytes per file of a folder.
        dtypes: Name -> output dtype, where it differs.
        objects: Values other than tensors to carry, JSON form.
        mesh: The ranks, see `Request`; empty for a mesh of one.
        sharding: Sharding rules, see `Request`.
        serialization: Serialization of a DCP folder's items.
    """

    format: str
    single: str | None = None
    max_file_bytes: int = 5_000_000_000
    dtypes: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    mesh: str = ""
    sharding: str | None = None
    serialization: str = "torch_save"

    def arrangement(
        self,
        tensors: Iterable[TensorSpec],
        paths: Mapping[str, Path] | None = None,
        topology: Topology | None = None,
        order: Sequence[str] = (),
    ) -> Arrangement:
        """Return the input of a layout, to write these tensors in the output dtypes.

        Args:
            tensors: As stored, under the output's names.
            paths: Paths of names in the tree, for layouts that nest.
            topology: Boxes of each rank, for layouts of a mesh; None for a mesh of one.
            order: Names in the order of the saved state dict, if paths have another order.
        """
        # A late import: processes that write files of a plan know no formats.
        from ckptcore.formats.base import Arrangement

        return Arrangement(
            [TensorSpec(t.fqn, self.dtypes.get(t.fqn, t.dtype), t.shape) for t in tensors],
            self.objects,
            paths or {},
            self.single,
            self.max_file_bytes,
            topology,
            self.serialization,
            order,
        )


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A row of the plan's table of files.

    Attributes:
        index: Number of the file.
        path: Path in the output.
        nbytes: Bytes of the file.
        tensors: Number of its tensors.
        reads: Source bytes that it needs.
        requests: Ranges of source files with these bytes, neighbours joined.
    """

    index: int
    path: str
    nbytes: int
    tensors: int
    reads: int
    requests: int = 0


@dataclass(frozen=True)
class Plan:
    """Head of a plan: everything but the plans of its files.

    Attributes:
        source: Root URL of the source.
        manifest_digest: Digest of its manifest.
        target: The requested output.
        files: Table of files.
        renamed: (old, new) names.
        cast: (name, stored dtype, output dtype).
        dropped: (stored name, reason).
        ties: (dropped name, kept name).
        bytes_in: Source bytes to read.
        bytes_out: Bytes of the output files.
        digest: Digest of everything that decides the output's bytes.
        extra: (path, digest) of small files beside the tensors.
        derived: (name, how it is computed).
        items: Number of stored items of the source.
        map_digest: Digest of the renaming, see `ckptcore.fingerprints.sums.map_digest`.
        made: Origin of every tensor, where a map of names made them.
    """

    source: str
    manifest_digest: str
    target: Target
    files: tuple[PlannedFile, ...]
    renamed: tuple[tuple[str, str], ...]
    cast: tuple[tuple[str, str, str], ...]
    dropped: tuple[tuple[str, str], ...]
    ties: tuple[tuple[str, str], ...]
    bytes_in: int
    bytes_out: int
    digest: str = ""
    extra: tuple[tuple[str, str], ...] = ()
    derived: tuple[tuple[str, str], ...] = ()
    items: int = 0
    map_digest: str = ""
    made: tuple[MadeTensor, ...] = ()

    @property
    def requests(self) -> int:
        """Ranges of source files that are read, over all files."""
        return sum(f.requests for f in self.files)


def settings_for(plan: Plan, settings: Settings) -> Settings:
    """Return the settings that carry out a plan: a device is not used for what moves and is not computed.

    Bytes that only move would pass PCIe twice; a CPU copies them as fast as files are read.
    """
    used = settings.device if plan.cast or plan.derived else "cpu"
    return replace(settings.of(plan.target.mesh), device=used)


def writing_processes(source: str, settings: Settings, sizes: Sequence[int]) -> int:
    """Return how many processes write files of these sizes from a file system of this machine."""
    if settings.device != "cpu" or local_path(source) is None:
        return 1
    return process_count(settings.threads, settings.memory, sum(sizes), len(sizes))


def peak_memory(source: str, files: Sequence[PlannedFile], settings: Settings) -> int:
    """Return the most that a run should take, in bytes: its processes and all buffers that the budget allows.

    Most runs stay far below: they need neither torch nor large tiles.
    """
    largest = max((f.nbytes for f in files), default=0)
    tile = Budget.of(settings).tile
    # Four buffers for each thread (`Budget.of`), and never larger than the largest file.
    buffers = min(settings.memory, 4 * settings.threads * tile, 4 * settings.threads * max(largest, 1))
    count = writing_processes(source, settings, [file.nbytes for file in files])
    processes = 1 if count == 1 else count + 1  # the one that hands out files, too
    return processes * _BASE_MEMORY["cpu" if settings.device == "cpu" else "device"] + buffers


def make_plan(
    mapped: Mapped,
    target: Target,
    layout: Layout,
    arrangement: Arrangement,
    *,
    source: Manifest | None = None,
    extra: Sequence[tuple[str, str]] = (),
    on_file_plan: Callable[[FilePlan], None] | None = None,
) -> tuple[Plan, Iterable[FilePlan]]:
    """Plan to write every tensor of ``mapped`` as ``target`` wants it.

    File plans that would take much memory are not kept, but made anew whenever they are gone through.

    Args:
        mapped: The tensors under their new names.
        target: The requested output.
        layout: Layout of the format.
        arrangement: Input of the layout: `Target.arrangement` of the tensors.
        source: The manifest before remapping, when that differs; its digest goes into the plan.
        extra: (path, text digest) of small files that go beside the output; they are part of the digest.
        on_file_plan: Called with every file's plan as it is made.

    Raises:
        DamagedCheckpoint: A chunk has no place in any file. And what the layout's `arrange` raises.
    """
    manifest, twins, ties = mapped.manifest, mapped.twins, mapped.ties
    stored = (manifest.chunks, *([manifest.inputs.chunks] if manifest.inputs is not None else []))
    # A hole: nothing can be planned for elements that are nowhere.
    if any(bool((chunks.item < 0).any()) for chunks in stored):
        raise DamagedCheckpoint(
            "a chunk of the manifest has no place in any file", findings=manifest.findings
        )
    written = arrangement.tensors
    followers = followers_of(manifest, twins, ties)
    plans = FilePlans(lambda: file_plans(layout.arrange(arrangement), manifest, written, twins, followers))
    rows: list[PlannedFile] = []
    digest = blake3()
    # Begun before the files: it takes as long as they do for a large checkpoint.
    of_source = _digest_beside(source or manifest)
    for p in plans:
        rows.append(PlannedFile(p.index, p.path, p.nbytes, len(p.columns), p.bytes_in, p.requests))
        digest.update(p.digest)
        if on_file_plan is not None:
            on_file_plan(p)
    cast = tuple(
        (t.fqn, t.dtype, w.dtype)
        for t, w in zip(manifest.tensors, written, strict=True)
        if t.dtype != w.dtype
    )
    # After the files: the digest of a large manifest is computed beside them.
    origin = of_source()
    # Extra files and the source are part of the digest: they decide the output's bytes as well.
    digest.update(frame.canonical_json([origin, target.format, target.single, list(map(list, extra))]))
    plan = Plan(
        manifest.root,
        origin,
        target,
        tuple(rows),
        mapped.renamed,
        cast,
        tuple((d.fqn, d.rule) for d in mapped.dropped),
        ties,
        sum(r.reads for r in rows),
        sum(r.nbytes for r in rows),
        digest.hexdigest(),
        tuple(extra),
        tuple((manifest.tensors[t].fqn, describe_derived(manifest, t)) for t in sorted(manifest.derived)),
        len(manifest.items),
    )
    return plan, plans


def _digest_beside(manifest: Manifest) -> Callable[[], str]:
    """Return what returns a manifest's digest; that of a large one is computed beside the caller's work.

    Nearly all of it is copying and compressing columns, without the GIL.
    """
    if len(manifest.chunks) < _LARGE:
        return lambda: manifest.digest
    from concurrent.futures import ThreadPoolExecutor  # plans of small checkpoints do not need it

    pool = ThreadPoolExecutor(1)
    future = pool.submit(lambda: manifest.digest)
    pool.shutdown(wait=False)  # after this one
    return future.result


class FilePlans:
    """The plans of a plan's files, one at a time. They stay in memory while they are small."""

    def __init__(self, make: Callable[[], Iterator[FilePlan]]) -> None:
        self._make = make
        self._plans: list[FilePlan] | None = None

    def __iter__(self) -> Iterator[FilePlan]:
        if self._plans is not None:
            yield from self._plans
            return
        plans: list[FilePlan] | None = []
        weight = 0
        for p in self._make():
            weight += p.weight
            # Too large to be kept: each pass makes them anew, which costs time and no memory.
            if weight > _KEPT_BYTES:
                plans = None
            if plans is not None:
                plans.append(p)
            yield p
        # Behind the loop: an iteration that was stopped has only the first plans.
        self._plans = plans


def save_plan(
    store: Store, plan: Plan, files: Iterable[FilePlan], beside: Iterable[tuple[str, bytes]] = ()
) -> None:
    """Write a plan as a folder. The head comes last, so that a folder with a head is complete.

    beside: (name, bytes) of further files of the folder.
    """
    save_files(store, files, beside)
    save_head(store, plan)


def save_files(store: Store, files: Iterable[FilePlan], beside: Iterable[tuple[str, bytes]] = ()) -> None:
    """Write file plans, and what is beside them: all of a plan but its head."""
    put_each(store, chain(beside, ((file_name(p.index), p.dumped) for p in files)))


def save_head(store: Store, plan: Plan) -> None:
    """Write the head of a plan, after all file plans."""
    # `asdict` would copy every name and every carried value.
    form = {f.name: getattr(plan, f.name) for f in fields(plan)}
    form["files"] = [asdict(file) for file in plan.files]
    target = {f.name: getattr(plan.target, f.name) for f in fields(plan.target)}
    del target["objects"]  # the plans of the files hold their bytes
    form["target"] = target
    store.put(HEAD, frame.canonical_json(form))


def load_head(store: Store) -> Plan:
    """Read the head of a saved plan; raise `MalformedCheckpoint`, `SourceUnreadable`."""
    data = fetch(store, HEAD)
    if data is None:
        raise MalformedCheckpoint(
            f"there is no plan in {store.url}", hint="make one with `ckptcore plan SRC DST --save DIR`"
        )
    try:
        with parsing("a plan"):
            return _plan_of(load_json_object(data, depth=_DEPTH))
    except InvalidText as error:
        raise MalformedCheckpoint(f"{store.url}/{HEAD} is damaged: {error}", hint="plan again") from error


def _plan_of(form: dict[str, Any]) -> Plan:
    target = Target(**form.pop("target"))
    rows = tuple(PlannedFile(**row) for row in form.pop("files"))
    pairs: dict[str, Any] = {
        k: tuple(tuple(r) for r in form.pop(k))
        for k in ("renamed", "cast", "dropped", "ties", "extra", "derived")
    }
    pairs["made"] = tuple(MadeTensor(n, rule, tuple(of), same) for n, rule, of, same in form.pop("made"))
    return Plan(target=target, files=rows, **pairs, **form)


def load_file_plan(store: Store, index: int) -> FilePlan:
    """Read one file's plan of a saved plan."""
    name = file_name(index)
    data = fetch(store, name)
    if data is None:
        raise SourceChanged(f"{store.url} lacks {name}")
    return FilePlan.load(data)


def file_name(index: int) -> str:
    """Return the name of a file plan in a plan folder."""
    return f"file-{index:05d}.plan"
