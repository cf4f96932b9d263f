"""Engine: on which machines do write tasks run?

``threads``              in this process, a few at a time; the default
``dask=tcp://HOST:8786`` on the workers of a Dask cluster; ``dask`` alone starts one here
``ray=HOST:6379``        on the workers of a Ray cluster; ``ray`` alone starts one here

Workers on other machines see source and destination under the same paths or URLs, and have the same
packages: a task is a plan's URL and the numbers of its files. They must reach the Prefect server of this
process, too: without its URL each would start a server of its own.
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

VARIABLE = "CKPTCORE_ENGINE"
KINDS = ("threads", "dask", "ray")
CONNECT_SECONDS = 30.0
# What the loss of a worker looks like, by the class names of errors that need not be installed.
LOST = frozenset({"KilledWorker", "WorkerCrashedError", "NodeDiedError", "OwnerDiedError", "ObjectLostError"})


@dataclass(frozen=True, slots=True)
class Engine:
    """kind: one of `KINDS`. address: of a running cluster's scheduler; None for one of our own."""

    kind: str
    address: str | None = None

    @property
    def here(self) -> bool:
        """Whether tasks share this process, its memory budget and its threads."""
        return self.kind == "threads"


HERE = Engine("threads")


def engine(text: str | None) -> Engine:
    """An engine by its name; raises `UsageError`.

    >>> engine("threads"), engine("dask=tcp://10.0.0.1:8786")
    (Engine(kind='threads', address=None), Engine(kind='dask', address='tcp://10.0.0.1:8786'))
    """
    spelled = text or os.environ.get(VARIABLE) or "threads"
    kind, _, address = spelled.partition("=")
    if kind not in KINDS or (kind == "threads" and address):
        raise UsageError(
            f"{spelled!r} is no engine", hint="threads, dask, dask=tcp://HOST:8786, ray or ray=HOST:6379"
        )
    return Engine(kind, address or None)


class Crew:
    """What an engine gives while it runs. slots: tasks it can run at a time."""

    def __init__(self, runner: Any, slots: int) -> None:
        self._runner, self.slots = runner, slots

    def submit(self, task: Task[..., Any], **parameters: Any) -> PrefectFuture[Any]:
        """Starts one task with these arguments."""
        found: PrefectFuture[Any] = self._runner.submit(task, parameters=parameters)
        return found


@contextmanager
def crew(engine: Engine, width: int, device: str) -> Iterator[Crew]:
    """Runs an engine: ``width`` workers where we start them, those of the cluster otherwise.

    device: where a task wants a GPU, only workers that offer one get it (Dask: ``--resources GPU=1``).
    Raises `MissingDependency`, and `UsageError` when no cluster can be reached, or its workers no server.
    """
    with _OPEN[engine.kind](engine.address, width, device.startswith("cuda")) as running:
        yield running


@contextmanager
def _threads(address: str | None, width: int, gpu: bool) -> Iterator[Crew]:
    # Without a bound it starts a thread per task.
    runner: Any = ThreadPoolTaskRunner(max_workers=width)
    with runner:
        yield Crew(runner, width)


@contextmanager
def _dask(address: str | None, width: int, gpu: bool) -> Iterator[Crew]:
    try:
        import dask
        from distributed import Client
        from prefect_dask import DaskTaskRunner
    except ImportError as error:
        raise _missing("dask") from error
    with _serving("dask", address) as env:
        if address is None:
            offered = {"resources": {"GPU": 1}} if gpu else {}
            # Its scheduler serves HTTP even without a dashboard: by default on 8787, of which there is one.
            page = "127.0.0.1:0"
            own = {"n_workers": width, "threads_per_worker": 1, "processes": True, "dashboard_address": page}
            runner: Any = DaskTaskRunner(cluster_kwargs={**own, **offered, "env": env})
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
                yield Crew(runner, slots)
        finally:
            runner.__exit__(None, None, None)


@contextmanager
def _ray(address: str | None, width: int, gpu: bool) -> Iterator[Crew]:
    try:
        import ray
        from prefect_ray import RayTaskRunner
        from prefect_ray.context import remote_options
    except ImportError as error:
        raise _missing("ray") from error
    with _serving("ray", address) as env:
        own = {} if address else {"num_cpus": width, "include_dashboard": False}
        runner: Any = RayTaskRunner(address=address, init_kwargs={**own, "runtime_env": {"env_vars": env}})
        try:
            runner.__enter__()
        except (ConnectionError, RuntimeError) as error:
            raise _unreachable("ray", address, error) from error
        try:
            slots = int(ray.cluster_resources().get("GPU" if gpu else "CPU", width)) or width
            with remote_options(num_gpus=1) if gpu else nullcontext():
                yield Crew(runner, slots)
        finally:
            runner.__exit__(None, None, None)


_OPEN = {"threads": _threads, "dask": _dask, "ray": _ray}


@contextmanager
def _serving(name: str, address: str | None) -> Iterator[dict[str, str]]:
    """What workers in other processes must have in their environment, to speak to the server of this one.

    A server that ends with this process is good for workers on this machine alone. Raises `UsageError`.
    """
    url = get_current_settings().api.url
    if url is None and address is not None:
        raise UsageError(
            f"no Prefect server is configured that the {name} workers at {address} could reach",
            hint="start one (`prefect server start`), and set PREFECT_API_URL here and where the workers run",
        )
    # Workers get the settings with each task, and the environment for what runs beside it.
    if url is not None:
        yield {"PREFECT_API_URL": url}
        return
    from prefect.server.api.server import SubprocessASGIServer  # a second of imports

    server = SubprocessASGIServer()
    server.start()  # where it runs already, nothing happens
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        yield {"PREFECT_API_URL": server.api_url}


def _missing(name: str) -> MissingDependency:
    return MissingDependency(f"the {name} engine is not installed", hint=f"pip install 'ckptcore[{name}]'")


def _unreachable(name: str, address: str | None, error: Exception) -> UsageError:
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(
        f"no {name} cluster at {address or 'this machine'}: {told}",
        hint="start its scheduler, or name another engine",
    )


def is_lost(error: BaseException) -> bool:
    """Whether an error says that a worker went away, not that its work failed."""
    return type(error).__name__ in LOST
