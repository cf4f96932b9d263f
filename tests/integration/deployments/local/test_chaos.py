"""Chaos: worker, receiver, Prefect's server and PostgreSQL are killed at random moments while work comes in.

What was accepted is converted, once, and inbox, disk and catalog say the same. CHAOS_SEED repeats the order
of kills and their pauses; CHAOS_KINDS, CHAOS_BATCHES, CHAOS_SIZE and CHAOS_EACH make it smaller; CHAOS_KEEP
leaves the folder with its logs.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from batches import PER_FILE, Batch, left_in_the_middle
from kills import Kills
from proof import has_ended, prove, standing
from stack import Stack, eventually, running_stack

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600), pytest.mark.xdist_group("chaos")]
KINDS = "worker,receiver,prefect,postgres"
GAP = (3.0, 9.0)  # seconds between two kills
PATIENCE = 900.0  # seconds from the last kill until everything is done
CHOSEN = f"""
[parameters]
max_file_size = "{PER_FILE}"
fingerprint = true

[sources.trainer]"""


@pytest.fixture
def stack() -> Iterator[Stack]:
    """The four processes of `make up`, in a separate folder, with an operator's choices."""
    with running_stack("ckptcore-chaos-", keep="CHAOS_KEEP" in os.environ) as running:
        config = running.folder / "receiver.toml"
        config.write_text(config.read_text().replace("\n[sources.trainer]", CHOSEN))
        yield running


@pytest.fixture
def kills(stack: Stack) -> Iterator[Kills]:
    """Kill services; `make up` has a supervisor that starts them again."""
    found = Kills(stack.folder)
    assert found.kill("receiver")  # it reads its configuration when it is started
    assert eventually(lambda: _is_ready(stack))
    found.count.clear()
    yield found
    stack.down("--patience", "0")


@pytest.mark.parametrize(
    ("batches", "size", "each"), [pytest.param(1, 3, 2, id="short"), pytest.param(4, 10, 5, id="long")]
)
def test_nothing_is_lost_and_nothing_is_done_twice(
    stack: Stack, kills: Kills, batches: int, size: int, each: int
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
    kinds = os.environ.get("CHAOS_KINDS", KINDS).split(",")
    batches = int(os.environ.get("CHAOS_BATCHES", batches))
    size, each = int(os.environ.get("CHAOS_SIZE", size)), int(os.environ.get("CHAOS_EACH", each))
    print(f"CHAOS_SEED={seed}", flush=True)
    draw, done = random.Random(seed), []
    for number in range(batches):
        batch = Batch(f"run-{number}", number, tuple(range(10, 10 * size + 1, 10)))
        batch.save(stack)
        order = [kind for kind in kinds for _ in range(each)]
        draw.shuffle(order)
        began = time.monotonic()
        with batch.announced(stack, draw, within=max(2.0, 0.6 * len(order) * sum(GAP) / 2)):
            for kind in order:
                _kill(stack, kills, kind, draw)
                print(f"{batch.run}: {time.monotonic() - began:6.1f} s: kill -9 {kind}", flush=True)
        assert batch.failed == {}
        assert eventually(lambda b=batch: has_ended(stack, b), PATIENCE, step=1.0), standing(stack, batch)
        statuses = Counter(answer["status"] for answer in batch.answers.values())
        waited = sorted(round(seconds, 1) for seconds in batch.seconds.values())
        print(
            f"{batch.run}: {time.monotonic() - began:.0f} s; senders {dict(statuses)}, after {waited} s",
            flush=True,
        )
        done.append(batch)
        for one in done:  # the earlier ones once more: they must be unchanged
            prove(stack, one)
    assert kills.count == {kind: each * batches for kind in kinds if each}
    print(f"kills {dict(kills.count)}", flush=True)


def _kill(stack: Stack, kills: Kills, kind: str, draw: random.Random) -> None:
    time.sleep(draw.uniform(*GAP))
    if kind == "worker" and draw.random() < 0.5:  # starting a run takes longer than a conversion this small
        eventually(lambda: bool(left_in_the_middle(stack.exports)), GAP[1], step=0.02)
        time.sleep(draw.uniform(0.0, 1.0))
    assert eventually(lambda: kills.kill(kind), 60, step=0.05), f"{kind} is not started again"


def _is_ready(stack: Stack) -> bool:
    try:
        return stack.receiver.get("/readyz").status_code == 200
    except httpx.HTTPError:
        return False
