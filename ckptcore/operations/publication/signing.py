"""Sign folders, and verify signatures, in OpenSSF's model-signing format.

The work is that of `model_signing`: a signature is a Sigstore bundle over an in-toto statement that lists
each file with its digest. Its command line verifies SHA-256 alone, which is the default: every file is read
once, and compared with what the catalog recorded when it was written. Its library verifies BLAKE3 too, which
is what the catalog records: then files that nothing has touched since are not read. What was signed and what
is there are compared by name.

https://github.com/sigstore/model-transparency, "Model Signing Format"
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from ckptcore.catalog import holdings
from ckptcore.catalog.types import FileRow
from ckptcore.checking.check import check
from ckptcore.checking.examine import inspect
from ckptcore.checking.source_stamps import published_stamp
from ckptcore.conversion.source_digests import NOT_THERE, differs
from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import used
from ckptcore.custody.gate import existing_catalog
from ckptcore.errors import (
    DamagedCheckpoint,
    DestinationExists,
    Finding,
    InternalError,
    SourceChanged,
    SourceUnreadable,
    UsageError,
    finding,
)
from ckptcore.operations.registered_files import UnchangedFiles, listing_findings, require_recorded
from ckptcore.reading.file_digests import digests_of
from ckptcore.store import Store, local_path, open_store
from ckptcore.store.file_status import FileStatus, NameKind
from ckptcore.store.listing import contents
from ckptcore.utils.extras import needed
from ckptcore.utils.foreign_text import InvalidText, load_json_object, parsing, reason
from ckptcore.utils.part_digest import Hasher, hasher_like
from ckptcore.utils.text import listed, short_repr

IN_FOLDER = "model.sig"  # the name of a signature in its folder, as model_signing's own
PASSWORD = "CKPTCORE_KEY_PASSWORD"
_NOT_SIGNED = "it was not signed"
_HEX = 64  # digits of a plain BLAKE3
_HASHERS: Mapping[str, Callable[[], Hasher]] = {"sha256": hashlib.sha256, "blake3": blake3}
# Left out by the format, in every folder: what git and its hosts add.
_OF_GIT = (".git", ".gitattributes", ".github", ".gitignore")
_MOST_SIGNATURE = 256 << 20  # bytes; 200 of them for each file
# Values of JSON that nothing has proven yet: a file has three, in more than 100 bytes.
_BYTES_A_PART = 16
_FEW_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature that was written.

    Attributes:
        uri: The folder.
        signature: The file.
        algorithm: Of the digests: ``sha256`` or ``blake3``.
        files: File -> digest.
        recorded: The files whose digests are those of the catalog; the others were read.
    """

    uri: str
    signature: str
    algorithm: str
    files: Mapping[str, str] = field(repr=False)
    recorded: frozenset[str] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        files = [
            {"path": name, "digest": digest, "recorded": name in self.recorded}
            for name, digest in sorted(self.files.items())
        ]
        form = {name: getattr(self, name) for name in ("uri", "signature", "algorithm")}
        return form | {"files": files}


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """The result of a verification.

    Attributes:
        uri: The folder.
        signature: The file.
        findings: What is wrong; empty if the signature is valid and the folder is what was signed.
        files: How many files were signed.
        algorithm: Of their digests.
        signer: What the signature records about its signer; empty if the signature is not valid.
    """

    uri: str
    signature: str
    findings: tuple[Finding, ...]
    files: int = 0
    algorithm: str = ""
    signer: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the signature is valid and the folder is what was signed."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        form = {name: getattr(self, name) for name in ("ok", "uri", "signature", "files", "algorithm")}
        return form | {"signer": dict(self.signer), "findings": [f.as_dict() for f in self.findings]}


@dataclass(frozen=True, slots=True)
class SigningKey:
    """What signs: a private key, and its certificate with those that lead to its root; all in PEM."""

    private_key: Path
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Trusted:
    """Whom to trust: a public key, or the roots of certificates."""

    public_key: Path | None = None
    roots: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if (self.public_key is None) == (not self.roots):
            raise UsageError(
                "a signature is verified by --key or by --chain",
                hint="name the signer's public key, or the certificates of the root that you trust",
            )


