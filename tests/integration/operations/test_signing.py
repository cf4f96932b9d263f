"""Folders are signed in model-signing's format: it verifies them, and what it signs is verified here."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from checkpoints import save
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ckptcore import api, errors
from ckptcore.catalog import holdings, open_catalog
from ckptcore.catalog.query import resolve_checkpoint
from ckptcore.checking.source_stamps import published_stamp
from ckptcore.cli.main import run
from ckptcore.operations.publication import signing
from ckptcore.operations.publication.signing import SigningKey, Trusted, sign, verify_signature

model_signing = pytest.importorskip("model_signing")


def _pem(
    key: ec.EllipticCurvePrivateKey, folder: Path, name: str, password: bytes | None = None
) -> SigningKey:
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    form = serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, hidden))
    pem, info = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(pem, info))
    return SigningKey(private)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey, *, root: bool
) -> bytes:
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, n)]) for n in (name, issuer)]
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(names[0])
        .issuer_name(names[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=root, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=not root, key_cert_sign=root, crl_sign=root, **usage),
            critical=True,
        )
        .sign(signer, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


class Signing:
    """An export that the catalog knows, keys and certificates."""

    def __init__(self, folder: Path) -> None:
        self.root, self.catalog = folder, f"sqlite:///{folder}/catalog.sqlite"
        source = save(folder / "run" / "step-7")
        self.export = folder / "out"
        api.convert(str(source), f"{self.export}", catalog=self.catalog, max_file_size="200B")
        key, other, root = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.key, self.other = _pem(key, folder, "key"), _pem(other, folder, "other")
        self.public, self.other_public = folder / "key.pub", folder / "other.pub"
        (folder / "root.crt").write_bytes(_certificate("root", root, "root", root, root=True))
        (folder / "leaf.crt").write_bytes(_certificate("ada", key, "root", root, root=False))
        (folder / "other-root.crt").write_bytes(_certificate("root", other, "root", other, root=True))
        self.certified = SigningKey(self.key.private_key, folder / "leaf.crt")

    def record_identity(self) -> None:
        """Record the files as a conversion does whose files are older than a tick of the clock."""
        time.sleep(0.03)
        with open_catalog(self.catalog) as catalog, catalog.writing() as conn:
            stamp = published_stamp(api.open(str(self.export)))
            holdings.put_stamp(conn, resolve_checkpoint(conn, str(self.export)), stamp)

    def sign(self, key: SigningKey | None = None, **options: object):
        return sign(str(self.export), None, key or self.key, **{"catalog": self.catalog, **options})

    def verify(self, **options: object):
        return verify_signature(str(self.export), None, Trusted(self.public), **options)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Signing:
    return Signing(tmp_path_factory.mktemp("signing") / "")


@pytest.fixture
def world(prepared: Signing) -> Signing:
    for path in prepared.root.glob("*.sig"):
        path.unlink()
    return prepared


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def theirs(world: Signing) -> None:
    """Verify as model_signing itself does, without anything of ours."""
    verifier = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=world.public)
    verifier.verify(world.export, world.root / "out.sig")


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files that are read for digests from now on."""
    names: list[str] = []
    digests_of = signing.digests_of

    def watch(store, name, *arguments):
        names.append(name)
        return digests_of(store, name, *arguments)

    monkeypatch.setattr(signing, "digests_of", watch)
    return names


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_a_folder_is_signed_and_verified_by_model_signing(
    world: Signing, algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    world.record_identity()
    read = reads(monkeypatch)
    done = world.sign(algorithm=algorithm)
    tensors = {name for name in files(world.export) if name.endswith(".safetensors")}
    assert len(tensors) > 1
    assert done.recorded == (tensors if algorithm == "blake3" else set())
    assert sorted(read) == sorted(files(world.export) - done.recorded)
    theirs(world)
    assert world.verify().ok
    assert world.verify().files == len(files(world.export))


def test_the_program_of_model_signing_verifies_a_signature(world: Signing):
    world.sign()
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(world.export)]
    command += ["--signature", str(world.root / "out.sig"), "--public_key", str(world.public)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_that_were_touched_since_they_were_recorded_are_read(altered: Signing):
    altered.record_identity()
    os.utime(next(altered.export.glob("*.safetensors")))
    assert altered.sign(algorithm="blake3").recorded == frozenset()
    theirs(altered)


def _change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture
def altered(world: Signing, tmp_path: Path):
    """The folder, which has its files back at the end."""
    saved = tmp_path / "saved"
    shutil.copytree(world.export, saved)
    yield world
    shutil.rmtree(world.export)
    shutil.copytree(saved, world.export)


CHANGES = {
    "digest-mismatch": lambda folder, name: _change(folder / name),
    "missing-file": lambda folder, name: (folder / name).unlink(),
    "added-file": lambda folder, _: (folder / "new.bin").write_bytes(b"x"),
}


@pytest.mark.parametrize("code", CHANGES)
def test_changed_missing_and_added_files_are_named(altered: Signing, code: str):
    altered.sign()
    name = next(n for n in files(altered.export) if n.endswith(".safetensors"))
    CHANGES[code](altered.export, name)
    checked = altered.verify()
    assert [(f.code, f.file) for f in checked.findings] == [
        (code, "new.bin" if code == "added-file" else name)
    ]
    with pytest.raises(ValueError, match="mismatch"):
        theirs(altered)
    if code == "added-file":
        assert altered.verify(ignored=["new.bin"]).ok


@pytest.mark.parametrize("code", CHANGES)
def test_a_folder_that_is_not_what_was_recorded_is_not_signed(altered: Signing, code: str):
    name = next(n for n in files(altered.export) if n.endswith(".safetensors"))
    CHANGES[code](altered.export, name)
    with pytest.raises(errors.DamagedCheckpoint) as caught:
        altered.sign()
    assert caught.value.exit_code == 1
    assert not (altered.root / "out.sig").exists()


def test_another_key_proves_nothing(world: Signing):
    world.sign(world.other)
    checked = world.verify()
    assert [f.code for f in checked.findings] == ["bad-signature"]


def test_certificates(world: Signing):
    world.sign(world.certified)
    target = world.root / "out.sig"
    model_signing.verifying.Config().use_certificate_verifier(
        certificate_chain=[world.root / "root.crt"]
    ).verify(world.export, target)
    checked = verify_signature(str(world.export), None, Trusted(roots=(world.root / "root.crt",)))
    assert checked.ok
    assert checked.signer["subject"] == "CN=ada"
    other = verify_signature(str(world.export), None, Trusted(roots=(world.root / "other-root.crt",)))
    assert [f.code for f in other.findings] == ["bad-signature"]


@pytest.mark.parametrize("form", ["sha256", "shards"])
def test_signatures_of_model_signing_itself(altered: Signing, form: str):
    config = model_signing.hashing.Config()
    if form == "shards":
        config.use_shard_serialization(shard_size=1000)
    signer = model_signing.signing.Config().use_elliptic_key_signer(private_key=altered.key.private_key)
    signer.set_hashing_config(config).sign(altered.export, altered.root / "out.sig")
    assert altered.verify().ok
    name = next(n for n in files(altered.export) if n.endswith(".safetensors"))
    _change(altered.export / name)
    assert [(f.code, f.file) for f in altered.verify().findings] == [("digest-mismatch", name)]


def test_what_the_signer_left_out_is_not_proven(world: Signing):
    name = next(n for n in files(world.export) if n.endswith(".safetensors"))
    config = model_signing.hashing.Config().set_ignored_paths(paths=[name])
    signer = model_signing.signing.Config().use_elliptic_key_signer(private_key=world.key.private_key)
    signer.set_hashing_config(config).sign(world.export, world.root / "out.sig")
    theirs(world)  # for it, that is fine
    assert [(f.code, f.file) for f in world.verify().findings] == [("added-file", name)]


STATEMENTS = {
    "digest": {"hash_type": "md5"},
    "no parts": {"method": "shards"},
    "parts": {"method": "shards", "shard_size": 0},
    "text": {"method": "shards", "shard_size": "x"},
}


@pytest.mark.parametrize("damage", ["cut", "json", "payload", "list", "statement", *STATEMENTS, "key"])
def test_a_damaged_signature_is_never_a_valid_one(world: Signing, damage: str):
    world.sign()
    target = world.root / "out.sig"
    bundle = json.loads(target.read_bytes())
    if damage == "cut":
        target.write_bytes(target.read_bytes()[:-20])
    elif damage == "json":
        target.write_text("{}")
    elif damage == "payload":
        payload = bundle["dsseEnvelope"]["payload"]
        bundle["dsseEnvelope"]["payload"] = (
            payload[:100] + ("A" if payload[100] != "A" else "B") + payload[101:]
        )
        target.write_text(json.dumps(bundle))
    elif damage == "list":
        target.write_text("[]")
    elif damage == "key":
        bundle["verificationMaterial"]["publicKey"] = "text"
        target.write_text(json.dumps(bundle))
    elif damage in STATEMENTS:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        statement["predicate"]["serialization"].update(STATEMENTS[damage])
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
        target.write_text(json.dumps(bundle))
    else:
        bundle["dsseEnvelope"]["payload"] = "e30="  # {}
        target.write_text(json.dumps(bundle))
    assert [f.code for f in world.verify().findings] == ["bad-signature"]


def test_a_signature_in_its_folder(altered: Signing):
    inside = altered.export / "model.sig"
    sign(str(altered.export), str(inside), altered.key, catalog=altered.catalog)
    assert altered.verify().ok
    altered.sign()
    with pytest.raises(errors.UsageError, match="two signatures"):
        altered.verify()


def test_a_second_spelling_of_a_part_is_not_what_is_verified(world: Signing):
    """A parser that knows both takes the last: the certificates that are shown must be the verified ones."""
    world.sign(world.certified)
    target = world.root / "out.sig"
    bundle = json.loads(target.read_bytes())
    material = bundle["verificationMaterial"]
    material["x509_certificate_chain"] = material["x509CertificateChain"]
    boss = ec.generate_private_key(ec.SECP256R1())
    forged = x509.load_pem_x509_certificate(_certificate("the boss", boss, "root", boss, root=False))
    data = base64.b64encode(forged.public_bytes(serialization.Encoding.DER)).decode()
    material["x509CertificateChain"] = {"certificates": [{"rawBytes": data}]}
    target.write_text(json.dumps(bundle))
    checked = verify_signature(str(world.export), None, Trusted(roots=(world.root / "root.crt",)))
    assert ([f.code for f in checked.findings], dict(checked.signer)) == (["bad-signature"], {})
    target.write_text('{"mediaType": "", ' + json.dumps(bundle)[1:])
    assert "twice" in world.verify().findings[0].message


def test_a_signature_that_is_swapped_meanwhile_is_not_read(world: Signing, monkeypatch: pytest.MonkeyPatch):
    world.sign()
    target, read = world.root / "out.sig", signing._bytes_of

    def swapped(path: Path) -> bytes:
        data = read(path)
        path.write_text("{}")
        return data

    monkeypatch.setattr(signing, "_bytes_of", swapped)
    assert world.verify().ok
    assert target.read_text() == "{}"


@pytest.mark.parametrize("what", ["tensors", "key", "link", "folder"])
def test_only_a_signature_is_replaced(altered: Signing, tmp_path: Path, what: str):
    target = next(altered.export.glob("*.safetensors"))
    if what == "key":
        target = altered.key.private_key
    elif what == "link":
        (tmp_path / "link").symlink_to(target)
        target = tmp_path / "link"
    elif what == "folder":
        target = tmp_path
    before = files(target) if what == "folder" else target.read_bytes()
    with pytest.raises(errors.DestinationExists, match="is no signature"):
        sign(str(altered.export), str(target), altered.key, catalog=altered.catalog, overwrite=True)
    assert before == (files(target) if what == "folder" else target.read_bytes())


@pytest.mark.parametrize("inside", [True, False])
def test_a_signature_of_very_many_values_is_not_parsed(world: Signing, inside: bool):
    world.sign()
    target = world.root / "out.sig"
    bundle = json.loads(target.read_bytes())
    values = f"[{','.join(['[]'] * 20_000)}]".encode()
    if inside:
        bundle["dsseEnvelope"]["payload"] = base64.b64encode(values).decode()
        target.write_text(json.dumps(bundle))
    else:
        target.write_bytes(values)
    assert "parts" in world.verify().findings[0].message


def test_a_pipe_is_no_signature(world: Signing, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.SourceUnreadable, match="no file"):
        verify_signature(str(world.export), str(tmp_path / "pipe"), Trusted(world.public))


def test_a_name_that_is_no_text_is_not_signed(altered: Signing):
    (altered.export / os.fsdecode(b"\xff.txt")).touch()
    with pytest.raises(errors.UsageError, match="no UTF-8"):
        altered.sign(catalog=False)


def test_a_link_is_not_signed(altered: Signing):
    (altered.export / "linked").symlink_to("config.json")
    with pytest.raises(errors.UsageError, match="linked is a link"):
        altered.sign(catalog=False)


def test_keys_that_cannot_sign_are_refused_without_their_content(
    world: Signing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    locked = _pem(ec.generate_private_key(ec.SECP384R1()), tmp_path, "locked", b"geheim")
    odd = _pem(ec.generate_private_key(ec.SECP256K1()), tmp_path, "odd")
    for key in (locked, odd, SigningKey(tmp_path / "none"), SigningKey(world.public)):
        with pytest.raises(errors.UsageError):
            world.sign(key)
    monkeypatch.setenv(signing.PASSWORD, "geheim")
    world.sign(locked)
    checked = verify_signature(str(world.export), None, Trusted(tmp_path / "locked.pub"))
    assert checked.ok
    with pytest.raises(errors.DestinationExists):
        world.sign(locked)
    world.sign(locked, overwrite=True)


def test_the_command_line(altered: Signing, capsys: pytest.CaptureFixture[str]):
    folder, catalog = str(altered.export), ["--catalog", altered.catalog]
    json_answer = ["--output", "json"]
    assert run(["verify-signature", folder, "--key", str(altered.public)]) == 8
    capsys.readouterr()
    assert run(["sign", folder, "--key", str(altered.key.private_key), *catalog, *json_answer]) == 0
    signed = json.loads(capsys.readouterr().out)
    assert (signed["algorithm"], {f["recorded"] for f in signed["files"]}) == ("sha256", {False})
    assert run(["sign", folder, "--key", str(altered.key.private_key), *catalog]) == 7
    assert run(["verify-signature", folder, "--key", str(altered.public)]) == 0
    assert "is what was signed" in capsys.readouterr().out
    assert run(["verify-signature", folder]) == 2
    name = next(n for n in files(altered.export) if n.endswith(".safetensors"))
    (altered.export / name).unlink()
    capsys.readouterr()
    assert run(["verify-signature", folder, "--key", str(altered.public), *json_answer]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], [f["code"] for f in answer["findings"]]) == (False, ["missing-file"])
