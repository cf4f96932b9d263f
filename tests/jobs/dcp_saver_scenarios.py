"""Scenarios of ways to save: writers, extensions, groups of ranks, asynchronous saves, older versions."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_model_scenarios import fsdp2, hsdp2, made
from dcp_scenario import OTHER, SAVED, Job, Make, State, filled, leaves, load, parts, require_equal
from dcp_tensor_scenarios import ONE, UNEVEN, spread
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh

import ckptcore
from ckptcore.errors import CkptError


def mixed(job: Job, places: Any = ONE[1]) -> Make:
    """Sharded and plain tensors of several sizes, and values."""
    mesh = job.mesh()

    def state(seed: int) -> State:
        many = {f"w{n}": spread((n + 3, 5), mesh, places) for n in range(6)}
        plain = {"p": torch.zeros(17), "s": torch.zeros(())}
        return filled(
            {"model": many, **plain, "step": seed, "args": {"lr": seed / 3, "names": ["a", seed]}}, seed
        )

    return state


def below(job: Job, name: object) -> Job:
    """The same scenario in a folder of its own."""
    folder = job.folder / str(name)
    job.alone(lambda: folder.mkdir())
    return Job(job.name, job.rank, job.world, folder, job.checks)


def writer_options(job: Job) -> None:
    """Files per item or per rank, threads, copies ahead; safetensors items, which torch cannot load."""
    for n, options in enumerate(
        (
            {"single_file_per_rank": False},
            {"single_file_per_rank": False, "thread_count": 2},
            {"thread_count": 3},
            {"per_thread_copy_ahead": 10, "sync_files": False},
            {"cache_staged_state_dict": True},
        )
    ):
        part = below(job, n)
        writer = FileSystemWriter(part.folder / "saved", **options)
        dcp.save(mixed(job)(SAVED), storage_writer=writer)
        part.loads(part.folder / "saved", mixed(job, ONE[2]))
        part.rewrites(part.folder / "saved", mixed(job, ONE[2]), ("mesh",))
    path = job.folder / "safetensors"
    dcp.save(
        mixed(job)(SAVED),
        storage_writer=FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS),
    )
    with pytest.raises(dcp.CheckpointException):
        load(mixed(job)(OTHER), path)
    dist.barrier()
    ours = mixed(job)(OTHER)
    ckptcore.load_into(ckptcore.open(str(path)), ours)
    require_equal(ours, mixed(job)(SAVED), "what was saved")
    job.checks.append("load_into equals what was saved; torch has no loader")
    job.rewrites(path, mixed(job), ("dcp", "mesh"))


class Rot13(StreamTransformExtension):
    """A transformation of another program: what it writes is not to be guessed."""

    @staticmethod
    def from_descriptor(version: str) -> Rot13:
        return Rot13()

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                return int(output.write(bytes(data).translate(bytes((n + 13) % 256 for n in range(256)))))

            def flush(self) -> None:
                output.flush()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        raise NotImplementedError


def extensions(job: Job) -> None:
    """zstd is read; a transformation that is unknown is refused, whatever is asked for."""
    zstd = job.folder / "saved"
    dcp.save(mixed(job)(SAVED), storage_writer=FileSystemWriter(zstd, _extensions=[ZStandard()]))
    job.loads(zstd, mixed(job, ONE[2]))
    job.rewrites(zstd, mixed(job, ONE[2]), ("dcp", "mesh"))
    unknown = job.folder / "unknown"
    dcp.save(mixed(job)(SAVED), storage_writer=FileSystemWriter(unknown, _extensions=[Rot13()]))
    state = mixed(job)(OTHER)
    with pytest.raises(CkptError, match="rot13"):
        ckptcore.load_into(ckptcore.open(str(unknown)), state)
    require_equal(state, mixed(job)(OTHER), "what was there")
    job.checks.append("an unknown transformation is refused")


def fsspec(job: Job) -> None:
    """torch's writer and reader of URLs."""
    path = job.folder / "saved"
    dcp.save(mixed(job)(SAVED), storage_writer=FsspecWriter(f"file://{path}"))

    def by_torch(state: State, path: Path) -> None:
        dcp.load(state, storage_reader=FsspecReader(f"file://{path}"))

    job.loads(path, mixed(job, ONE[2]), by_torch=by_torch)
    job.rewrites(path, mixed(job, ONE[2]), ("dcp", "mesh"), by_torch=by_torch)


def overwritten(job: Job) -> None:
    """A second save into the folder of a first, whose files it replaces in part; or it is refused."""
    path, small = job.folder / "saved", mixed(job)
    older = filled({"old": spread((40, 9), job.mesh(), ONE[1]), "gone": 1}, OTHER)
    dcp.save(older, storage_writer=FileSystemWriter(path, thread_count=3))
    dcp.save(small(SAVED), storage_writer=FileSystemWriter(path, overwrite=True))
    job.loads(path, small)
    job.rewrites(path, small, ("dcp", "mesh"))
    with pytest.raises(dcp.CheckpointException):
        dcp.save(small(OTHER), storage_writer=FileSystemWriter(path, overwrite=False))
    dist.barrier()
    job.loads(path, small, what="a refused save has changed nothing")


def one_process(job: Job) -> None:
    """``no_dist=True``: one rank saves alone what it has, and every rank loads."""

    def full(seed: int) -> State:
        return filled({"model": {"a": torch.zeros(UNEVEN), "b": torch.zeros(3)}, "step": seed}, seed)

    def cut(seed: int) -> State:
        return filled({"model": {"a": spread(UNEVEN, job.mesh(), ONE[1])}, "step": seed}, seed)

    def alone(state: State, path: Path) -> None:
        dcp.load(state, checkpoint_id=path, no_dist=True)

    path = job.folder / "saved"
    job.alone(lambda: dcp.save(full(SAVED), checkpoint_id=path, no_dist=True))
    job.loads(path, full, by_torch=alone)
    job.loads(path, cut, unused=lambda name: name == "model.b")
    job.rewrites(path, full, ("dcp", "mesh"), by_torch=alone)


def process_groups(job: Job) -> None:
    """Half of the ranks save and load by themselves, each half its own; then all load either."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = job.rank // 2
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))

    def half(seed: int) -> State:
        made_state = {"w": spread(UNEVEN, mesh, (*ONE[0], *ONE[1])), "half": 10 * seed + mine}
        return filled(made_state, seed + mine)

    def by_half(state: State, path: Path) -> None:
        dcp.load(state, checkpoint_id=path, process_group=halves[mine])

    path = job.folder / f"half{mine}"
    dcp.save(half(SAVED), checkpoint_id=path, process_group=halves[mine])
    dist.barrier()
    ours, theirs = half(OTHER + 5), half(OTHER + 5)
    assert ckptcore.load_into(ckptcore.open(str(path)), ours) == []
    by_half(theirs, path)
    require_equal(ours, theirs, "what torch loads")
    require_equal(ours, half(SAVED), "what was saved")
    job.checks.append("load_into equals torch's load in the group")

    def every(seed: int) -> State:
        return filled({"w": spread(UNEVEN, job.mesh(), ONE[2]), "half": 10 * seed}, seed)

    job.loads(job.folder / "half0", every)
    job.rewrites(job.folder / "half0", every, ("dcp", "mesh"))


def without_collectives(job: Job) -> None:
    """``use_collectives=False``: every rank writes metadata of its own."""
    path = job.folder / "saved"

    def saved(seed: int) -> State:
        return filled(
            {"w": spread((8, 5), job.mesh(), ONE[1]), "own": {"x": spread((2, 4), job.mesh(), ONE[2])}}, seed
        )

    dcp.save(saved(SAVED), checkpoint_id=path, use_collectives=False)
    dist.barrier()
    job.loads(path, saved)

    def other(seed: int) -> State:
        return filled({"w": spread((8, 5), job.mesh(), ONE[2]), "own": {"x": torch.zeros(2, 4)}}, seed)

    # Cut in another way, torch finds but the chunks of this rank's own metadata.
    ours = other(OTHER)
    assert ckptcore.load_into(ckptcore.open(str(path)), ours) == []
    require_equal(ours, other(SAVED), "what was saved")
    job.checks.append("load_into equals what was saved")
    job.rewrites(path, other, ("dcp", "mesh"))


def changed(state: State) -> None:
    """The next step of training, while the save goes on."""
    for tensor in leaves(state).values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.mul_(2).sub_(1)


def finished(saving: Any) -> None:
    """Wait for an asynchronous save."""
    future = saving if isinstance(saving, Future) else saving.upload_completion
    future.result(timeout=300)
    dist.barrier()


def asynchronously(job: Job, make: Make, loaded: Make, **options: Any) -> None:
    path, state = job.folder / "saved", make(SAVED)
    saving = dcp.async_save(state, checkpoint_id=path, **options)
    if not isinstance(saving, Future):
        saving.staging_completion.result(timeout=300)
    changed(state)
    finished(saving)
    job.loads(path, loaded)
    job.rewrites(path, loaded, ("mesh",))


def async_threads(job: Job) -> None:
    """Training goes on while a thread writes; what is saved is the state from before."""
    asynchronously(below(job, "tensors"), mixed(job), mixed(job, ONE[2]))
    asynchronously(below(job, "model"), made(job, fsdp2), made(job, fsdp2))


def async_staging(job: Job) -> None:
    """Stagers: blocking, shared memory, a thread; and one that is used for several saves (cached)."""
    stagers: dict[str, Callable[[], Any]] = {
        "blocking": lambda: BlockingAsyncStager(),
        "plain": lambda: DefaultStager(StagingOptions(False, False, False, False)),
        "shared": lambda: DefaultStager(StagingOptions(False, True, False, False)),
        "thread": lambda: DefaultStager(StagingOptions(False, True, True, False)),
    }
    for name, stager in stagers.items():
        asynchronously(below(job, name), mixed(job), mixed(job, ONE[2]), async_stager=stager())
    cached, state = DefaultStager(StagingOptions(False, False, False, False)), mixed(job)(SAVED)
    for n in range(3):
        finished(
            dcp.async_save(filled(state, n + 10), checkpoint_id=job.folder / str(n), async_stager=cached)
        )
    cached.close()
    for n in range(3):
        ours = mixed(job, ONE[2])(OTHER)
        assert ckptcore.load_into(ckptcore.open(str(job.folder / str(n))), ours) == []
        require_equal(ours, filled(mixed(job, ONE[2])(SAVED), n + 10), f"what save {n} was given")
        job.checks.append("each save of a stager that is kept has its own values")


def async_processes(job: Job) -> None:
    """A process beside each rank writes."""
    asynchronously(job, mixed(job), mixed(job, ONE[2]), async_checkpointer_type=AsyncCheckpointerType.PROCESS)


def torch_save_files(job: Job) -> None:
    """torch's converters between one file and a folder, and its load of one file into sharded tensors."""

    def full(seed: int) -> State:
        return filled({"model": {"a": torch.zeros(8, 5), "b": torch.zeros(3)}, "step": seed}, seed)

    def cut(seed: int) -> State:
        mesh = job.mesh()
        state = {"a": spread((8, 5), mesh, ONE[2]), "b": spread((3,), mesh, ONE[0])}
        return filled({"model": state, "step": seed}, seed)

    file, folder, back = (job.folder / name for name in ("one.pt", "folder", "back.pt"))
    job.alone(lambda: torch.save(full(SAVED), file))
    job.alone(lambda: torch_save_to_dcp(file, folder))
    job.alone(lambda: dcp_to_torch_save(folder, back))
    job.loads(folder, cut)
    job.rewrites(folder, cut, ("dcp", "mesh", "pt"))

    def from_file(state: State, path: Path) -> None:
        # torch's reader sends full tensors to all ranks, and refuses values.
        inner = {"model": {n: torch.zeros(t.shape) for n, t in state["model"].items()}}
        reader = BroadcastingTorchSaveReader()
        dcp.load(inner, storage_reader=reader, planner=DynamicMetaLoadPlanner(), checkpoint_id=path)
        for name, tensor in state["model"].items():
            for part, at in parts(tensor):
                part.copy_(
                    inner["model"][name][tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))]
                )
        state["step"] = torch.load(path, weights_only=True)["step"]

    for path in (file, back):
        job.loads(path, cut, by_torch=from_file)
    for name in ("dcp", "mesh"):
        job.rewrites(file, cut, (name,))


