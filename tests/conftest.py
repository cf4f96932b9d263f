"""Define shared fixtures: the samples, and how tests run the command line."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import re
import runpy
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import driver
import gaps
import grids
import postgres as postgresql
import pytest
import quick_catalogs
import quick_disks
import samples
import soaks
import warm
from hypothesis import HealthCheck, settings
from sqlalchemy import make_url

from ckptcore.catalog import upgrade
from ckptcore.catalog.heartbeats import RUNNING

FOLDERS = itertools.count()  # those of the tests of a process

# How long examples take is no property of the code: other work on the machine stretches them.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--corpus",
        metavar="DIR",
        type=Path,
        default=None,
        help="also run the conformance tests on every sample folder in DIR: <family>/<sample>/ or "
        "<sample>/, with a checkpoint folder and beside it expected*.safetensors, expected_all.pt",
    )
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help="first seed of the tests on fresh checkpoints; they print the one they used",
    )


def pytest_configure(config: pytest.Config) -> None:
    # More tests run at a time than there are cores: torch's threads would mostly wait for each other, and
    # they do that at full speed. It is not imported yet; what tests start inherits this.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Torch and the collected tests are a million objects that stay: to look through them again every few
    # thousand new ones takes a fifteenth of the time of all tests. What tests start does the same.
    startup = Path(__file__).parent / "helpers/startup"
    runpy.run_path(str(startup / "sitecustomize.py"))
    paths = (str(startup), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # Here, so that forks of the process that collects have it, too.
    quick_disks.install()
    # A shell starts what runs in the background with Ctrl-C ignored, and every child inherits that.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[samples.SAMPLES] = samples.discover(
        unpacked(config), config.getoption("--corpus", default=None)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forks of a process that has imported what they collect."""
    warm.prepare(config, specs)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What repeats for long may take long, also on a machine that does other work; and what a fixture makes
    once for a module is made by one worker. Of a grid, what a slice does not need is a soak."""
    for item in grids.beyond(items):
        item.add_marker(pytest.mark.soak)
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))
        if shares(item) and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """A test that is a soak is not collected where nobody asks for it."""
    own = getattr(obj, "pytestmark", []) if inspect.isfunction(obj) else []
    return [] if soaks.is_soak(own) and not soaks.are_asked_for(collector.config) else None


def pytest_collection_finish() -> None:
    """What is there now stays to the end: no collection of garbage has to look through it."""
    gc.collect()
    gc.freeze()


def shares(item: pytest.Item) -> bool:
    """Whether a test asks for a fixture that its whole module has together."""
    asked = getattr(item, "_fixtureinfo", None)
    made = asked.name2fixturedefs.values() if asked else ()
    return any(definition.scope == "module" for definitions in made for definition in definitions)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Only test_*.py and conftest.py are collected: the rest is modules that tests import, and programs that
    run by themselves, some in environments of other libraries; none of them has doctests."""
    name = collection_path.name
    return True if name.endswith(".py") and not name.startswith(("test_", "conftest.")) else None


def unpacked(config: pytest.Config) -> list[Path]:
    """Return the cache folder with the unpacked archives of samples, each unpacked once."""
    cache = Path(str(config.rootpath)) / ".pytest_cache" / "samples"
    return [samples.unpack(cache, archive) for archive in samples.ARCHIVES]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`sample` is every sample; the other names are those of `SELECT`."""
    for name in SELECT.keys() & set(metafunc.fixturenames):
        found = [s for s in metafunc.config.stash[samples.SAMPLES] if SELECT[name](s)]
        metafunc.parametrize(name, found, ids=[s.name for s in found])


SELECT: dict[str, Callable[[samples.Sample], bool]] = {
    "sample": lambda s: True,
    "readable": lambda s: bool(gaps.readable(s)),
    "refused": lambda s: bool(gaps.refused(s)),
    "recoverable": lambda s: gaps.lookup(gaps.RECOVERABLE, s.name) is not None,
    "other": lambda s: not s.dcp_folders,
}


@pytest.fixture(autouse=True)
def _no_renewals_after_a_test() -> Iterator[None]:
    """What a test leaves running, as after a kill: no thread renews its row in a catalog that is gone."""
    before = set(RUNNING._renewed)
    yield
    RUNNING.drop(RUNNING._renewed.keys() - before)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test's own.

    pytest's fixture reads the names of all earlier ones for the next free number, and moves a link to it: one
    percent of the time of thousands of tests.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}-{next(FOLDERS)}", numbered=False)


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks transformers in this process, which has imported it already, and not in one of its own."""
    from strict_exports import ask_here

    monkeypatch.setattr("ckptcore.planning.transformers_process.ask", ask_here)


@pytest.fixture(scope="session")
def cli() -> Iterator[driver.Cli]:
    """The command line, each call in a fresh forked process with limits of its own."""
    with driver.Cli() as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgresql.Server]:
    """A PostgreSQL server of the session's own."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'ckptcore[postgres]'")
    if postgresql.programs() is None:
        pytest.skip("no PostgreSQL programs on this machine: apt-get install postgresql")
    with postgresql.serving() as server:
        yield server


@pytest.fixture(scope="session")
def upgraded(postgres: postgresql.Server) -> Iterator[str]:
    """The name of a PostgreSQL catalog to copy, which is faster than migrating."""
    with postgres.database() as url:
        upgrade(url)
        yield str(make_url(url).database)


@pytest.fixture(scope="session", autouse=True)
def _quick_catalogs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Catalogs of one process share what is the same in all of them."""
    with quick_catalogs.quick(tmp_path_factory.mktemp("quick")):
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever a test runs without naming a catalog: it is not the user's. No answer is kept, either."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTCORE_CACHE", "")
        patch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite"))
        yield
