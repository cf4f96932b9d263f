"""Serve numbers for Prometheus at ``/metrics``, on a port of their own.

`CatalogMetrics` reads the catalog when a monitor asks, so every process that serves it reports the same
numbers; the dashboard takes the highest of them. `ReceiverMetrics` and `WorkerMetrics` add what one process
knows itself. Names and labels are stable: dashboards and alerts of users depend on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ckptcore import __version__
from ckptcore.catalog import open_catalog
from ckptcore.catalog.database import clock
from ckptcore.catalog.figures import Figures, figures
from ckptcore.catalog.types import Outcome
from ckptcore.errors import CkptError, UsageError
from ckptcore.redaction import beginning
from ckptcore.utils.isolation import attempt, parsed_or_none

KEEP_SECONDS = 10.0  # several monitors cost the catalog one reading

_log = logging.getLogger("deployments.metrics")


class CatalogMetrics(Collector):
    """The numbers of a catalog, read at most once in `KEEP_SECONDS`.

    Args:
        read: Returns the numbers. An error becomes ``ckptcore_catalog_up 0``.
        clock: Returns seconds that only grow.
    """

    def __init__(self, read: Callable[[], Figures], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock, self._turn = read, clock, threading.Lock()
        self._cached: tuple[float, list[Metric]] | None = None

    def describe(self) -> list[Metric]:
        """Return nothing: registering must not read the catalog."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric, or only that the catalog does not answer."""
        with self._turn:
            if self._cached is None or self._clock() - self._cached[0] >= KEEP_SECONDS:
                self._cached = (self._clock(), self._metrics())
            metrics = self._cached[1]
        yield from metrics

    def _metrics(self) -> list[Metric]:
        began = time.perf_counter()
        metrics = attempt(lambda: list(_metrics_of(self._read())))
        if isinstance(metrics, CkptError):
            _log.warning("cannot read the catalog's numbers: %s", beginning(metrics.message, 300))
            return [_gauge("catalog_up", "Whether the catalog answered.", 0)]
        took = time.perf_counter() - began
        return [
            _gauge("catalog_up", "Whether the catalog answered.", 1),
            _gauge("catalog_read_seconds", "How long the catalog took to count all this.", took),
            *metrics,
        ]


def _metrics_of(read: Figures) -> Iterator[Metric]:
    """Yield every metric of the catalog."""
    now = read.at
    yield _labelled_gauge("inbox_events", "Events in the inbox.", "stage", read.inbox)
    yield _labelled_gauge("outbox_messages", "Notifications in the outbox.", "stage", read.outbox)
    yield _age("inbox_oldest_seconds", "Age of the oldest event that is not done.", read.oldest_event, now)
    yield from _conversions(read)
    stock, of_stock = sorted(read.stock.items()), ["kind", "state"]
    count = [(labels, number.checkpoints) for labels, number in stock]
    yield _family(GaugeMetricFamily, "checkpoints", "Checkpoints in the catalog.", of_stock, count)
    size = [(labels, number.nbytes) for labels, number in stock]
    yield _family(GaugeMetricFamily, "checkpoint_bytes", "Their bytes.", of_stock, size)
    yield _gauge("checkpoints_unproven", "Current checkpoints that were never verified.", read.unproven)
    yield _age(
        "oldest_unproven_seconds",
        "Age of the oldest current checkpoint that was never verified.",
        read.oldest_unproven,
        now,
    )
    yield _age(
        "oldest_proof_seconds",
        "Age of the last verification of the checkpoint that was verified the longest ago.",
        read.oldest_proof,
        now,
    )
    yield _labelled_gauge("open_findings", "Open findings of current checkpoints.", "severity", read.findings)
    yield _gauge("holds", "Holds in force.", read.holds)
    yield _gauge("set_aside_bytes", "Bytes of files that purges free.", read.set_aside_bytes)
    yield _gauge("obligations", "Deletions whose copies must not go.", read.obligations)
    yield _gauge(
        "lost_contents", "Contents under an obligation that no recorded checkpoint holds.", read.lost_contents
    )
    yield _gauge("catalog_bytes", "Size of the catalog's database.", read.database_bytes)


def _conversions(read: Figures) -> Iterator[Metric]:
    rows = sorted(read.conversions.items())
    running = [([verb], number) for (verb, state), number in rows if state == Outcome.RUNNING.value]
    yield _family(GaugeMetricFamily, "conversions_running", "Conversions that began.", ["verb"], running)
    ended = [(labels, number) for labels, number in rows if labels[1] != Outcome.RUNNING.value]
    yield _family(CounterMetricFamily, "conversions", "Ended conversions.", ["verb", "outcome"], ended)
    failed = [([code], number) for code, number in sorted(read.failures.items())]
    yield _family(CounterMetricFamily, "conversion_failures", "Failed conversions.", ["code"], failed)
    sums: dict[str, tuple[str, Callable[[Any], float]]] = {
        "read_bytes": ("Bytes that successful conversions read.", lambda work: work.bytes_in),
        "written_bytes": ("Bytes that successful conversions wrote.", lambda work: work.bytes_out),
        "seconds": ("Sum of the durations of successful conversions.", lambda work: work.seconds),
    }
    for name, (text, value) in sums.items():
        totals = [([verb], value(work)) for verb, work in sorted(read.work.items())]
        yield _family(CounterMetricFamily, f"conversion_{name}", text, ["verb"], totals)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"ckptcore_{name}", text, value=value)


def _labelled_gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    rows = [([key], value) for key, value in sorted(values.items())]
    return _family(GaugeMetricFamily, name, text, [label], rows)


def _family(
    kind: type[Any], name: str, text: str, labels: list[str], rows: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = kind(f"ckptcore_{name}", text, labels=labels)
    for values, number in rows:
        family.add_metric(list(values), number)
    return cast("Metric", family)


def _age(name: str, text: str, since: datetime | None, now: datetime) -> Metric:
    """Return the age in seconds; 0 if there is nothing to wait for, so that an alert can compare it."""
    return _gauge(name, text, 0.0 if since is None else max(0.0, (now - since).total_seconds()))


class ReceiverMetrics:
    """What a receiver counts itself: requests by source and result, and whether events are being started."""

    def __init__(self, registry: CollectorRegistry, trouble: Callable[[], str]) -> None:
        self._requests = Counter(
            "ckptcore_receiver_requests",
            "Requests to /hooks by their result: accepted, duplicate, ignored, or the name of the refusal.",
            ["source", "result"],
            registry=registry,
        )
        up = Gauge(
            "ckptcore_receiver_starting", "Whether accepted events are being started.", registry=registry
        )
        up.set_function(lambda: 0.0 if trouble() else 1.0)

    def count(self, source: str, result: str) -> None:
        """Count one request. source: a configured name, or "" for an unknown one."""
        self._requests.labels(source or "unknown", result).inc()


class WorkerMetrics:
    """What a worker knows itself: the processes of its runs, and their memory."""

    def __init__(self, registry: CollectorRegistry, processes: Callable[[], list[int]]) -> None:
        counted = Gauge(
            "ckptcore_worker_processes",
            "Processes of the worker and of the runs that it started.",
            registry=registry,
        )
        counted.set_function(lambda: len(processes()))
        memory = Gauge("ckptcore_worker_resident_bytes", "Their resident memory.", registry=registry)
        memory.set_function(lambda: sum(map(_resident, processes())))


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    import resource

    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def registry_of(catalog_url: str | None) -> CollectorRegistry:
    """Return a registry with this process, the version, and the numbers of a catalog.

    The catalog is opened when a monitor asks, and closed behind it: no connection stays open between.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    version = Gauge("ckptcore_build_info", "The version.", ["version"], registry=registry)
    version.labels(__version__).set(1)

    def read() -> Figures:
        with open_catalog(catalog_url, create=False) as catalog, catalog.reading() as conn:
            return figures(conn, clock(conn))

    registry.register(CatalogMetrics(read))
    return registry


@contextmanager
def serving(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """Serve ``/metrics`` from threads of this process; yields the port. Raises `UsageError`."""
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(
            f"cannot serve metrics at {host}:{port}: {error.strerror or error}",
            hint="--metrics-host must be an address of this machine, and the port free there; 0 picks one",
        ) from error
    server.set_app(_of_any_client(make_wsgi_app(registry)))
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _of_any_client(app: Callable[..., Any]) -> Callable[..., Any]:
    """Return the application with its usual format for clients whose Accept header it cannot parse."""

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if parsed_or_none(choose_encoder, environ.get("HTTP_ACCEPT", "")) is None:
            environ = environ | {"HTTP_ACCEPT": ""}
        return app(environ, start_response)

    return answer