def sign(
    folder: str,
    signature: str | None,
    key: SigningKey,
    *,
    algorithm: str = "sha256",
    catalog: str | bool | None = None,
    overwrite: bool = False,
) -> Signed:
    """Sign a folder.

    Args:
        folder: Its path.
        signature: The file to write; None for the folder's name with ``.sig``, beside it.
        key: What signs.
        algorithm: Of the digests: ``sha256``, or ``blake3``, which only model_signing's library verifies.
        catalog: URL of the catalog with the recorded digests; None for the default one, False for none.
        overwrite: Replace a signature that is there.

    Raises:
        DamagedCheckpoint: The folder is not complete, or not what was recorded.
        DestinationExists: There is a signature.
        SourceChanged: A file was written meanwhile.
        UsageError: The key cannot be used, or the folder has links.
    """
    place = _folder(folder)
    target = _beside(place) if signature is None else Path(os.path.abspath(signature))
    _require_replaceable(target, overwrite)
    config = _signing_config(key)
    inside = _inside(place, target)
    ignored = frozenset({IN_FOLDER, *([inside] if inside else [])})
    names = _names(place, ignored)
    records, stamp = _records(str(place), catalog, names)
    source = inspect(str(place))
    _require_complete(source)
    is_untouched = stamp is not None and stamp == published_stamp(source)
    trusted = {
        file.path: file.digest
        for file in records
        if algorithm == "blake3" and is_untouched and file.path in used(source).data
        if file.digest and len(file.digest) == _HEX
    }
    with closing(open_store(str(place))) as store:
        unchanged = UnchangedFiles(store, names)
        digests = trusted | _read(store, [n for n in names if n not in trusted], records, algorithm)
        unchanged.require()
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        written = Path(scratch) / IN_FOLDER
        config.set_hashing_config(_GivenDigests(algorithm, digests, ignored)).sign(place, written)
        data = written.read_bytes()
    if _Statement.of(_bundle(data)).files != digests:
        raise InternalError(f"the signature of {place} does not list its files, and was not written")
    with closing(open_store(str(target.parent))) as store:
        store.put(target.name, data)
    return Signed(str(place), str(target), algorithm, digests, frozenset(trusted))


def verify_signature(
    folder: str, signature: str | None, trusted: Trusted, ignored: Collection[str] = ()
) -> SignatureCheck:
    """Verify that a folder is what its signer signed.

    Args:
        folder: Its path.
        signature: The file; None for the one in the folder, or beside it.
        trusted: Whom to trust.
        ignored: Files and folders in it that need not be signed.

    Raises:
        SourceUnreadable: There is no signature.
        UsageError: A key or certificate cannot be used, or the folder has links.
    """
    place = _folder(folder)
    target = _existing_signature(place, signature)
    config = _verifying_config(trusted)
    inside = _inside(place, target)
    allowed = frozenset({*ignored, *([inside] if inside else [])})
    try:
        bundle = _bundle(_bytes_of(target))
        statement = _Statement.of(bundle)
        observed = _ObservedHashing.of(statement, allowed)
    except InvalidText as error:
        return SignatureCheck(str(place), str(target), (_bad(f"{target} is no signature: {error}"),))
    names = _names(place, allowed)
    findings: tuple[Finding, ...] = ()
    with tempfile.TemporaryDirectory() as scratch, _quiet():
        # The library must read what was read here, whatever is in the file by now.
        copy = Path(scratch) / IN_FOLDER
        copy.write_text(json.dumps(bundle))
        try:
            config.set_hashing_config(observed).verify(place, copy)
        except Exception as error:
            findings = _differences(statement, observed.resources, error)
    if not findings:
        # What the signer left out is not proven by the signature.
        findings = tuple(
            finding("added-file", "bytes", f"{name} is not covered by the signature", file=name)
            for name in names
            if name not in statement.paths
        )
    signer = {} if observed.resources is None else statement.signer
    return SignatureCheck(
        str(place), str(target), findings, len(statement.paths), statement.algorithm, signer
    )


@dataclass(frozen=True, slots=True)
class _Statement:
    """What a signature says, before anything proves it.

    Attributes:
        files: Resource -> digest: a file, or ``file:start:end``.
        serialization: How the resources were made.
        signer: Of the signer.
    """

    files: Mapping[str, str]
    serialization: Mapping[str, Any]
    signer: Mapping[str, str]

    @classmethod
    def of(cls, bundle: Mapping[str, Any]) -> _Statement:
        """Read the statement of a signature; raise `InvalidText` if it has none."""
        with parsing("a signature"):
            text = base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True)
            _require_few_parts(text, len(text) // _BYTES_A_PART)
            payload = load_json_object(text)
            predicate = payload["predicate"]
            serialization = dict(predicate["serialization"])
            _require_known(serialization)
            files = {str(r["name"]): str(r["digest"]) for r in predicate["resources"]}
            return cls(files, serialization, _signer(bundle["verificationMaterial"]))

    @property
    def algorithm(self) -> str:
        """The algorithm of the digests."""
        return str(self.serialization["hash_type"])

    @property
    def paths(self) -> frozenset[str]:
        """The files that are covered."""
        if self.serialization["method"] == "files":
            return frozenset(self.files)
        return frozenset(name.rsplit(":", 2)[0] for name in self.files)


def _bundle(data: bytes) -> dict[str, Any]:
    """Read a signature; raise `InvalidText` for anything else.

    Returns:
        The parts that are verified, by one spelling each: libraries know others, which nothing here reads.
    """
    _require_few_parts(data, 0)
    bundle = load_json_object(data, unique=True, encodable=True)
    with parsing("a signature"):
        envelope, material = bundle["dsseEnvelope"], bundle["verificationMaterial"]
        if "publicKey" in material:
            signer: dict[str, Any] = {"publicKey": {"hint": str(material["publicKey"].get("hint") or "")}}
        else:
            certificates = material["x509CertificateChain"]["certificates"]
            chain = {"certificates": [{"rawBytes": str(item["rawBytes"])} for item in certificates]}
            signer = {"x509CertificateChain": chain}
        return {
            "mediaType": bundle["mediaType"],
            "verificationMaterial": {**signer, "tlogEntries": []},
            "dsseEnvelope": {name: envelope[name] for name in ("payload", "payloadType", "signatures")},
        }


def _require_few_parts(text: bytes, most: int) -> None:
    """Raise `InvalidText` for a text whose values would take many times its size. most: beside a few."""
    if text.count(b",") > most + _FEW_PARTS:
        raise InvalidText(f"it has more than {most + _FEW_PARTS} parts")


def _require_known(serialization: Mapping[str, Any]) -> None:
    if serialization["method"] not in ("files", "shards") or not isinstance(serialization["hash_type"], str):
        raise InvalidText(f"files are listed by {short_repr(dict(serialization))}")


def _signer(material: Mapping[str, Any]) -> dict[str, str]:
    if "publicKey" in material:
        return {"public_key_sha256": str(material["publicKey"].get("hint") or "")}
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    certificate = x509.load_der_x509_certificate(
        base64.b64decode(material["x509CertificateChain"]["certificates"][0]["rawBytes"], validate=True)
    )
    return {
        "subject": certificate.subject.rfc4514_string(),
        "issuer": certificate.issuer.rfc4514_string(),
        "certificate_sha256": certificate.fingerprint(hashes.SHA256()).hex(),
        "valid_until": certificate.not_valid_after_utc.isoformat(),
    }


def _folder(folder: str) -> Path:
    path = local_path(folder)
    if path is None or not path.is_dir():
        raise UsageError(f"{folder} is no local folder", hint="name a folder of this machine")
    return Path(os.path.abspath(path))


def _beside(place: Path) -> Path:
    return place.with_name(f"{place.name}.sig")


def _existing_signature(place: Path, signature: str | None) -> Path:
    """Return the file of a signature: the one that is named, or the only one of a folder."""
    if signature is not None:
        return Path(os.path.abspath(signature))
    usual = [path for path in (place / IN_FOLDER, _beside(place)) if path.is_file()]
    if len(usual) > 1:
        raise UsageError(
            f"{place} has two signatures: {usual[0]}, {usual[1]}", hint="name one with --signature"
        )
    if not usual:
        raise SourceUnreadable(
            f"{place} has no signature: neither {IN_FOLDER} in it nor {_beside(place)}",
            hint="name it with --signature",
        )
    return usual[0]


def _require_replaceable(target: Path, overwrite: bool) -> None:
    """Raise `DestinationExists` if something other than a signature is there, or one that must stay."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise DestinationExists(f"{target} exists", hint="name another file, or replace it with --overwrite")
    try:
        _bundle(_bytes_of(target))
    except (InvalidText, SourceUnreadable) as error:
        raise DestinationExists(
            f"{target} is no signature, and --overwrite replaces nothing else: {error}",
            hint="name another file with --signature, or delete this one",
        ) from error


def _bytes_of(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe or a device may have no end
            raise SourceUnreadable(
                f"cannot read {path}: {'it is no file' if path.exists() else 'it is not there'}",
                hint="name the file of the signature with --signature",
            )
        with path.open("rb") as file:
            data = file.read(_MOST_SIGNATURE + 1)
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path}: {error.strerror}") from error
    if len(data) > _MOST_SIGNATURE:
        raise InvalidText(f"it has more than {_MOST_SIGNATURE} bytes")
    return data


def _inside(place: Path, target: Path) -> str | None:
    """Return the name of a signature relative to its folder; None where it is elsewhere."""
    folder, name = Path(os.path.realpath(target.parent)), target.name
    place = Path(os.path.realpath(place))
    return (folder / name).relative_to(place).as_posix() if folder.is_relative_to(place) else None


def _names(place: Path, ignored: Collection[str]) -> list[str]:
    """Return the files of a folder that a signature covers.

    ignored: Files, and folders with all that is in them.
    """
    left_out = [PurePosixPath(name) for name in (*_OF_GIT, *ignored)]
    covered = {
        name: status
        for name, status in contents(str(place)).items()
        if not any(PurePosixPath(name).is_relative_to(skipped) for skipped in left_out)
    }
    odd = [f"{name or 'it'} is a {s.kind}" for name, s in covered.items() if not _is_plain(s)]
    odd += [f"{name!r} is no UTF-8" for name in covered if name.encode(errors="replace").decode() != name]
    if odd:
        raise UsageError(
            f"{place} has more than files: {listed(odd)}",
            hint="a signature covers files alone, by UTF-8 names: copy the folder with what its links name",
        )
    return [name for name, status in covered.items() if status.kind is NameKind.FILE]


def _is_plain(status: FileStatus) -> bool:
    return status.kind in (NameKind.FILE, NameKind.FOLDER)


def _require_complete(source: Manifest) -> None:
    """Raise `DamagedCheckpoint` for a folder that is known not to be complete."""
    errors = tuple(f for f in check(source, None, "coverage").findings if f.severity == "error")
    if errors:
        raise DamagedCheckpoint(f"{source.root} is damaged: {errors[0].message}", findings=errors)


def _records(
    uri: str, catalog: str | bool | None, names: Collection[str]
) -> tuple[tuple[FileRow, ...], str | None]:
    """Return the recorded files of a folder, and the identity that those with tensors had; None if unknown.

    Raises:
        DamagedCheckpoint: The folder lacks a recorded file, or has others.
    """
    with existing_catalog(catalog) as opened:
        registered = None if opened is None else opened.at(uri)
        if opened is None or registered is None or registered[0].state in NOT_THERE:
            return (), None
        row, files = registered
        with opened.reading() as conn:
            stamp = holdings.stamp_of(conn, row.id)
    left_out = [name for name in contents(uri) if name not in names]
    require_recorded(uri, listing_findings(uri, files, ignored=left_out), _NOT_SIGNED)
    return files, stamp


def _read(store: Store, names: Sequence[str], records: Sequence[FileRow], algorithm: str) -> dict[str, str]:
    """Return the digests of files, each of which is read once.

    Raises:
        DamagedCheckpoint: One has other bytes than the catalog recorded.
    """
    recorded, findings, digests = {file.path: file for file in records}, list[Finding](), dict[str, str]()
    for name in names:
        size = store.size(name)
        if size is None:
            raise SourceChanged(f"{name} of {store.url} was removed", hint="run the command again")
        record = recorded.get(name)
        hashers = [_HASHERS[algorithm]()]
        if record is not None and record.digest is not None:
            hashers.append(hasher_like(record.digest))
        digests[name], *as_recorded = digests_of(store, name, size, hashers)
        wrong = differs(record, as_recorded[0]) if record is not None and as_recorded else None
        findings += [] if wrong is None else [wrong]
    require_recorded(store.url, findings, _NOT_SIGNED)
    return digests


@dataclass(frozen=True, slots=True)
class _GivenDigest:
    """A digest of a file, with what model_signing asks of one."""

    algorithm: str
    digest_value: bytes

    @property
    def digest_hex(self) -> str:
        """The digest in hex."""
        return self.digest_value.hex()


@dataclass(frozen=True, slots=True)
class _GivenDigests:
    """Digests of a folder, in place of the hashing that model_signing would do.

    Attributes:
        algorithm: Of the digests.
        files: File -> digest.
        ignored: Names that a verifier leaves out.
    """

    algorithm: str
    files: Mapping[str, str]
    ignored: Collection[str]

    def hash(self, model_path: Any) -> Any:
        """Return model_signing's manifest of the folder."""
        from model_signing import manifest

        form = {"method": "files", "hash_type": self.algorithm, "allow_symlinks": False}
        items = [
            manifest.FileManifestItem(
                path=PurePosixPath(name), digest=_GivenDigest(self.algorithm, bytes.fromhex(digest))
            )
            for name, digest in self.files.items()
        ]
        made_by = manifest.SerializationType.from_args(
            form | {"ignore_paths": [*sorted(self.ignored), *_OF_GIT]}
        )
        return manifest.Manifest(Path(model_path).name, items, made_by)


class _ObservedHashing:
    """The hashing that a signature names; it keeps what it hashed.

    Attributes:
        resources: File, or part of one -> digest; None before anything was hashed.
    """

    def __init__(self, statement: _Statement, ignored: Collection[str]) -> None:
        from model_signing import hashing

        self._config = hashing.Config()
        self.resources: dict[str, str] | None = None
        form = statement.serialization
        if form["method"] == "files":
            self._config.use_file_serialization(hashing_algorithm=form["hash_type"])
        else:
            self._config.use_shard_serialization(
                hashing_algorithm=form["hash_type"], shard_size=int(form["shard_size"])
            )
        # Signers may cover what git adds; then it is compared, too.
        covers_git = any(name.partition("/")[0] in _OF_GIT for name in statement.paths)
        self._config.set_ignored_paths(paths=sorted(ignored), ignore_git_paths=not covers_git)

    @classmethod
    def of(cls, statement: _Statement, ignored: Collection[str]) -> _ObservedHashing:
        """Return the hashing; raise `InvalidText` if there is none of its name."""
        with parsing("digests that are known"):
            return cls(statement, ignored)

    def add_ignored_paths(self, **paths: Any) -> None:
        """Leave out what the signature says."""
        self._config.add_ignored_paths(**paths)

    def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
        """Return model_signing's manifest of the folder."""
        hashed = self._config.hash(model_path, files_to_hash=files_to_hash)
        self.resources = {r.identifier: r.digest.digest_hex for r in hashed.resource_descriptors()}
        return hashed


def _signing_config(key: SigningKey) -> Any:
    """Return model_signing's configuration of a signer."""
    with needed("sign", "sign"):
        from model_signing import signing
    password = os.environ.get(PASSWORD)
    config = signing.Config()
    try:
        if key.certificate is None:
            return config.use_elliptic_key_signer(
                private_key=key.private_key,
                # cryptography takes bytes, whatever model_signing's annotation says.
                password=password.encode() if password else None,
            )
        return config.use_certificate_signer(
            private_key=key.private_key,
            signing_certificate=key.certificate,
            # It reads no empty chain.
            certificate_chain=key.chain or (key.certificate,),
        )
    except Exception as error:
        named = [key.private_key, *([key.certificate] if key.certificate else []), *key.chain]
        raise UsageError(
            f"cannot sign with {listed(list(map(str, named)))}: {reason(error)}",
            hint=f"a private key on a NIST curve in PEM; {PASSWORD} is its password, if it has one",
        ) from error


def _verifying_config(trusted: Trusted) -> Any:
    """Return model_signing's configuration of a verifier."""
    with needed("sign", "verify a signature"):
        from model_signing import verifying
    config = verifying.Config()
    try:
        if trusted.public_key is not None:
            return config.use_elliptic_key_verifier(public_key=trusted.public_key)
        return config.use_certificate_verifier(certificate_chain=trusted.roots)
    except Exception as error:
        named = [trusted.public_key] if trusted.public_key is not None else trusted.roots
        raise UsageError(
            f"cannot verify with {listed(list(map(str, named)))}: {reason(error)}",
            hint="a public key on a NIST curve, or certificates, in PEM",
        ) from error


def _differences(
    statement: _Statement, present: Mapping[str, str] | None, error: Exception
) -> tuple[Finding, ...]:
    """Return what a verification that failed has found, by name."""
    if present is None:  # the signature comes first: without it nothing is hashed
        return (_bad(f"the signature is not valid: {reason(error)}"),)
    paths_present = _Statement(present, statement.serialization, {}).paths
    findings = [
        finding("missing-file", "files", f"{path} is missing", file=path)
        for path in sorted(statement.paths - paths_present)
    ]
    findings += [
        finding("added-file", "files", f"{path} was not signed", file=path)
        for path in sorted(paths_present - statement.paths)
    ]
    signed = statement.files
    differing = {n: "" for n in (*signed, *present) if signed.get(n) != present.get(n)}
    changed = _Statement(differing, statement.serialization, {}).paths & paths_present & statement.paths
    hint = "get it again from its signer"
    findings += [
        finding("digest-mismatch", "bytes", f"{path} is not what was signed", file=path, hint=hint)
        for path in sorted(changed)
    ]
    return tuple(findings) or (_bad(f"the signature is not valid: {reason(error)}"),)


def _bad(message: str) -> Finding:
    return finding("bad-signature", "files", message)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what model_signing prints out of an answer: hints to signers, and warnings of pyOpenSSL."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
