"""Sessions of S3 share what botocore knows about services; options are read as s3fs reads them."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from ckptcore.errors import SourceUnreadable
from ckptcore.store.objects import s3_options
from ckptcore.store.objects.client import S3Client
from ckptcore.store.objects.s3_options import S3Options
from ckptcore.store.objects.session import share_service_models


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_DATA_PATH", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("CKPTCORE_REQUEST_DEADLINE", "0")


def system(**given: object) -> S3FileSystem:
    return S3FileSystem(skip_instance_cache=True, **given)


def test_they_share_the_description_and_not_the_session() -> None:
    one, other = system(key="a", secret="b"), system(key="c", secret="d")
    share_service_models(one)
    share_service_models(other)
    assert one.session is not other.session
    loaders = [each.session.get_component("data_loader") for each in (one, other)]
    assert loaders[0] is loaders[1]
    before = one.session
    share_service_models(one)
    assert one.session is before


def test_another_folder_of_descriptions_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = system(), system()
    share_service_models(one)
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    share_service_models(other)
    loaders = [each.session.get_component("data_loader") for each in (one, other)]
    assert loaders[0] is not loaders[1]
    assert str(tmp_path) in loaders[1].search_paths


def test_a_session_of_the_users_own_is_kept() -> None:
    own = object()
    one = system(session=own)
    share_service_models(one)
    assert one.session is own


def test_another_file_system_is_left_alone() -> None:
    other = object()
    share_service_models(other)


def test_a_wrong_profile_is_reported_by_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    client = S3Client("s3://bucket/profile")
    with pytest.raises(SourceUnreadable, match="nobody"):
        client.head("a")


READ = ("anon", "endpoint_url", "key", "secret", "token", "use_ssl", "client_kwargs", "config_kwargs")
READ += ("s3_additional_kwargs", "req_kw", "kwargs", "connect_timeout")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"anon": True, "endpoint_url": "http://127.0.0.1:9", "use_ssl": False},
        {"key": "a", "secret": "b", "token": "c"},
        {"username": "a", "password": "b", "key": "", "secret": None},
        {"profile": "team", "requester_pays": True, "config_kwargs": {"read_timeout": 3}},
        {"client_kwargs": {"verify": False}, "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}},
        {"client_kwargs": None, "config_kwargs": None, "requester_pays": False, "profile": None},
    ],
    ids=lambda given: "-".join(given) or "none",
)
def test_options_are_read_as_s3fs_does(given: Mapping[str, Any]) -> None:
    one, other = S3Options.of(given), system(**given)
    assert {name: getattr(one, name) for name in READ} == {name: getattr(other, name) for name in READ}
    assert "secret" not in repr(S3Options.of({"secret": "secret", "client_kwargs": {"a": "secret"}}))


@pytest.mark.parametrize("given", [{"key": "a", "username": "b"}, {"secret": "a", "password": "b"}])
def test_two_options_of_one_meaning(given: Mapping[str, Any]) -> None:
    for read in (lambda: system(**given), lambda: S3Options.of(given)):
        with pytest.raises(KeyError, match="not both"):
            read()


def test_options_of_s3fs_without_a_meaning_here() -> None:
    """A new option of s3fs belongs into `S3Options`, or here."""
    others = "session version_aware cache_regions asynchronous loop max_concurrency fixed_upload_size"
    others += " default_block_size default_fill_cache default_cache_type local_expiry_check"
    named = set(inspect.signature(S3FileSystem.__init__).parameters) - {"self", "kwargs", *others.split()}
    assert named | {"profile"} == s3_options._KNOWN


_OPENS = """
import json, sys
from ckptcore.store.objects.client import S3Client
client = S3Client(sys.argv[1], json.loads(sys.argv[2]))
loaded = [name for name in ("fsspec", "s3fs", "aiohttp") if name in sys.modules]
print(json.dumps([type(client.file_system).__name__, client.file_system.key, client.bucket, loaded]))
"""


@pytest.mark.parametrize(
    ("url", "given", "environment", "expected"),
    [
        ("s3://bucket/a//b/", {"key": "k"}, {}, ["S3Options", "k", "bucket", []]),
        ("s3a://bucket/b", {}, {"FSSPEC_S3_KEY": "e"}, ["S3Options", "e", "bucket", ["fsspec"]]),
        (
            "s3://bucket/b",
            {"key": "k", "max_concurrency": 3},
            {},
            ["S3FileSystem", "k", "bucket", ["fsspec", "s3fs", "aiohttp"]],
        ),
    ],
)
def test_s3fs_is_loaded_where_it_is_needed(
    tmp_path: Path, url: str, given: Mapping[str, Any], environment: Mapping[str, str], expected: list[Any]
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FSSPEC")}
    env |= {"HOME": str(tmp_path), **environment}
    command = [sys.executable, "-c", _OPENS, url, json.dumps(given)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected
