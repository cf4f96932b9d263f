"""Fuzz every parser of text that others wrote: it returns a value, or raises its one exception.

    python tests/fuzz/texts.py [--inputs 1000000] [--jobs 2] [--seed 7] [--only REGEX]
    python tests/fuzz/texts.py --replay PARSER FILE

`PARSERS` is the table. A defect is another exception, or more than 5 s; its input is saved for `--replay`,
and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import random
import re
import sys
import tempfile
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "helpers")]

from folder import Folder  # noqa: E402
from mutate import bytes_changed, json_changed  # noqa: E402
from targets import Defect, bounded  # noqa: E402
from webhooks import HOOKS, Hook  # noqa: E402

from ckptcore.catalog.normalize import clean, clean_json, normal_uri  # noqa: E402
from ckptcore.catalog.training import facts_of_pairs, read_facts  # noqa: E402
from ckptcore.checking.examine import inspect  # noqa: E402
from ckptcore.conversion import registration  # noqa: E402
from ckptcore.conversion.staging.staged_plan import plan_into  # noqa: E402
from ckptcore.core import columnar_file  # noqa: E402
from ckptcore.core.columnar_file import canonical_json  # noqa: E402
from ckptcore.core.object_tree import Named, Refused, TensorRef, decode, encode  # noqa: E402
from ckptcore.custody import obligation_records  # noqa: E402
from ckptcore.custody.set_aside import SetAsideRecord  # noqa: E402
from ckptcore.encodings import zarr_v2  # noqa: E402
from ckptcore.encodings.safetensors_header import parse_header  # noqa: E402
from ckptcore.errors import CkptError  # noqa: E402
from ckptcore.execution import receipts  # noqa: E402
from ckptcore.fingerprints import holdings  # noqa: E402
from ckptcore.formats.huggingface.quantized import quantization_of  # noqa: E402
from ckptcore.naming.maps import declaration  # noqa: E402
from ckptcore.naming.maps.agreement import agreed  # noqa: E402
from ckptcore.naming.maps.hyperparameters import Config  # noqa: E402
from ckptcore.operations.publication import signing  # noqa: E402
from ckptcore.planning import model_card, stored_configs  # noqa: E402
from ckptcore.planning.config_folder import require_possible  # noqa: E402
from ckptcore.planning.hub_files import front_matter, json_object  # noqa: E402
from ckptcore.planning.plan import HEAD, load_head  # noqa: E402
from ckptcore.planning.request import Request  # noqa: E402
from ckptcore.redaction import bare_url, redacted  # noqa: E402
from ckptcore.store import options  # noqa: E402
from ckptcore.store.objects import client, lease, reader, session  # noqa: E402
from ckptcore.store.objects.checksums import kept_checksums  # noqa: E402
from ckptcore.store.objects.retry import _asked_wait  # noqa: E402
from ckptcore.topology import rules as rules_file  # noqa: E402
from ckptcore.utils import foreign_text  # noqa: E402
from ckptcore.utils.foreign_text import InvalidText, load_json, parsing  # noqa: E402
from ckptcore.utils.merged_url import split_merged  # noqa: E402
from ckptcore.utils.plain_yaml import load_yaml  # noqa: E402
from ckptcore.utils.step_names import step_of  # noqa: E402
from ckptcore.utils.terminal import printable  # noqa: E402
from ckptcore.utils.units import parse_duration, parse_size  # noqa: E402
from deployments.receiver.event import RequestRefused, meta_of, read_event  # noqa: E402
from deployments.receiver.senders import DIALECTS  # noqa: E402
from deployments.receiver.verify import verify  # noqa: E402


@dataclass(frozen=True, slots=True)
class Parser:
    """A parser of text. raises: its one exception; None for one that always returns a value."""

    name: str
    parse: Callable[[bytes], Any]
    raises: type[Exception] | None
    samples: Sequence[bytes]


def _text(data: bytes) -> str:
    """Return bytes as a text that may have anything in it, like a name of a file, or of a tensor."""
    return data.decode("utf-8", "surrogateescape")


_STATEMENT = canonical_json(
    {
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": "config.json", "algorithm": "sha256", "digest": "0" * 64}],
        }
    }
)
_MATERIAL = {"publicKey": {"hint": "0" * 64}, "tlogEntries": []}


def _signature(statement: bytes) -> bytes:
    payload = base64.b64encode(statement).decode()
    envelope = {"payload": payload, "payloadType": "application/vnd.in-toto+json", "signatures": []}
    return canonical_json({"mediaType": "", "verificationMaterial": _MATERIAL, "dsseEnvelope": envelope})


_SIGNATURE = _signature(_STATEMENT)


def _statement(data: bytes) -> Any:
    return signing._Statement.of(signing._bundle(_signature(data)))


def _of_text(parse: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda data: parse(_text(data))


def _stored_facts(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        with parsing("a trainer's file"):
            form = read(data)
        facts, _ = read_facts(form)
        clean_json(facts.config)
        json.dumps(facts.as_form(), allow_nan=False).encode()

    return parse


def _stored(data: bytes) -> Any:
    """A store whose files all have these bytes."""
    return SimpleNamespace(size=lambda path: len(data), read=lambda path, start, length: data)


def _config(data: bytes) -> Any:
    """What exports read of a config: in the spelling of every trainer, and what transformers would build."""
    content = json_object(data) or {}
    for world in ("hf-hub", "megatron", "olmo_core", "olmo", "torchtitan"):
        config = Config("config.json", world, content)
        agreed([config])
        _ = config.architectures, config.rope_scaling
    require_possible(content, "config.json", [(8, 8)] * 20)
    return quantization_of(content)


def _tree(data: bytes) -> Any:
    tree = decode(load_json(data, unique=True, depth=500))
    with parsing("a tree"):  # what a reader decodes is encoded for the manifest
        return encode(tree)


def _card(data: bytes) -> Any:
    text = data.decode(errors="replace")
    front_matter(data)
    return model_card.provenance(text, "x"), model_card.tied_by_card(text), model_card.is_untouched(data, "x")


def _event(kind: str) -> Callable[[bytes], Any]:
    """Return a parser of a sender's request: its first line has the headers."""
    dialect = next(d for name, d in DIALECTS.items() if kind.startswith(name))

    def parse(data: bytes) -> Any:
        line, _, body = data.partition(b"\n")
        pairs = (part.partition("\t") for part in line.decode("latin-1").split("\v"))
        headers = {name.lower(): value for name, _, value in pairs}
        meta_of(dialect, clean(_text(body)))
        with suppress(RequestRefused):
            verify(dialect, dialect.proof, [b"secret"], headers, body, 1.76e9)
        event = read_event(dialect, "x", headers, body)
        clean_json(dict(event.meta))

    return parse


