"""Mutate files and keep their structure.

A torch zip is unpacked, one record is changed, and it is packed with correct CRCs and offsets, so that
readers get past them. A pickle is changed opcode by opcode, JSON value by value, a safetensors header as
JSON with its correct length. Everything else, and sometimes these too, is changed byte by byte. All
randomness comes from the `random.Random` that is passed in.
"""

from __future__ import annotations

import io
import json
import pickletools
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    63,
    64,
    127,
    128,
    255,
    256,
    65535,
    65536,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 40,
    1 << 50,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
TEXTS = (
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a" * 300,
    "\ud800",
    "\x00",
    "torch.float32",
    "model.weight",
    "0",
    "data/0",
    "$",
    "é",
    "rank_0.safetensors",
    "__0_0.distcp",
    "builtins",
    "os",
    "eval",
    "system",
)
EVIL = (
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"cposix\nsystem\n",
    b"c__builtin__\ngetattr\n",
    b"cnumpy\nload\n",
    b"ctorch\nload\n",
    b"cctypes\nCDLL\n",
)
MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # of torch.save before 1.6
OPS = tuple(bytes([b]) for b in b"(012N]})eut\x85\x86\x87R\x81bQas\x94\x93\x8f\x90\x91\x88.\x92")


def mutated(files: Mapping[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """Return the files with one to three of them changed; sometimes one is removed or replaced by another."""
    out = dict(files)
    names = sorted(out)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(names)
        if name not in out:
            continue
        deed = rng.random()
        if deed < 0.03 and len(out) > 1:
            del out[name]
        elif deed < 0.06:
            out[name] = out[rng.choice(sorted(out))]
        else:
            out[name] = changed(name, out[name], rng)
    return out


def changed(name: str, data: bytes, rng: random.Random) -> bytes:
    """Change one file by its kind; never its first bytes, which identify its format."""
    for test, change in KINDS:
        if test(name, data) and rng.random() < 0.85:
            try:
                return change(data, rng)
            except (
                ValueError,
                LookupError,
                ArithmeticError,
                RuntimeError,
                EOFError,
                struct.error,
                zipfile.BadZipFile,
                zlib.error,
            ):
                break  # an earlier mutation broke its structure: change bytes
    return bytes_changed(data, rng, keep=4)


def bytes_changed(data: bytes, rng: random.Random, keep: int = 0) -> bytes:
    """Flip bits, write numbers, cut and copy bytes."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if len(raw) <= keep:
            return bytes(raw) + rng.randbytes(8)
        at = rng.randrange(keep, len(raw))
        deed = rng.randrange(6)
        if deed == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif deed == 1:
            width = rng.choice((1, 2, 4, 8))
            value = rng.choice(NUMBERS) & ((1 << 8 * width) - 1)
            raw[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
        elif deed == 2:
            del raw[at : at + rng.choice((1, 2, 8, 64, 512))]
        elif deed == 3:
            piece = raw[at : at + rng.choice((1, 4, 32, 200))]
            raw[at:at] = piece * rng.choice((1, 2, 5))
        elif deed == 4:
            raw[at:at] = rng.randbytes(rng.choice((1, 3, 16)))
        else:
            del raw[at:]
    return bytes(raw)


def zip_changed(data: bytes, rng: random.Random) -> bytes:
    """Change, drop or duplicate one record of a torch zip; CRCs and offsets are correct."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = next((i for i, (n, _) in enumerate(records) if n.endswith("data.pkl")), 0)
    if rng.random() < 0.35:
        at = rng.randrange(len(records))
    name, content = records[at]
    deed = rng.random()
    if deed < 0.05:
        del records[at]
    elif deed < 0.08:
        records.append((name + rng.choice(("", "x", "/../x")), content))
    elif deed < 0.12:
        records[at] = (name.rsplit("/", 1)[0] + "/" + rng.choice(TEXTS).replace("\ud800", "y"), content)
    else:
        change = pickle_changed if name.endswith("data.pkl") else bytes_changed
        records[at] = (name, change(content, rng))
    return zip_of(records)


def zip_of(records: list[tuple[str, bytes]]) -> bytes:
    """Return stored records as a zip."""
    import warnings

    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        warnings.simplefilter("ignore")  # duplicate names are intended
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def items_changed(data: bytes, rng: random.Random) -> bytes:
    """Change one of the torch zips of a `.distcp`, which are back to back; its length stays."""
    # Each item begins with the local header of its data.pkl.
    starts = [m.start() for m in re.finditer(rb"PK\x03\x04.{26}[^/]{1,80}/data\.pkl", data, re.DOTALL)]
    if not starts:
        return bytes_changed(data, rng)
    n = rng.randrange(len(starts))
    begin, end = starts[n], starts[n + 1] if n + 1 < len(starts) else len(data)
    return (
        data[:begin]
        + (bytes_changed(data[begin:end], rng, 4) + bytes(end - begin))[: end - begin]
        + data[end:]
    )


def before_zip_changed(data: bytes, rng: random.Random) -> bytes:
    """Change one of the five pickles of torch.save before 1.6, or what is behind them."""
    stream = io.BytesIO(data)
    parts: list[bytes] = []
    for _ in range(5):
        begin = stream.tell()
        for _ in pickletools.genops(stream):
            pass
        parts.append(data[begin : stream.tell()])
    parts.append(data[stream.tell() :])
    at = rng.choice((1, 2, 3, 3, 3, 3, 4, 5))
    parts[at] = pickle_changed(parts[at], rng) if at < 5 else bytes_changed(parts[at], rng)
    return b"".join(parts)


def pickle_changed(data: bytes, rng: random.Random) -> bytes:
    """Change, drop, duplicate, move or insert some opcodes of a pickle."""
    ops = [(op, arg, pos) for op, arg, pos in pickletools.genops(data)]
    ends = [pos for _, _, pos in ops[1:]] + [len(data)]
    parts = [data[pos:end] for (_, _, pos), end in zip(ops, ends, strict=True)]
    kept = [(op.name, arg, part) for (op, arg, _), part in zip(ops, parts, strict=True) if op.name != "FRAME"]
    tokens = [part for _, _, part in kept]
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(1, len(tokens))
        name = kept[at][0] if at < len(kept) else ""
        deed = rng.random()
        if deed < 0.30 and ("INT" in name or name == "LONG1"):
            tokens[at] = _number(rng.choice(NUMBERS))
        elif deed < 0.30 and ("UNICODE" in name or "STRING" in name):
            tokens[at] = _text(rng.choice(TEXTS))
        elif deed < 0.42:
            tokens[at] = rng.choice(OPS)
        elif deed < 0.54:
            reference = bytes([rng.choice(b"hq"), rng.randrange(256)])
            plain = _number(rng.choice(NUMBERS)), _text(rng.choice(TEXTS))
            tokens[at:at] = [rng.choice((*OPS, *plain, reference))]
        elif deed < 0.64:
            del tokens[at]
        elif deed < 0.74:
            other = rng.randrange(1, len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        elif deed < 0.84:
            length = rng.choice((1, 2, 5, 20))
            tokens[at:at] = tokens[at : at + length] * rng.choice((1, 1, 3))
        elif deed < 0.90:
            tokens[at] = rng.choice(EVIL) + rng.choice((b"", b"(X\x02\x00\x00\x00idtR", b")R"))
        elif deed < 0.95:
            tokens[at] = _deep(rng)
        else:
            tokens[at] = bytes_changed(tokens[at], rng)
        if len(tokens) < 2:
            break
    return b"".join(tokens)


def _number(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes([value])
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    n = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([n]) + value.to_bytes(n, "little", signed=True)


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _deep(rng: random.Random) -> bytes:
    """Return nesting, sharing through the memo, or keys that are slow to hash."""
    depth = rng.choice((3, 50, 400))
    return rng.choice(
        (
            b"]" * depth + b"a" * (depth - 1),
            b"N" + b"\x85" * depth,
            b"N\x85" + b"2\x86" * min(depth, 60),
            b"}" + (b"N\x85" + b"2\x86" * 40) + b"Ns",
            b"(" * depth,
        )
    )


def json_changed(data: bytes, rng: random.Random) -> bytes:
    """Change some values of JSON."""
    top = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        top = _tree_changed(top, rng)
    text = json.dumps(top)
    if rng.random() < 0.04:
        text = text.replace('"', rng.choice(("'", '""')), 1)
    if rng.random() < 0.03:
        text = text[:-1] + ', "twice": 1, "twice": 2}' if text.endswith("}") else text
    return text.encode("utf-8", "surrogatepass")


def _tree_changed(top: Any, rng: random.Random) -> Any:
    places: list[tuple[Any, Any]] = []
    queue = [top]
    while queue and len(places) < 4000:
        value = queue.pop()
        for k, v in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            places.append((value, k))
            queue.append(v)
    if not places:
        return _any(rng)
    holder, key = rng.choice(places)
    deed = rng.random()
    if deed < 0.15:
        del holder[key]
    elif deed < 0.30:
        other, other_key = rng.choice(places)
        try:
            holder[key] = json.loads(json.dumps(other[other_key]))
        except (KeyError, IndexError):
            holder[key] = None
    elif deed < 0.40 and isinstance(holder, dict):
        holder[rng.choice(TEXTS)] = holder.pop(key)
    elif deed < 0.70 and isinstance(holder[key], (int, float)):
        holder[key] = rng.choice((*NUMBERS, -1, 0.5, -0.0, 1e308, True))
    else:
        holder[key] = _any(rng)
    return top


def _any(rng: random.Random) -> Any:
    deep: Any = []
    for _ in range(rng.choice((2, 300))):
        deep = [deep]
    number, text = rng.choice(NUMBERS), rng.choice(TEXTS)
    plain = (None, True, -1, 0.5, number, text, [], {}, [[0, 1]], {"a": [1]})
    return rng.choice((*plain, deep, ["x"] * 1000, [number] * 3))


def safetensors_changed(data: bytes, rng: random.Random) -> bytes:
    """Change the header of a safetensors file, with its correct length, or its data."""
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise ValueError("no header")
    header, body = data[8 : 8 + length], data[8 + length :]
    deed = rng.random()
    if deed < 0.75:
        header = json_changed(header, rng)
    elif deed < 0.85:
        header = bytes_changed(header, rng)
    else:
        body = bytes_changed(body, rng)
    stated = rng.choice(NUMBERS) & ((1 << 64) - 1) if rng.random() < 0.03 else len(header)
    return stated.to_bytes(8, "little") + header + body


def text_changed(data: bytes, rng: random.Random) -> bytes:
    """Change a small text file."""
    return rng.choice(
        (bytes_changed(data, rng), rng.choice(TEXTS).encode("utf-8", "surrogatepass"), data * 3, b"9" * 40)
    )


Change = Callable[[bytes, random.Random], bytes]
# A file's kind, by its content rather than by its name.
KINDS: tuple[tuple[Callable[[str, bytes], bool], Change], ...] = (
    (lambda n, d: n.endswith(".distcp"), items_changed),
    (lambda n, d: d[:4] == b"PK\x03\x04", zip_changed),
    (lambda n, d: MAGIC in d[:32], before_zip_changed),
    (lambda n, d: d[:1] == b"\x80" and d[1:2] in b"\x02\x03\x04\x05", pickle_changed),
    (lambda n, d: n.endswith(".safetensors"), safetensors_changed),
    (lambda n, d: d[:1] in b"{[" and bool(d), json_changed),
    (lambda n, d: n.endswith((".txt", ".yaml", ".yml")), text_changed),
)
