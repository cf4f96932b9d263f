"""Faults of an object store, and what must hold after each of them.

A case is a fault at a moment of a stage of a conversion. `Trial` carries it out: a conversion under the
fault, then the same command again, then ``ckptcore gc``. What readers could see in between is tried, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fault_s3
import numpy as np
from safetensors.numpy import load, save_file

import ckptcore
from ckptcore.errors import CkptError, DestinationExists
from ckptcore.operations.abandoned import collect
from ckptcore.planning.request import Settings
from ckptcore.store.objects import small_reads
from ckptcore.store.objects.retry import DEADLINE_VARIABLE

EVER = 10**9
PART = 16 << 10
MEANS = Settings(memory=1 << 20, workers=2)
OUT = "bucket/models/out/"
BODIES = ("GetObject", "PutObject", "UploadPart", "ListObjectsV2")
WRITES = ("PutObject", "UploadPart")
STAGES = ("write", "publish", "resume", "gc")
# Operations of some stages; all others are sent in each.
_ONLY = {
    "CreateMultipartUpload": ("write",),
    "UploadPart": ("write",),
    "CompleteMultipartUpload": ("publish", "resume"),
    "AbortMultipartUpload": ("gc",),
    "DeleteObject": STAGES[1:],
    "ListMultipartUploads": ("gc",),
    "ListParts": ("write", "resume"),
}
# What is left alone: another's folder, and another's uploads, one to a key of the output.
FOREIGN = {"bucket/models/.other.ckptcore/precious": b"x", "bucket/models/outer/model.bin": b"y"}


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        rule: What befalls a request (`fault_s3.Fault`).
        of: Operations that it befalls; one of them is drawn for each case.
        times: How often; one of them is drawn.
        habits: Of the server (`s3_answers.S3Answers`).
        happens: Done to the server at that moment.
        code: Codes of errors that it may lead to, beside those of `CLEAR`.
        judged: Whether what readers see in between is judged: a store without checks of parts shows
            an altered object until its upload is looked at.
        believed: Nothing can know that the bytes are wrong: the result is then called unproven.
    """

    rule: dict[str, Any] = field(default_factory=dict)
    of: tuple[str, ...] = ("*",)
    times: tuple[int, ...] = (1, 2, EVER)
    habits: dict[str, Any] = field(default_factory=dict)
    happens: Callable[[Trial], object] | None = None
    judged: bool = True
    believed: bool = False


def status(status: int, code: str, *of: str, **given: Any) -> Kind:
    return Kind({"action": "status", "status": status, "code": code}, of or ("*",), **given)


def _end_uploads(trial: Trial) -> None:
    """As a lifecycle rule does."""
    with trial.server.lock:
        for number in [n for n in trial.server.uploads if n not in trial.theirs]:
            del trial.server.uploads[number]


def _appear(trial: Trial) -> None:
    """Another program writes an object of the output."""
    path = OUT + trial.draw.choice(sorted(trial.right))
    with trial.server.lock:
        if path not in trial.server.objects:
            trial.intruder = path
            trial.server.put(path, b"precious")


