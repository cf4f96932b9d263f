"""Receiver: how long does a sender wait for its 202, at so many requests a second?

    python tests/benchmarks/receiver.py [--rate 200] [--seconds 20] [--catalog URL] [--json]

Signed requests over loopback, each with an id of its own, at fixed times: a request that had to wait for its
turn has waited since its time, so that a receiver which stalls is not asked less. Exit status 1 when the 99th
percentile is over 50 ms, or an answer is not 202.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "deployments"))

import live
import webhooks
from standardwebhooks import Webhook

BOUND_MS = 50.0
CONNECTIONS = 32


def request(number: int) -> bytes:
    """A signed request as it goes over the wire."""
    hook = webhooks.HOOKS["standard-webhooks"]
    id, now = f"msg_{number}_{time.time_ns()}", datetime.now(UTC)
    signature = Webhook(webhooks.WHSEC).sign(id, now, hook.body.decode())
    lines = [
        f"POST {hook.path} HTTP/1.1", "host: receiver", "content-type: application/json",
        f"content-length: {len(hook.body)}", f"webhook-id: {id}",
        f"webhook-timestamp: {int(now.timestamp())}", f"webhook-signature: {signature}",
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + hook.body


async def answer(reader: asyncio.StreamReader) -> int:
    """The status of one response, its body read to the end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length:")[1].split()[0])
    await reader.readexactly(length)
    return int(head.split()[1])


async def load(url: str, rate: float, seconds: float) -> tuple[list[float], Counter[int]]:
    """Milliseconds from a request's time to its answer, and how many answers of each status."""
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


def cpu_seconds(process: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description="Measure the receiver's answers.")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--catalog", help="URL; by default a SQLite file")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    config = webhooks.CONFIG if given.catalog is None else f'catalog = "{given.catalog}"\n{webhooks.CONFIG}'
    with tempfile.TemporaryDirectory() as folder, live.receiver(Path(folder), config=config) as running:
        asyncio.run(load(running.url, 50, 1))  # what is imported late, is now
        before = cpu_seconds(running.process.pid)
        waits, statuses = asyncio.run(load(running.url, given.rate, given.seconds))
        used = cpu_seconds(running.process.pid) - before
    waits.sort()
    figures = {
        f"p{q:g}_ms": round(waits[min(int(len(waits) * q / 100), len(waits) - 1)], 1) for q in (50, 95, 99)
    }
    figures |= {"max_ms": round(waits[-1], 1), "rate": given.rate, "requests": len(waits)}
    figures["cpu_ms_each"] = round(1000 * used / len(waits), 2)
    ok = figures["p99_ms"] <= BOUND_MS and set(statuses) == {202}
    if given.json:
        print(json.dumps(figures | {"statuses": dict(statuses), "ok": ok}))
    else:
        print(", ".join(f"{name} {value}" for name, value in figures.items()), dict(statuses))
        print("fine" if ok else f"not fine: at most {BOUND_MS:.0f} ms and nothing but 202")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
