"""Convert samples between local folders and S3 in all four ways, and compare what comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import fsspec
from samples import Sample

import ckptcore
from ckptcore.errors import CkptError
from ckptcore.operations.abandoned import collect
from ckptcore.planning.request import Settings

PART = 64 << 10  # bytes: most outputs of samples have several parts
MEANS = Settings(memory=8 << 20, workers=2, fingerprint=True)
# Verb and options -> what is made; each also names a format that the output is recognised as.
FORMS: dict[str, dict[str, object]] = {
    "safetensors": {"max_file_size": 300_000},
    "torch_save": {"to": "torch_save"},
    "mesh": {"verb": "reshard", "mesh": "fsdp=2"},
}
# A store that keeps checksums proves files that no format does.
PROVEN_BY_A_STORE = {"unproven", "no-checksum"}


@dataclass(frozen=True)
class Outcome:
    """What a conversion ended with: the bytes of every file, or the code of its error."""

    files: dict[str, bytes]
    fingerprint: str | None = None
    dropped: tuple[str, ...] = ()
    error: str = ""


def upload(folder: Path, url: str) -> None:
    fs, path = fsspec.url_to_fs(url)
    if folder.is_file():
        fs.pipe_file(path, folder.read_bytes())
    for file in (p for p in sorted(folder.rglob("*")) if p.is_file()):
        fs.pipe_file(f"{path}/{file.relative_to(folder)}", file.read_bytes())


def download(url: str) -> dict[str, bytes]:
    """Return the bytes of every file at a place, local or not."""
    fs, path = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    return {name.removeprefix(path).lstrip("/"): fs.cat_file(name) for name in fs.find(path)}


def converted(source: str, destination: str, options: dict[str, object]) -> Outcome:
    try:
        made = ckptcore.convert(source, destination, settings=MEANS, catalog=False, **options)  # type: ignore[arg-type]
    except CkptError as error:
        assert download(destination) == {}, f"{destination} was left half-made"
        if destination.startswith("s3://"):
            collect("s3://outputs", older_than_s=0)
        return Outcome({}, error=error.code)
    files = download(destination)
    # A card names its source.
    files = {name: data.replace(source.encode(), b"SOURCE") for name, data in files.items()}
    return Outcome(files, made.fingerprint, tuple(sorted(made.dropped)))


def findings(url: str) -> object:
    """Return what a deep check finds, or the code of its error."""
    try:
        report = ckptcore.check(ckptcore.open(url), "bytes")
    except CkptError as error:
        return error.code
    return report.ok, sorted(
        (f.code, f.fqn or "", f.file or "") for f in report.findings if f.code not in PROVEN_BY_A_STORE
    )


def fingerprint_of(url: str) -> object:
    try:
        return ckptcore.fingerprint(ckptcore.open(url), settings=MEANS).fingerprint
    except CkptError as error:
        return error.code


def require_alike(sample: Sample, scratch: Path, forms: Iterable[str]) -> int:
    """Convert a sample from and to a local folder and S3, and compare all that comes of it.

    Args:
        sample: The sample.
        scratch: A local folder for outputs; buckets ``samples`` and ``outputs`` are there.
        forms: Names of `FORMS`.

    Returns:
        How many conversions give an output; the others are refused everywhere with one code.
    """
    made = 0
    for number, folder in enumerate(sample.checkpoints):
        far_source = f"s3://samples/{sample.name}/{number}/{folder.name}"
        upload(folder, far_source)
        assert findings(far_source) == findings(str(folder))
        assert fingerprint_of(far_source) == fingerprint_of(str(folder))
        for form in forms:
            suffix = ".pt" if form == "torch_save" else ""
            near, far = scratch / f"{number}-{form}", f"s3://outputs/{sample.name}/{number}-{form}"
            outcomes = {
                "local -> local": converted(str(folder), f"{near}{suffix}", FORMS[form]),
                "s3 -> local": converted(far_source, f"{near}-s3{suffix}", FORMS[form]),
                "local -> s3": converted(str(folder), f"{far}-local{suffix}", FORMS[form]),
                "s3 -> s3": converted(far_source, f"{far}{suffix}", FORMS[form]),
            }
            expected = outcomes["local -> local"]
            for way, found in outcomes.items():
                assert found.error == expected.error, f"{folder} as {form}, {way}"
                assert sorted(found.files) == sorted(expected.files), f"{folder} as {form}, {way}"
                unequal = [name for name, data in expected.files.items() if found.files[name] != data]
                assert not unequal, f"{folder} as {form}, {way}"
                assert found == expected, f"{folder} as {form}, {way}"
            if expected.error:
                continue
            made += 1
            output = f"{far}{suffix}"
            assert findings(output) == findings(f"{near}{suffix}")
            assert fingerprint_of(output) == fingerprint_of(f"{near}{suffix}")
            same = ckptcore.diff(ckptcore.open(output), ckptcore.open(f"{near}{suffix}"), settings=MEANS)
            assert same.equal, f"{folder} as {form}"
    return made
