"""Engines: where write tasks run.

``threads``              in this process, a few at a time; the default
``dask=tcp://HOST:8786`` on the workers of a Dask cluster; ``dask`` alone starts one on this machine
``ray=HOST:6379``        on the workers of a Ray cluster; ``ray`` alone starts one on this machine

Workers on other machines need the same packages, and source and destination under the same paths or URLs: a
task gets a plan's URL and the indices of its files. They must also reach the Prefect server of this process.
Without its URL each worker would start its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from prefect import Task
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings
from prefect.task_runners import ThreadPoolTaskRunner

from ckptcore.errors import MissingDependency, UsageError
from ckptcore.utils.extras import install

VARIABLE = "CKPTCORE_ENGINE"
KINDS = ("threads", "dask", "ray")
CONNECT_SECONDS = 30.0
# Errors that mean a lost worker, by class name, because their packages need not be installed.
LOST = frozenset({"KilledWorker", "WorkerCrashedError", "NodeDiedError", "OwnerDiedError", "ObjectLostError"})


@dataclass(frozen=True, slots=True)
class Engine:
    """Where tasks run. kind: one of `KINDS`. address: of the cluster's scheduler; None starts a new one."""

    kind: str
    address: str | None = None

    @property
    def here(self) -> bool:
        """Whether tasks share this process, its memory budget and its threads."""
        return self.kind == "threads"


HERE = Engine("threads")


def engine(text: str | None) -> Engine:
    """Parse the name of an engine; None means `VARIABLE`, else threads. Raises `UsageError`.

    >>> engine("threads"), engine("dask=tcp://10.0.0.1:8786")
    (Engine(kind='threads', address=None), Engine(kind='dask', address='tcp://10.0.0.1:8786'))
    """
    spelled = text or os.environ.get(VARIABLE) or "threads"
    kind, _, address = spelled.partition("=")
    if kind not in KINDS or (kind == "threads" and address):
        raise UsageError(
            f"unknown engine {spelled!r}",
            hint="use threads, dask, dask=tcp://HOST:8786, ray or ray=HOST:6379",
        )
    return Engine(kind, address or None)


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that accepts tasks. runner: Prefect's task runner. slots: how many it runs at a time."""

    runner: Any
    slots: int

    def submit(self, task: Task[..., Any], **parameters: Any) -> PrefectFuture[Any]:
        """Start one task with these parameters."""
        future: PrefectFuture[Any] = self.runner.submit(task, parameters=parameters)
        return future


@contextmanager
def running_engine(engine: Engine, width: int, device: str) -> Iterator[RunningEngine]:
    """Start an engine, or connect to its cluster, and end or leave it on exit.

    Args:
        engine: the engine.
        width: the number of workers of a new cluster. An existing cluster has its own.
        device: for a GPU, only workers that offer one get tasks (Dask: ``--resources GPU=1``).

    Raises:
        MissingDependency: the engine is not installed.
        UsageError: the cluster cannot be reached, or its workers could not reach a Prefect server.
    """
    with _OPEN[engine.kind](engine.address, width, device.startswith("cuda")) as running:
        yield running


@contextmanager
def _threads(address: str | None, width: int, gpu: bool) -> Iterator[RunningEngine]:
    # Without `max_workers` it starts a thread for each task.
    runner: Any = ThreadPoolTaskRunner(max_workers=width)
    with runner:
        yield RunningEngine(runner, width)


@contextmanager
def _dask(address: str | None, width: int, gpu: bool) -> Iterator[RunningEngine]:
    """Yield a task runner of Dask: of the cluster at an address, or of one for this run."""
    try:
        import dask
        from distributed import Client
        from prefect_dask import DaskTaskRunner
    except ImportError as error:
        raise _missing("dask") from error
    with _serving("dask", address) as env:
        if address is None:
            offered = {"resources": {"GPU": 1}} if gpu else {}
            # The scheduler serves HTTP even without a dashboard, by default on the single port 8787.
            page = "127.0.0.1:0"
            cluster_settings = {
                "n_workers": width,
                "threads_per_worker": 1,
                "processes": True,
                "dashboard_address": page,
            }
            runner: Any = DaskTaskRunner(cluster_kwargs={**cluster_settings, **offered, "env": env})
        else:
            runner = DaskTaskRunner(address=address, client_kwargs={"timeout": CONNECT_SECONDS})
        try:
            started = runner.__enter__()
            client: Client = started.client  # connects
        except OSError as error:
            raise _unreachable("dask", address, error) from error
        try:
            threads: dict[str, int] = client.nthreads()  # type: ignore[no-untyped-call]  # as distributed has it
            slots = sum(threads.values()) or width
            with dask.annotate(resources={"GPU": 1}) if gpu else nullcontext():
                yield RunningEngine(runner, slots)
        finally:
            runner.__exit__(None, None, None)


@contextmanager
def _ray(address: str | None, width: int, gpu: bool) -> Iterator[RunningEngine]:
    try:
        import ray
        from prefect_ray import RayTaskRunner
        from prefect_ray.context import remote_options
    except ImportError as error:
        raise _missing("ray") from error
    with _serving("ray", address) as env:
        cluster_settings = {} if address else {"num_cpus": width, "include_dashboard": False}
        runner: Any = RayTaskRunner(
            address=address, init_kwargs={**cluster_settings, "runtime_env": {"env_vars": env}}
        )
        try:
            runner.__enter__()
        except (ConnectionError, RuntimeError) as error:
            raise _unreachable("ray", address, error) from error
        try:
            slots = int(ray.cluster_resources().get("GPU" if gpu else "CPU", width)) or width
            with remote_options(num_gpus=1) if gpu else nullcontext():
                yield RunningEngine(runner, slots)
        finally:
            runner.__exit__(None, None, None)


_OPEN = {"threads": _threads, "dask": _dask, "ray": _ray}


@contextmanager
def _serving(name: str, address: str | None) -> Iterator[dict[str, str]]:
    """Yield the environment by which workers in other processes reach the Prefect server of this one.

    An ephemeral server, which ends with this process, serves workers on this machine only. Raises
    `UsageError` if workers on other machines need it.
    """
    url = get_current_settings().api.url
    if address is not None and url is None:
        raise UsageError(
            f"the {name} workers at {address} need a Prefect server, and none is configured",
            hint="start one (`prefect server start`), and set PREFECT_API_URL here and on the workers",
        )
    # Tasks bring the settings to workers; the environment is for other processes there.
    if url is not None:
        yield {"PREFECT_API_URL": url}
        return
    from prefect.server.api.server import SubprocessASGIServer  # a second of imports

    server = SubprocessASGIServer()
    server.start()  # does nothing if it is already running
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        yield {"PREFECT_API_URL": server.api_url}


def _missing(name: str) -> MissingDependency:
    return MissingDependency(f"the {name} engine is not installed", hint=install(name))


def _unreachable(name: str, address: str | None, error: Exception) -> UsageError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(
        f"cannot reach a {name} cluster at {address or 'this machine'}: {reason}",
        hint="start its scheduler, or use another engine",
    )


def is_lost(error: BaseException) -> bool:
    """Return whether an error means that a worker was lost, not that its work failed."""
    return type(error).__name__ in LOST
