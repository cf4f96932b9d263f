"""Test sources and destinations on a web server, Google Cloud Storage and Azure, where emulators run.

The web server is in this process. The others need their extra and an emulator, which tests do not install:
``pip install gcsfs adlfs gcp-storage-emulator "setuptools<80"`` and ``npm install azurite`` (its program in
PATH).
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import fsspec
import pytest
from ceph import free_port, wait_for
from paths import FIXTURES

import ckptcore
from ckptcore.errors import CkptError, SourceChanged
from ckptcore.planning.request import Settings

SAMPLES = {
    "dcp": FIXTURES / "torch" / "dcp_torchtitan_like_4r" / "ckpt",
    "safetensors": FIXTURES / "torch" / "hf_sharded_4r" / "ckpt",
}
MEANS = Settings(memory=64 << 20, workers=2, fingerprint=True)
# A public key of Azure's emulators.
AZURE = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50u"
    "SRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
)


@dataclass(frozen=True)
class Place:
    """A store: its URL, and how a test writes and removes a file there."""

    url: str
    put: Callable[[str, bytes], object]
    remove: Callable[[str], object]

    def upload(self, folder: Path, name: str) -> str:
        for file in (f for f in folder.rglob("*") if f.is_file()):
            self.put(f"{name}/{file.relative_to(folder)}", file.read_bytes())
        return f"{self.url}/{name}"


@pytest.fixture(scope="module")
def http() -> Iterator[Place]:
    files: dict[str, bytes] = {}
    handler = type("Bound", (_Files,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield Place(f"http://127.0.0.1:{server.server_address[1]}", files.__setitem__, files.__delitem__)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def gs() -> Iterator[Place]:
    for name in ("gcsfs", "gcp_storage_emulator"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    from fsspec.config import conf
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        # gcsfs asks over gRPC what kind of bucket it is, without end where only HTTP is answered.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        patch.setitem(conf, "gs", {"token": "anon"})
        yield _place("gs://bucket")
    server.stop()


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    program = shutil.which("azurite-blob")
    if importlib.util.find_spec("adlfs") is None or program is None:
        pytest.skip("adlfs or azurite-blob is not installed")
    port = free_port()
    folder = tmp_path_factory.mktemp("azurite")
    options = ["--blobPort", str(port), "--location", str(folder), "--silent", "--skipApiVersionCheck"]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen([program, *options], stdout=subprocess.DEVNULL) as process,
    ):
        wait_for(port)
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", AZURE.format(port=port))
        fsspec.filesystem("az").mkdir("bucket")
        yield _place("az://bucket")
        process.terminate()


# Clients of these stores warn of what they lack and what they leave open.
_QUIET = pytest.mark.filterwarnings(
    *(f"ignore::{name}Warning" for name in ("Import", "Deprecation", "Future", "Resource"))
)
WRITABLE = [pytest.param(name, marks=(pytest.mark.soak, _QUIET)) for name in ("gs", "az")]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue(request.param)
    return found


every_store = pytest.mark.parametrize("place", ["http", *WRITABLE], indirect=True)


@every_store
@pytest.mark.parametrize("form", SAMPLES)
def test_a_source_there_is_read_and_checked_as_a_local_one(place: Place, form: str, tmp_path: Path) -> None:
    folder = SAMPLES[form]
    url = place.upload(folder, f"read-{form}")
    far, near = (ckptcore.check(ckptcore.open(source), "bytes") for source in (url, str(folder)))
    assert far.ok
    assert [(f.code, f.fqn) for f in far.findings] == [(f.code, f.fqn) for f in near.findings]
    made = {
        source: ckptcore.convert(source, str(tmp_path / f"{n}.safetensors"), settings=MEANS, catalog=False)
        for n, source in enumerate((url, str(folder)))
    }
    assert made[url].fingerprint == made[str(folder)].fingerprint
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()


@every_store
def test_an_object_that_changes_between_plan_and_execution(place: Place, tmp_path: Path) -> None:
    url = place.upload(SAMPLES["safetensors"], "changed")
    prepared = ckptcore.prepare(url, str(tmp_path / "out"), verb="export", settings=MEANS)
    name = min(f.name for f in SAMPLES["safetensors"].glob("*.safetensors"))
    data = (SAMPLES["safetensors"] / name).read_bytes()
    place.put(f"changed/{name}", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(SourceChanged):
        ckptcore.execute(prepared)
    assert not (tmp_path / "out").exists()


@every_store
def test_a_save_that_did_not_finish(place: Place, tmp_path: Path) -> None:
    url = place.upload(SAMPLES["dcp"], "unfinished")
    place.remove("unfinished/.metadata")
    shutil.copytree(SAMPLES["dcp"], tmp_path / "near")
    (tmp_path / "near" / ".metadata").unlink()
    codes = []
    for source in (url, str(tmp_path / "near")):
        with pytest.raises(CkptError) as caught:
            ckptcore.convert(source, str(tmp_path / "out"), verb="export", catalog=False)
        codes.append(caught.value.code)
    assert codes[0] == codes[1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", WRITABLE, indirect=True)
@pytest.mark.parametrize("form", SAMPLES)
def test_a_destination_there_is_equal_to_a_local_one(place: Place, form: str, tmp_path: Path) -> None:
    source = place.upload(SAMPLES[form], f"source-{form}")
    options = {"verb": "export", "max_file_size": 50_000, "settings": MEANS, "catalog": False}
    near = ckptcore.convert(str(SAMPLES[form]), str(tmp_path / "out"), **options)
    for way, start in (("local", str(SAMPLES[form])), ("there", source)):
        out = f"{place.url}/out-{form}-{way}"
        made = ckptcore.convert(start, out, **options)
        assert made.fingerprint == near.fingerprint
        assert ckptcore.check(ckptcore.open(out), "bytes").ok
        fs, path = fsspec.url_to_fs(out, use_listings_cache=False)
        far = {name.removeprefix(path).lstrip("/"): fs.cat_file(name) for name in fs.find(path)}
        files = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
        assert far.keys() == files.keys()
        files.pop("README.md"), far.pop("README.md")  # it names the source
        assert far == files
    above, root = fsspec.url_to_fs(place.url, use_listings_cache=False)
    assert not [name for name in above.find(root) if ".ckptcore" in name]


class _Files(BaseHTTPRequestHandler):
    """A web server with folders as pages of links, and ranges."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        data = self.files.get(path)
        if data is not None:
            self._file(data)
            return
        prefix = f"{path}/" if path else ""
        below = {n.removeprefix(prefix).partition("/") for n in self.files if n.startswith(prefix)}
        names = sorted({name + slash for name, slash, _ in below})
        page = "".join(f'<a href="/{prefix}{name}">{name}</a>\n' for name in names).encode()
        self._answer(200 if names else 404, page, {"Content-Type": "text/html"})

    do_HEAD = do_GET

    def _file(self, data: bytes) -> None:
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._answer(200, data, headers)
            return
        begin, _, end = wanted.removeprefix("bytes=").partition("-")
        first, last = int(begin), min(int(end or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._answer(206, data[first : last + 1], headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _place(url: str) -> Place:
    fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
    return Place(
        url,
        lambda name, data: fs.pipe_file(f"{root}/{name}", data),
        lambda name: fs.rm_file(f"{root}/{name}"),
    )
