"""Sessions of S3 share what botocore knows about services, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from s3fs import S3FileSystem

from ckptcore.errors import SourceUnreadable
from ckptcore.store.objects.client import S3Client
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
