"""Measure how long senders wait for the receiver's 202 at a given rate.

    python tests/benchmarks/receiver.py [--rate 200] [--seconds 20] [--catalog URL] [--json]

Signed requests go over loopback at fixed times, each with its own id. A wait counts from a request's fixed
time, so a receiver that stalls does not get fewer requests. Exit status 1 when the 99th percentile is over
50 ms, or an answer is not 202.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import live
import webhooks
from services import cpu_seconds, end_in_order
from standardwebhooks import Webhook

BOUND_MS = 50.0
CONNECTIONS = 32


def request(number: int) -> bytes:
    """Return the bytes of a signed request."""
    hook = webhooks.HOOKS["standard-webhooks"]
    id, now = f"msg_{number}_{time.time_ns()}", datetime.now(UTC)
    signature = Webhook(webhooks.WHSEC).sign(id, now, hook.body.decode())
    lines = [
        f"POST {hook.path} HTTP/1.1",
        "host: receiver",
        "content-type: application/json",
        f"content-length: {len(hook.body)}",
        f"webhook-id: {id}",
        f"webhook-timestamp: {int(now.timestamp())}",
        f"webhook-signature: {signature}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + hook.body


async def answer(reader: asyncio.StreamReader) -> int:
    """Return the status of one response; read its body to the end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length:")[1].split()[0])
    await reader.readexactly(length)
    return int(head.split()[1])


async def load(url: str, rate: float, seconds: float) -> tuple[list[float], Counter[int]]:
    """Return milliseconds from each request's time to its answer, and counts of answers by status."""
    host, port = url.removeprefix("http://").split(":")
    count = int(rate * seconds)
    requests = [request(number) for number in range(count)]
    waits: list[float] = []
    statuses: Counter[int] = Counter()
    turns: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        while True:
            due, data = await turns.get()
            if not data:
                break
            writer.write(data)
            statuses[await answer(reader)] += 1
            waits.append(1000 * (time.perf_counter() - due))
        writer.close()

    work = [asyncio.create_task(connection()) for _ in range(CONNECTIONS)]
    begin = time.perf_counter() + 0.5
    for number, data in enumerate(requests):
        due = begin + number / rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        turns.put_nowait((due, data))
    for _ in work:
        turns.put_nowait((0.0, b""))
    await asyncio.gather(*work)
    return waits, statuses


def verdict(waits: Sequence[float], statuses: Mapping[int, int], rate: float, cpu: float) -> dict[str, Any]:
    """Judge the answers: fast enough, and all 202.

    Args:
        waits: Milliseconds.
        statuses: Counts of answers by status.
        rate: Requests a second.
        cpu: Processor seconds of the receiver for them.

    Returns:
        The figures and the texts for the table.
    """
    ordered = sorted(waits)
    p50, p95, p99 = (ordered[min(int(len(ordered) * q / 100), len(ordered) - 1)] for q in (50, 95, 99))
    each = 1000 * cpu / len(ordered)
    return {
        "figure": p99,
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "max_ms": ordered[-1],
        "requests": len(ordered),
        "statuses": dict(statuses),
        "cpu_ms_each": each,
        "measured": f"p99 {p99:.1f} ms (p50 {p50:.1f}, p95 {p95:.1f}, most {ordered[-1]:.1f}),"
        f" {each:.2f} ms of processor each, {dict(statuses)}",
        "bound": f"p99 ≤ {BOUND_MS:.0f} ms at {rate:g} requests/s, all 202",
        "ok": p99 <= BOUND_MS and set(statuses) == {202},
    }


def main() -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the receiver's answers.")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--catalog", help="URL; by default a SQLite file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    end_in_order()
    config = webhooks.CONFIG if given.catalog is None else f'catalog = "{given.catalog}"\n{webhooks.CONFIG}'
    with tempfile.TemporaryDirectory() as folder, live.receiver(Path(folder), config=config) as running:
        asyncio.run(load(running.url, 50, 1))  # the first requests pay for late imports
        before = cpu_seconds(running.process.pid)
        waits, statuses = asyncio.run(load(running.url, given.rate, given.seconds))
        used = cpu_seconds(running.process.pid) - before
    result = verdict(waits, statuses, given.rate, used)
    if given.json:
        print(json.dumps(result))
    else:
        print(f"{result['measured']}; {result['bound']}: {'ok' if result['ok'] else 'MISSED'}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