KINDS: dict[str, Kind] = {
    "reset": Kind({"action": "reset"}),
    "cut": Kind({"action": "cut"}, BODIES),
    "cut-reset": Kind({"action": "cut-reset"}, BODIES),
    "500": status(500, "InternalError"),
    "503": status(503, "SlowDown"),
    "stall": Kind({"action": "stall"}, ("GetObject", "ListObjectsV2"), (1,)),
    "late": Kind({"action": "late"}, times=(1,)),
    "flip": Kind({"action": "flip"}, WRITES),
    "flip without checks": Kind({"action": "flip"}, WRITES, habits={"checks": False}, judged=False),
    "flip without checksums": Kind(
        {"action": "flip"}, ("UploadPart",), habits={"checks": False, "keeps": None}, believed=True
    ),
    **{
        f"lost {name}": Kind({"action": "lost"}, (name,))
        for name in (
            "CreateMultipartUpload",
            "UploadPart",
            "CompleteMultipartUpload",
            "AbortMultipartUpload",
            "PutObject",
            "DeleteObject",
        )
    },
    "lost lease": Kind({"action": "lost", "path": r"lease\.json$"}, ("PutObject", "DeleteObject")),
    "200 with an error": Kind({"action": "error200", "code": "InternalError"}, ("CompleteMultipartUpload",)),
    "409": status(409, "ConditionalRequestConflict", "CompleteMultipartUpload", "PutObject"),
    "412": status(412, "PreconditionFailed", "CompleteMultipartUpload", "PutObject"),
    "404": status(404, "NoSuchUpload", "UploadPart", "CompleteMultipartUpload", "ListParts"),
    "upload ended": Kind({"action": ""}, times=(1,), happens=_end_uploads),
    "object appears": Kind({"action": ""}, times=(1,), happens=_appear),
    "no conditions on Complete": Kind({"action": "reset"}, habits={"creates": "put"}),
    "pages": Kind({"action": "reset"}, ("GET",), habits={"page": 1}),
    "list lacks a row": Kind({"action": "missing"}, ("ListObjectsV2", "ListMultipartUploads"), (1, 2)),
    **{
        f"no {name}": status(403, "AccessDenied", name, times=(EVER,))
        for name in (
            "ListObjectsV2",
            "DeleteObject",
            "AbortMultipartUpload",
            "ListMultipartUploads",
            "ListParts",
        )
    },
    "expired": status(403, "ExpiredToken", times=(EVER,)),
    "skewed clock": status(403, "RequestTimeTooSkewed", times=(EVER,)),
}