def _request(hook: Hook) -> bytes:
    return "\v".join(f"{k}\t{v}" for k, v in hook.headers.items()).encode() + b"\n" + hook.body


def _answer(data: bytes) -> Any:
    """Headers of a store's answer, one a line."""
    fields = data.decode("latin-1").split("\n")
    text = fields[0]
    names = ("ChecksumCRC64NVME", "ChecksumCRC32C", "ChecksumCRC32", "ChecksumSHA256", "ChecksumType")
    error = OSError()
    error.response = {"ResponseMetadata": {"HTTPHeaders": {"retry-after": text}}}  # type: ignore[attr-defined]
    _asked_wait(error)
    reader._of_stamp("key", text)
    body = client._Body(_NoClient(), "key", 0, None, memoryview(bytearray(4)))  # type: ignore[arg-type]
    kept_checksums(dict(zip(names, fields, strict=False)))
    answer = {"ContentLength": 4, "ETag": fields[-1], "ContentRange": text}
    return body._checked(answer, 0, 3)


class _NoClient:
    def _name(self, key: str) -> str:
        return f"s3://bucket/{key}"


def _head(data: bytes) -> Any:
    return load_head(Folder({HEAD: data}))  # type: ignore[arg-type]


def _frame(data: bytes) -> Any:
    return columnar_file.load(data, max_bytes=1 << 20)