def older_metadata(job: Job) -> None:
    """`.metadata` as older versions of torch wrote it: fields that came later are absent."""
    make = mixed(job)
    fields = {
        "2.0": ({"storage_meta", "version"}, {"transform_descriptors"}),
        "2.3": ({"version"}, {"transform_descriptors"}),
        "2.6": ({"version"}, set[str]()),
    }
    for version, (missing, of_storage) in fields.items():
        part = below(job, version)
        path = part.folder / "saved"
        dcp.save(make(SAVED), checkpoint_id=path)

        def strip(path: Path = path, missing: Any = missing, of_storage: Any = of_storage) -> None:
            metadata = pickle.loads((path / ".metadata").read_bytes())
            for name in missing:
                metadata.__dict__.pop(name, None)
            for info in metadata.storage_data.values():
                for name in of_storage:
                    info.__dict__.pop(name, None)
            (path / ".metadata").write_bytes(pickle.dumps(metadata))

        job.alone(strip)
        part.loads(path, mixed(job, ONE[2]))
        part.rewrites(path, mixed(job, ONE[2]), ("dcp", "mesh"))


def older_names(job: Job) -> None:
    """Before torch 2.4 a dict or list without tensors was one object under its own name."""
    path = job.folder / "saved"

    def state(seed: int) -> State:
        inner = made(job, fsdp2)(seed)
        return {
            **inner,
            "args": {"lr": seed / 3, "deep": {"n": seed}},
            "list": [seed, {"x": seed}],
            "step": seed,
        }

    _version._derived_version = "2_3"
    try:
        dcp.save(state(SAVED), checkpoint_id=path)
    finally:
        _version._derived_version = None
    assert "args" in dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    job.loads(path, state)
    job.rewrites(path, state, ("dcp", "mesh"))

    def on_two_axes(seed: int) -> State:
        return state(seed) | made(job, hsdp2)(seed)

    job.loads(path, on_two_axes)


RUNS: dict[str, Callable[[Job], None]] = {
    f.__name__: f
    for f in (
        writer_options,
        extensions,
        fsspec,
        overwritten,
        one_process,
        process_groups,
        without_collectives,
        async_threads,
        async_staging,
        async_processes,
        torch_save_files,
        older_metadata,
        older_names,
    )
}
