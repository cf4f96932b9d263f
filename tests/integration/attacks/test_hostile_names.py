"""Test that tensors with hostile names are written unchanged, or refused with their name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepspeed_files import model_states, partitions, save, shapes_of

from ckptcore.cli.main import run

NAMES: dict[str, tuple[str, ...]] = {
    "a NUL": ("a\0b",),
    "a step up": ("../x",),
    "a dot": (".",),
    "dots": ("..",),
    "a lone surrogate": ("a\udc80",),
    "a long one": ("n" * 5000,),
    "a long step": ("n" * 256,),
    "absolute": ("/abs",),
    "a backslash": ("a\\b",),
    "a line": ("a\nb",),
    "below another": ("a", "a/b"),
    "another's chunk": ("a", "a/0"),
    "another's metadata": ("a", "a/.zarray"),
    "another's state": ("a", "a/fp32.pt"),
    "reserved": ("__metadata__",),
    "an escape": ("\x1b[2J",),
    "only a case": ("A", "a"),
    "much nested": ("/".join("x" * 3000),),
}
VALUES = {
    "U1": np.str_("x"),
    "U0": np.str_(""),
    "U array": np.array(["a"]),
    "S1": np.bytes_(b"x"),
    "void": np.void(b"ab"),
    "objects": np.array([None], dtype=object),
    "huge": 10**400,
    "surrogate": "\udc80",
    "NUL": "\0",
    "nan": float("nan"),
    "complex": 1j,
    "keys": {1: 2, None: 3, (1, 2): 4},
}


WAYS = {
    **{to: ["consolidate", "--to", to] for to in ("zarr", "safetensors", "dcp", "torch_save")},
    "dcp of safetensors": ["reshard", "--to", "dcp", "--mesh", "fsdp=2", "--serialization", "safetensors"],
}


@pytest.mark.alike(3)
@pytest.mark.parametrize("to", WAYS)
def test_no_name_of_a_tensor_is_an_internal_error(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, names in enumerate(NAMES.values()):
        source, target = tmp_path / f"{number}.pt", tmp_path / f"{number}.out"
        torch.save({name: torch.full((2,), float(n)) for n, name in enumerate(names)}, source)
        verb, *options = WAYS[to]
        code = run([verb, str(source), str(target), *options, "--no-catalog"])
        captured = capsys.readouterr()
        assert code in (0, 2, 13), (names, code, captured.err)
        assert "\x1b" not in captured.out + captured.err
        if code == 0:  # then it is there, under its name
            assert run(["diff", str(source), str(target)]) == 0, names
            capsys.readouterr()
        else:
            assert not target.exists()


@pytest.mark.alike(4)
@pytest.mark.parametrize("name", VALUES)
def test_no_plain_value_is_an_internal_error(name: str, tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    torch.save({"w": torch.ones(2), "v": VALUES[name]}, source)
    for argv in (
        ["inspect"],
        ["inspect", "--output", "json"],
        ["validate", "--no-catalog", "--level", "values"],
    ):
        assert run([argv[0], str(source), *argv[1:]]) in (0, 1)
    for to in ("dcp", "torch_save"):
        assert run(["consolidate", str(source), str(tmp_path / to), "--to", to, "--no-catalog"]) != 70
        assert run(["diff", str(source), str(tmp_path / to), "--output", "json"]) != 70


class Scalar:
    """A numpy scalar as a pickle may contain it, whatever numpy itself would write."""

    def __init__(self, *given: object) -> None:
        self.given = given

    def __reduce__(self) -> tuple[object, ...]:
        return np.float64(1).__reduce__()[0], self.given


SCALARS = {
    "beyond unicode": ("<U1", b"\xff\xff\xff\xff"),
    "big-endian": (">U1", b"\0\0\0a"),
    "beyond, swapped": (">U1", b"a" * 4),
    "a surrogate": ("<U1", b"\x80\xdc\0\0"),
    "short": ("<U1", b"a"),
    "long": ("<U1", b"a" * 8),
    "text": ("<U1", "abcd"),
    "nothing": ("<U1",),
    "empty": ("U0", b""),
    "a date": ("M8[D]", b"\xff" * 8),
    "an object": ("O", b"12345678"),
    "a short float": ("<f8", b"1"),
    "a wide boolean": ("?", b"\x07"),
    "bytes": ("S3", b"ab\0"),
}


@pytest.mark.parametrize("name", SCALARS)
def test_no_numpy_scalar_is_an_internal_error(name: str, tmp_path: Path) -> None:
    source = tmp_path / "a.pt"
    dtype, *data = SCALARS[name]
    torch.save({"w": torch.ones(2), "v": Scalar(np.dtype(dtype), *data)}, source)
    for argv in (["inspect"], ["validate", "--no-catalog", "--level", "values"]):
        assert run([argv[0], str(source), *argv[1:]]) in (0, 1)
    for to in ("dcp", "torch_save"):
        assert run(["consolidate", str(source), str(tmp_path / to), "--to", to, "--no-catalog"]) != 70


def test_a_numpy_text_is_read_as_numpy_reads_it(tmp_path: Path) -> None:
    from ckptcore.core.object_tree import Named
    from ckptcore.encodings.pickle.library_globals import _scalar

    for text in ("", "a", "é\U0001f600", "a\0b"):
        for order in "<>":
            array = np.array(text, dtype=f"{order}U6")
            found = _scalar(Named("npdtype", ["U6", order]), array.tobytes())
            assert isinstance(found, Named)
            dtype, raw = found.value
            assert np.frombuffer(raw, dtype).tolist() == [array[()].item()]


def test_no_name_of_a_parameter_is_an_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed names the elements of flat buffers, and a universal folder has a folder for each name."""
    for number, names in enumerate(NAMES.values()):
        group = {name: torch.full((9,), float(n)) for n, name in enumerate(names)}
        files = {
            f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt": s for r, s in enumerate(partitions([group], 2))
        }
        files["mp_rank_00_model_states.pt"] = model_states(2, param_shapes=[shapes_of(group)])
        source, box = save(tmp_path / f"{number}", files), tmp_path / f"{number}.box"
        target = box / "in" / "out"
        target.parent.mkdir(parents=True)
        command = ["consolidate", str(source), str(target), "--to", "deepspeed_universal", "--no-catalog"]
        code = run(command)
        captured = capsys.readouterr()
        assert code in (0, 2, 13), (names, code, captured.err)
        assert "\x1b" not in captured.out + captured.err
        assert {p.name for p in box.rglob("*") if "in" not in p.relative_to(box).parts} == set()
        assert {p.name for p in target.parent.iterdir()} <= {"out"}
        if code == 0:
            assert run(["diff", str(source), str(target), "--model"]) == 0, names
            capsys.readouterr()