_CONFIG = json.dumps(
    {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "text_config": {"num_hidden_layers": 2, "norm_topk_prob": True},
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0},
        "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
        "num_layers": 2,
        "kv_channels": 8,
        "softmax_scale": None,
        "model": {"n_layers": 2, "block": {"sequence_mixer": {"n_heads": 2, "rope": {"theta": 5e5}}}},
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "ignored_layers": ["a"],
        },
    }
).encode()
_ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
_HEADER = f'{{"__metadata__":{{"format":"pt"}},"w":{_ENTRY}}}'.encode()
_ZARRAY = json.dumps(
    {
        "zarr_format": 2,
        "shape": [4, 4],
        "chunks": [2, 4],
        "dtype": "<f4",
        "compressor": None,
        "fill_value": None,
        "order": "C",
        "filters": None,
    }
).encode()
_STATE = json.dumps(
    {
        "global_step": 20,
        "epoch": 0.5,
        "best_metric": 1.5,
        "log_history": [{"loss": 3.0, "step": 10}, {"eval_loss": float("nan"), "step": 20}],
    }
).encode()
# Values of kinds that JSON does not have, one a sample: one that is refused ends the parsing of all.
_OBJECTS = [
    canonical_json({"a": encode(value)})
    for value in (
        (1, 2**70, float("nan"), b"x", {1: {2}}, 1 + 2j, OrderedDict(a=frozenset("b"))),
        Named("date", "2026-11-28"),
        Named("datetime", ("2026-11-28T08:00:00", 0, (0, 3600, 0, "CET"))),
        Named("time", ("08:00:00.5", 1, None)),
        Named("timedelta", (1, 2, 3)),
        Named("decimal", "1.5E+9"),
        Named("fraction", (1, 3)),
        Named("uuid", ("12345678-1234-5678-1234-567812345678", None)),
        Named("range", (0, 9, 2)),
        Named("slice", (None, 3, None)),
        Named("deque", {"items": [1], "maxlen": 3}),
        Named("counter", {"a": 1}),
        Named("size", (2, 3)),
        Named("dtype", "float32"),
        Named("device", ("cuda", "0")),
        Named("path", "/a/b"),
        Named("namespace", {"a": 1}),
        Named("npscalar", ("<f4", b"abcd")),
        Named("bytesioat", (b"ab", 1)),
        TensorRef("w"),
        Refused("os.system"),
    )
]
_YAML = (
    b"""run_name: tiny
model: &m {d_model: 8, lr: 1e-5}
list: [*m, 'x', "y\\u00e9"]
when: 2026-01-02
more:
  <<: *m
  text: |
    a
    b
? key
: !!int 3
""",
    b"---\nlicense: mit\nbase_model:\n  - a/b\n...\n",
)
_CARD = b"""---
library_name: transformers
license: "mit"
---

# x

8 parameters in 1 tensors, exported from a sharded training checkpoint.

## Provenance

- source: `/a` (dcp)
- source manifest (BLAKE3): `%s`
- exported by: ckptcore 0.2
- dtype: float32 (8)
- tied: `a` is `b`, equality checked
""" % (b"a" * 64)
_PACKAGE = HERE.parents[1] / "ckptcore"
_RULES = (_PACKAGE / "topology/families/olmo.toml").read_bytes()
_FAMILY = (_PACKAGE / "naming/maps/families/gpt2.toml").read_bytes()
_TIMES = (b"2026-11-28T08:00:00.5+01:00", b"Sat, 28 Nov 2026 08:00:00 GMT", b"1760000000", b"2026-11-28")
_URLS = (
    b"s3://me:secret@bucket/a?X-Amz-Signature=abc&b=1",
    b"https://[::1]:80/a%2Fb#c",
    b"merged://[s3://b/n1,/data/n0]/inner",
    b"file:///a/../b",
)
_SECRETS = (
    b"train.py --hf-token abc --lr 1e-4 KEY=a1B",
    b'{"note": "api_key: abc", "Authorization": "Bearer x"}',
)
_ANSWERS = (
    b"bytes 0-3/100\nAAAAAA==\n",
    b"120\nrosUhgp5mIg=\n",
    b'100 bytes, version "abc"\nCOMPOSITE-3',
    b"0-3/*",
)
_LEASE = b'{"token": "t", "fence": 3, "host": "h", "process": ["1", "2", "3", "4"], "until": 1.5}'
_HOLDINGS = base64.b64encode(holdings.pack([holdings.Holding("file", "a", bytes(16), "", 3)]))
_RECORD = (
    b'{"version": 2, "why": "retired", "checkpoint": "a", "child": "b", "uri": "/a", "proof": "tensors", '
    b'"expects": "'
    + _HOLDINGS
    + b'", "given_up": [], "at": "2026-11-28T08:00:00Z", "due_at": "2026-12-05T08:00:00Z", '
    b'"things": [["x", ["file", 3, "", 1, 2, 3, 4, 1]]]}'
)
_OBLIGATION = (
    b'{"version": 2, "id": "a", "checkpoint": "b", "source": "/a", "place": "/b", '
    b'"created_at": "2026-11-28T08:00:00Z", "contents": "' + _HOLDINGS + b'"}'
)
_RECEIPT = canonical_json({"plan": "p", **receipts.Receipt(0, "a", 4, None, 1.5).as_dict(), "sums": "00"})