class Trial:
    """A source, a server, and what an output must be. One for many cases.

    Args:
        server: The server; it is emptied for each case.
        source: A folder with a source.
        seed: Of what is drawn.
    """

    def __init__(self, server: fault_s3.FaultyS3, source: str, seed: str) -> None:
        self.server, self.source, self.draw = server, source, random.Random(seed)
        self.theirs = {"theirs", "others"}
        self.intruder: str | None = None
        self.states: dict[frozenset[tuple[str, str]], dict[str, bytes]] = {}
        self.outcomes: dict[str, int] = {}
        habits = (source, repr((server.checks, server.keeps, server.creates, server.page)))
        if habits not in _CALM:
            _CALM[habits] = self.calm_runs()
        self.uploaded, self.right, self.calm = _CALM[habits]

    def calm_runs(self) -> Calm:
        """Convert without faults, and note what is there in between, the output, and the requests."""
        self.empty()
        prepared = ckptcore.prepare(self.source, "s3://bucket/models/out", verb="export", **OPTIONS)
        ckptcore.execute(prepared)
        self.uploaded = dict(self.server.objects), dict(self.server.uploads)
        calm = {}
        for stage in STAGES[1:]:
            self.begin(stage)
            self.server.log.clear()
            self.run(stage)
            calm[stage] = [row[4] for row in self.server.log]
            if stage == "publish":
                right = self.server.below(OUT)
        assert len(right) >= 3
        first = calm["publish"].index("CompleteMultipartUpload")
        before, behind = calm["publish"][:first], calm["publish"][first:]
        calm["write"] = [*before, *(f"-{name}" for name in behind)]
        calm["publish"] = [*(f"-{name}" for name in before), *behind]
        return self.uploaded, right, calm

    def empty(self) -> None:
        server = self.server
        server.calm()
        server.objects.clear()
        server.uploads.clear()
        self.intruder = None
        for path, data in FOREIGN.items():
            server.put(path, data)
        key = OUT + "model-00001-of-00002.safetensors"
        server.uploads["theirs"] = fault_s3.Upload(key, {}, {1: fault_s3.Stored(b"precious", "e")})
        server.uploads["others"] = fault_s3.Upload("bucket/models/other.bin", {})

    def begin(self, stage: str) -> None:
        """Bring the server to the beginning of a stage."""
        self.empty()
        if stage in ("resume", "gc"):
            objects, uploads = self.uploaded
            self.server.objects.update(objects)
            for number, upload in uploads.items():
                self.server.uploads[number] = fault_s3.Upload(
                    upload.key, upload.meta, dict(upload.parts), upload.when
                )

    def run(self, stage: str) -> Any:
        if stage == "gc":
            return collect("s3://bucket", older_than_s=0)
        return convert(self.source)

    def case(self, kind: Kind, stage: str) -> None:
        """Carry out one case at a random moment, and judge what came of it."""
        self.begin(stage)
        server = self.server
        names = [name for name in kind.of if any(fits(name, n) for n in self.calm[stage])]
        assert names, f"no {kind.of} in {stage}"
        name = self.draw.choice(names)
        matching = [n for n in self.calm[stage] if fits(name, n.lstrip("-"))]
        moments = [at for at, n in enumerate(matching) if not n.startswith("-")]
        rule = server.fault(
            name, **{"skip": self.draw.choice(moments), "times": self.draw.choice(kind.times), **kind.rule}
        )
        if "at" not in kind.rule:
            rule.at = self.draw.random()
        if kind.happens is not None:
            happens = kind.happens
            rule.call = lambda: happens(self)
        if kind.judged and not kind.believed:
            server.after = self.look
        what = f"{name} {rule}"
        failed: CkptError | None = None
        try:
            with deadline(1.5):
                result = self.run(stage)
        except CkptError as error:
            failed = error
        if failed is not None:
            self.count(failed.code)
            assert failed.code in CLEAR, f"{failed.code}: {failed.message} after {what}"
            assert failed.hint, failed.message
        elif stage != "gc":
            self.count("right")
            self.require_output(result, kind, what)
        server.calm()
        self.require_untouched(what)
        self.mend(stage, kind, what)

    def stopped(self, number: int) -> None:
        """Stop a process with a signal at a random request of a conversion, and judge what is left."""
        self.begin("write")
        process: list[subprocess.Popen[bytes]] = []

        def stop() -> None:
            process[0].send_signal(number)
            if number == signal.SIGKILL:
                process[0].wait()

        moment = self.draw.randrange(len(self.calm["write"]))
        self.server.fault("*", skip=moment, action="", call=stop)
        self.server.after = self.look
        with subprocess.Popen(
            [sys.executable, "-c", _RUN, self.source],
            env={**os.environ, **self.server.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as run:
            process.append(run)
            _, text = run.communicate(timeout=100)
        what = f"signal {number} at request {moment}"
        assert b"Traceback" not in text, f"{text.decode()} after {what}"
        self.count(f"exit {run.returncode}")
        self.server.calm()
        self.require_untouched(what)
        self.mend("write", Kind(), what)

    def mend(self, stage: str, kind: Kind, what: str) -> None:
        """Run again, as a user would, and require that everything is right and nothing is left."""
        if self.intruder is not None:
            assert self.server.objects[self.intruder].data == b"precious", what
            del self.server.objects[self.intruder]  # its owner moves it away
            self.intruder = None
        if stage == "gc":
            collect("s3://bucket", older_than_s=0)
            assert not self.ours(), f"{self.ours()} after {what}"
            assert set(self.server.uploads) == self.theirs, what
        self.rerun(kind, what)
        collect("s3://bucket", older_than_s=0)
        self.require_untouched(what)
        assert set(self.server.uploads) == self.theirs, f"open uploads after {what}"
        assert not self.ours(), f"{self.ours()} after {what}"
        self.require_states(what)

    def rerun(self, kind: Kind, what: str) -> None:
        """Run the same command; it refuses if the run before had published, and cleaned up."""
        failed: CkptError | None = None
        try:
            result = convert(self.source)
        except CkptError as error:
            failed = error
        if failed is None:
            self.require_output(result, kind, what)
            return
        published = isinstance(failed, DestinationExists) and (
            self.server.below(OUT) == self.right or kind.believed
        )
        assert published, f"again: {failed.code}: {failed.message} after {what}"

    def require_output(self, result: ckptcore.Result, kind: Kind, what: str) -> None:
        got = self.server.below(OUT)
        if kind.believed and got != self.right:
            assert "unproven" in [w.code for w in result.warnings], what
            self.count("unproven")
            return
        assert got == self.right, f"{sorted(got)} after {what}"

    def require_untouched(self, what: str) -> None:
        for path, data in FOREIGN.items():
            assert self.server.objects[path].data == data, f"{path} after {what}"
        assert self.theirs <= self.server.uploads.keys(), f"uploads of others after {what}"

    def ours(self) -> list[str]:
        """Return what is left beside the output."""
        return [n for n in self.server.objects if not n.startswith(OUT) and n not in FOREIGN]

    def look(self, path: str) -> None:
        """Note what a reader of the output sees now."""
        if not path.startswith(OUT):
            return
        with self.server.lock:
            seen = {n: o for n, o in self.server.objects.items() if n.startswith(OUT)}
        self.states[frozenset((n, o.etag) for n, o in seen.items())] = {
            n.removeprefix(OUT): o.data for n, o in seen.items()
        }

    def require_states(self, what: str) -> None:
        """A reader refuses what it could see at any moment, or reads all of the right tensors."""
        for state, files in self.states.items():
            if state not in _VERDICTS:
                _VERDICTS[state] = verdict(files, self.right)
            assert _VERDICTS[state] != "half", f"a reader accepts {sorted(files)} after {what}"
        self.states.clear()

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


CLEAR = {
    "storage-trouble",
    "destination-unwritable",
    "destination-exists",
    "source-unreadable",
    "source-changed",
    "output-mismatch",
    "altered-in-transit",
    "busy",
}
OPTIONS: dict[str, Any] = {"max_file_size": 50_000, "settings": MEANS}
_RUN = f"""
import sys, ckptcore.store.objects.part_plan as plan
plan.PART = {PART}
from ckptcore.cli.main import run
arguments = ["s3://bucket/models/out", "--no-catalog", "--max-file-size", "50000"]
sys.exit(run(["export", sys.argv[1], *arguments]))
"""
# Objects and uploads before publishing; the output; the requests of each stage, those of another marked.
Calm = tuple[
    tuple[dict[str, fault_s3.Stored], dict[str, fault_s3.Upload]], dict[str, bytes], dict[str, list[str]]
]
_CALM: dict[tuple[str, str], Calm] = {}
_VERDICTS: dict[frozenset[tuple[str, str]], str] = {}


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Repeat requests that fail for so long; a run without faults has the time that a busy machine needs."""
    before = os.environ.get(DEADLINE_VARIABLE)
    os.environ[DEADLINE_VARIABLE] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ[DEADLINE_VARIABLE]
        else:
            os.environ[DEADLINE_VARIABLE] = before


def convert(source: str, **given: Any) -> ckptcore.Result:
    """Convert the source to the destination of all trials, without a catalog."""
    return ckptcore.convert(
        source, "s3://bucket/models/out", verb="export", catalog=False, **{**OPTIONS, **given}
    )


def fits(name: str, operation: str) -> bool:
    """Report whether a name of a rule means an operation."""
    if name == "*":
        return not operation.startswith("-")
    return operation == name or (name == "GET" and operation.startswith(("Get", "List")))


def make_source(folder: Path) -> str:
    """Write a source of three tensors, which become two files of three and two parts."""
    draw = np.random.default_rng(3)
    tensors = {f"layers.{n}.weight": draw.normal(size=(60, 100)).astype(np.float32) for n in range(3)}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def verdict(files: dict[str, bytes], right: dict[str, bytes]) -> str:
    """Return "refused", "right" or "half": what an ordinary reader makes of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        try:
            manifest = ckptcore.open(folder)
            if not ckptcore.check(manifest, "coverage").ok:
                return "refused"
        except CkptError:
            return "refused"
        wanted = tensors_of(right)
        if {t.fqn for t in manifest.tensors} != wanted.keys():
            return "half"
        found = tensors_of(files)
        return "right" if {n: found.get(n) for n in wanted} == wanted else "half"


def tensors_of(files: dict[str, bytes]) -> dict[str, str]:
    """Return the digest of each tensor in safetensors files."""
    return {
        name: hashlib.sha256(tensor.tobytes()).hexdigest()
        for path, data in files.items()
        if path.endswith(".safetensors")
        for name, tensor in load(data).items()
    }


def forget_pages() -> None:
    """Forget what this process keeps of objects, as another process would not have it."""
    small_reads.SHARED._pieces.clear()
    small_reads.SHARED._starts.clear()


def cells() -> Iterator[tuple[str, str]]:
    """Yield every (kind, stage) that happens."""
    for name, kind in KINDS.items():
        for stage in STAGES:
            if any(stage in _ONLY.get(operation, STAGES) for operation in kind.of):
                yield name, stage
