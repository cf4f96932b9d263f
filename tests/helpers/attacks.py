"""Build hostile checkpoints that try to run code or to exhaust their reader."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any


def attack_payloads(sentinel: Path) -> dict[str, bytes]:
    """Pickles that create the sentinel when they are loaded by an unpickler that is not careful."""
    touch = f"touch {sentinel}".encode()
    python = f"open({str(sentinel)!r}, 'w').close()".encode()

    def text(value: bytes) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value

    def stack_global(module: str, name: str) -> bytes:
        return text(module.encode()) + text(name.encode()) + b"\x93"

    def call(module: str, name: str, argument: bytes) -> bytes:
        return stack_global(module, name) + text(argument) + b"\x85R"

    end = b"."
    four = b"\x80\x04"
    return {
        "os.system": four + call("os", "system", touch) + end,
        "posix.system": b"\x80\x02cposix\nsystem\n" + text(touch) + b"\x85R" + end,
        "builtins.eval": four + call("builtins", "eval", python) + end,
        "builtins.exec": four + call("builtins", "exec", python) + end,
        "subprocess": four + stack_global("subprocess", "getoutput") + text(touch) + b"\x85R" + end,
        "protocol-0": b"cos\nsystem\n(S'" + touch + b"'\ntR" + end,
        "inst": b"(S'" + touch + b"'\nios\nsystem\n" + end,
        "obj": b"(cos\nsystem\nS'" + touch + b"'\no" + end,
        "newobj": four + stack_global("os", "system") + text(touch) + b"\x85\x81" + end,
        "newobj-ex": four + stack_global("os", "system") + text(touch) + b"\x85}\x92" + end,
        # A dotted name reaches a module through an allowed one.
        "dotted-module": four + call("torch.serialization", "os.system", touch) + end,
        "dotted-class": four + call("pathlib", "PosixPath.cwd.__globals__", touch) + end,
        "path-touch": four
        + stack_global("pathlib", "PosixPath.touch")
        + stack_global("pathlib", "PosixPath")
        + text(str(sentinel).encode())
        + b"\x85R\x85R"
        + end,
        "getattr": four
        + stack_global("builtins", "getattr")
        + stack_global("torch", "os")
        + text(b"system")
        + b"\x86R"
        + text(touch)
        + b"\x85R"
        + end,
        "getattr-proto2": b"\x80\x02c__builtin__\ngetattr\nctorch.serialization\n_get_layout\n"
        + text(b"__globals__")
        + b"\x86R"
        + end,
        "torch-load": four + call("torch", "load", str(sentinel).encode()) + end,
        "torch-hub": four + call("torch.hub", "load", b"http://127.0.0.1:1/x") + end,
        "numpy-runstring": four + call("numpy.testing._private.utils", "runstring", python) + end,
        "functools-partial": four
        + stack_global("functools", "partial")
        + stack_global("os", "system")
        + text(touch)
        + b"\x86R)R"
        + end,
        "map-system": four
        + stack_global("builtins", "list")
        + stack_global("builtins", "map")
        + stack_global("os", "system")
        + text(touch)
        + b"\x85\x86R\x85R"
        + end,
        "build-setstate": four + stack_global("os", "system") + text(touch) + b"\x85R}b" + end,
        "extension-code": four + b"\x82\x01" + end,
        "import-only": four + stack_global("antigravity", "fly") + end,
    }


class Evil:
    """Pickles into a call of os.system; `torch.save` carries it inside a real item."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.sentinel}",)


def crafted_metadata() -> dict[str, bytes]:
    """Small metadata files with absurd contents; none may cost memory or time."""
    frame = b"\x80\x04"
    deep = b"".join(b"\x85" for _ in range(200_000))
    # Sixty lists, each holding the one before it twice: 2^60 leaves for whoever walks the tree.
    twice = (
        b"q" + bytes([i]) + b"]q" + bytes([i + 1]) + b"(" + 2 * (b"h" + bytes([i])) + b"e"
        for i in range(0, 120, 2)
    )
    doubling = b"]" + b"".join(twice)
    return {
        "long-binput": frame + b"Nr\xff\xff\xff\xff.",
        "long-binget": frame + b"j\xff\xff\xff\xff.",
        "put-text": b"N" + b"p99999999999999\n.",
        "binbytes8": frame + b"\x8e" + struct.pack("<Q", 1 << 60) + b"x.",
        "binunicode8": frame + b"\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        "bytearray8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        "binunicode": frame + b"X\xff\xff\xff\xffx.",
        "frame": frame + b"\x95" + struct.pack("<Q", (1 << 63) - 1) + b"N.",
        "long4": frame + b"\x8b\xff\xff\xff\x7f\x01.",
        "long4-negative": frame + b"\x8b\xff\xff\xff\xff\x01.",
        "long-text": b"L" + b"9" * 900_000 + b"L\n.",
        "int-text": b"I" + b"9" * 900_000 + b"\n.",
        "deep-tuples": frame + b"N" + deep + b".",
        "deep-lists": frame + b"]" * 300_000 + b"a" * 299_999 + b".",
        "marks": frame + b"(" * 900_000 + b".",
        "doubling": frame + doubling + b".",
        "self-reference": frame + b"]\x94h\x00a.",
        "pop-empty": frame + b"0000.",
        "protocol-200": b"\x80\xc8N.",
        "no-stop": frame + b"N",
        "not-metadata": pickle.dumps({"hello": [1, 2, 3]}, protocol=4),
        "a-number": pickle.dumps(7),
        "dup-bomb": frame + b"N" + b"2" * 900_000 + b".",
    }