def _plan() -> bytes:
    """Return the head of a saved plan."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "a.safetensors"
        source.write_bytes(len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8))
        plan_into(Path(scratch) / "plan", Request(str(source), f"{scratch}/out"), inspect(str(source)))
        return (Path(scratch) / "plan" / HEAD).read_bytes()


PARSERS: tuple[Parser, ...] = (
    Parser("json", load_json, InvalidText, (_CONFIG, _STATE, *_OBJECTS)),
    Parser("json, strict", lambda d: load_json(d, finite=True, unique=True), InvalidText, (_CONFIG, _HEADER)),
    Parser("yaml", load_yaml, InvalidText, (*_YAML, _CONFIG)),
    Parser("toml", foreign_text.load_toml, InvalidText, (_RULES, _FAMILY)),
    Parser("time", _of_text(foreign_text.parse_time), InvalidText, _TIMES),
    Parser("date", _of_text(foreign_text.parse_date), InvalidText, _TIMES),
    Parser("HTTP time", _of_text(foreign_text.parse_http_time), InvalidText, _TIMES),
    Parser("number", _of_text(foreign_text.parse_float), InvalidText, (b"1.5e-3", b"-12", b"nan")),
    Parser("integer", _of_text(foreign_text.parse_integer), InvalidText, (b"15", b"-12_000")),
    Parser("URL", _of_text(foreign_text.parse_url), InvalidText, _URLS),
    Parser("merged URL", _of_text(split_merged), CkptError, (b"merged://[s3://b/n1,/data/n0]/inner",)),
    Parser("size", _of_text(parse_size), CkptError, (b"1.5GiB", b"300")),
    Parser("duration", _of_text(parse_duration), CkptError, (b"1.5h", b"300")),
    Parser("step", _of_text(step_of), None, (b"step-300", b"iter_0000300", b"checkpoint-20")),
    Parser("storage option", _of_text(options._parsed), None, (b'{"a": 1}', b"true", b"abc")),
    Parser("place", _of_text(normal_uri), CkptError, _URLS),
    Parser("safetensors header", lambda d: parse_header(d, 8, "x"), CkptError, (_HEADER,)),
    Parser("zarray", lambda d: zarr_v2.parse(d, "x"), CkptError, (_ZARRAY,)),
    Parser("object tree", _tree, InvalidText, _OBJECTS),
    Parser("state of a trainer", _stored_facts(registration._json_state), InvalidText, (_STATE,)),
    Parser("config of OLMo-core", _stored_facts(registration._olmo_core_config), InvalidText, (_CONFIG,)),
    Parser("config of a trainer", _stored_facts(registration._yaml_config), InvalidText, _YAML),
    Parser(
        "facts",
        _of_text(lambda t: facts_of_pairs([t])),
        CkptError,
        (b"metrics.loss=2.5", b'config.a={"b":1}'),
    ),
    Parser("config as evidence", lambda d: stored_configs._read_config(_stored(d), "a.yaml"), None, _YAML),
    Parser("config", _config, CkptError, (_CONFIG,)),
    Parser("card", _card, None, (_CARD,)),
    Parser("sharding rules", _of_text(rules_file.load), CkptError, (_RULES,)),
    Parser(
        "map",
        _of_text(lambda t: declaration.maps_of(declaration.family_form(t, "x"), "x")),
        CkptError,
        (_FAMILY,),
    ),
    *(Parser(f"event of {k}", _event(k), RequestRefused, (_request(h),)) for k, h in HOOKS.items()),
    Parser("answer of a store", _answer, CkptError, _ANSWERS),
    Parser("lease", lease._unpacked, None, (_LEASE,)),
    Parser("time of a store", _of_text(session._moment), InvalidText, _TIMES),
    Parser("receipt", lambda d: receipts._parsed(d, "p", 0), None, (_RECEIPT,)),
    Parser("record of what is set aside", SetAsideRecord.load, InvalidText, (_RECORD,)),
    Parser("signature", lambda d: signing._Statement.of(signing._bundle(d)), InvalidText, (_SIGNATURE,)),
    Parser("statement of a signature", _statement, InvalidText, (_STATEMENT,)),
    Parser("record of an obligation", obligation_records.loaded, InvalidText, (_OBLIGATION,)),
    Parser("head of a plan", _head, CkptError, (_plan(),)),
    Parser("frame", _frame, CkptError, (columnar_file.dump({"a": 1}, {}),)),
    Parser("text with secrets", _of_text(redacted), None, (*_SECRETS, *_URLS)),
    Parser("bare URL", _of_text(bare_url), None, _URLS),
    Parser("text for a terminal", _of_text(printable), None, (*_SECRETS, *_YAML)),
)
# Pieces that parsers of some kind are known to choke on.
HOSTILE = (
    *(b"!!bool x", b"!!int ''", b"!!timestamp foo", b"!!binary =", b"!!omap x", b"!!python/name:os.system"),
    *(b"1:" * 50, b"0x", b"0b_", b"._", b"1e999", b"-0", b"NaN", b"-Infinity", b".nan", b".inf"),
    *(
        b"&a [*a]",
        b"*a",
        b"<<: *a",
        b"<<: [*m, 3]",
        b"? [a]\n: b",
        b"? ",
        b"- ",
        b"\t",
        b"---\n",
        b"%YAML 1.1\n",
    ),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\U00110000"', b"\\u0000", b"\x00", b"\xef\xbb\xbf", b"\xff\xfe"),
    *(b"[" * 200, b"]" * 200, b'{"a":' * 200, b"{" * 5, b"9" * 400, b"9" * 5000, b"-" + b"9" * 20),
    *(
        b'"a":1,"a":2,',
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'""',
        b"'",
        b'"',
        b"`",
        b"\\",
        b"\r\n",
        b"\x85",
        b"\xc2\x85",
    ),
    *(
        "\u2028".encode(),
        "²".encode(),
        "٣".encode(),
        "\u202e".encode(),
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xb2",
    ),
    *(
        b"://[",
        b"@",
        b"%00",
        b"%",
        b":99999",
        b"#",
        b"?",
        b"=",
        b"; ",
        b"0001-01-01T00:00:00+23:59",
        b"24:00",
    ),
    *(
        b"Thu, 01 Jan 99999 00:00:00 +9999",
        b"BC",
        b"infinity",
        b'{"$": "decimal", "value": "1e9"}',
        b'{"$": []}',
    ),
    *(b'{"$": "timedelta", "value": [999999999999, 0, 0]}', b'{"$": "range", "value": [0, 9, 0]}', b'"$"'),
)


def changed(data: bytes, rng: random.Random) -> bytes:
    """Return a sample with a change or several."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        deed = rng.random()
        at = rng.randrange(len(data) + 1)
        if deed < 0.35:
            end = at + rng.choice((0, 0, 1, 4, 16))
            data = data[:at] + rng.choice(HOSTILE) + data[end:]
        elif deed < 0.55 and data[:1] in (b"{", b"["):
            try:
                data = json_changed(data, rng)
            except (ValueError, RecursionError):
                data = bytes_changed(data, rng)
        elif deed < 0.75:
            data = bytes_changed(data, rng)
        elif deed < 0.82:
            data = data[:at]
        elif deed < 0.88:
            piece = data[at : at + rng.choice((1, 3, 10, 40))]
            data = data[:at] + piece * rng.choice((2, 10, 300)) + data[at:]
        elif deed < 0.93:
            lines = data.split(b"\n")
            rng.shuffle(lines)
            data = b"\n".join(lines)
        elif deed < 0.96:
            data = data.decode("latin-1").encode(rng.choice(("utf-8", "utf-16", "utf-16-le", "utf-32")))
        else:
            data = rng.choice(HOSTILE) * rng.choice((1, 1, 2, 100))
    return data[: 300 << 10]


def run(parser: Parser, data: bytes) -> str:
    """Parse a text; return "value" or "refused", or raise `Defect`."""
    with bounded():
        try:
            parser.parse(data)
        except Defect:
            raise
        except BaseException as error:
            if parser.raises is None or not isinstance(error, parser.raises):
                raise Defect(f"{type(error).__name__}: {error}") from error
            if isinstance(error, CkptError) and error.code == "internal":
                raise Defect(f"{error}") from error
            return "refused"
    return "value"


def hunt(only: str, seed: int, inputs: int, found: str) -> tuple[Counter[str], int]:
    """Parse changed samples of each parser in turn; return counts by "parser: outcome", and of defects."""
    logging.disable()
    chosen = [p for p in PARSERS if re.search(only, p.name)]
    rng, outcomes, defects = random.Random(seed), Counter[str](), 0
    for parser in chosen:
        for sample in parser.samples:
            run(parser, sample)  # unchanged: imports what it needs
    for n in range(inputs):
        parser = chosen[n % len(chosen)]
        data = changed(rng.choice(parser.samples), rng)
        try:
            outcome = run(parser, data)
        except Defect as defect:
            outcome, defects = "DEFECT", defects + 1
            folder = Path(found)
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{zlib.crc32(parser.name.encode() + data):08x}.text"
            file.write_bytes(data)
            print(f"DEFECT {parser.name!r} {file}: {str(defect)[:300]}", flush=True)
        outcomes[f"{parser.name}: {outcome}"] += 1
    return outcomes, defects


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--only", default="")
    parser.add_argument("--found", default="fuzz-found")
    parser.add_argument("--replay", nargs=2, metavar=("PARSER", "FILE"))
    args = parser.parse_args()
    if args.replay:
        name, file = args.replay
        print(run(next(p for p in PARSERS if p.name == name), Path(file).read_bytes()))
        return 0
    print(f"seed {args.seed}", flush=True)
    began, total, defects = time.monotonic(), Counter[str](), 0
    work = [(args.only, args.seed * 1000 + j, args.inputs // args.jobs, args.found) for j in range(args.jobs)]
    with get_context("fork").Pool(args.jobs) as pool:
        for outcomes, bad in pool.starmap(hunt, work, chunksize=1):
            total += outcomes
            defects += bad
    for name, count in sorted(total.items()):
        print(f"{name} {count}")
    seconds, count = time.monotonic() - began, sum(total.values())
    print(f"{count} texts in {seconds:.0f} s ({count / seconds:.0f}/s), {defects} defects, seed {args.seed}")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
