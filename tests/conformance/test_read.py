"""Test that every real checkpoint is converted bit for bit.

Two oracles: the tensors that the sample's writer stored beside it, and torch's own loader.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gaps
import pytest
from damaging import let_torch_read_olmo
from driver import Cli, run_process
from samples import (
    Sample,
    Tensors,
    differences,
    expected_tensors,
    flatten,
    prefix_of,
    read_safetensors,
    read_torch,
    tensors_of,
    tree_digest,
)

# Dtypes that the safetensors format has no name for.
NOT_IN_SAFETENSORS = frozenset({"complex128", "complex32"})


# The other outputs are compared with what torch loads, below.
@pytest.mark.parametrize("to", ["safetensors", pytest.param("torch_save", marks=pytest.mark.soak)])
def test_equals_the_truth(readable: Sample, to: str, cli: Cli, tmp_path: Path) -> None:
    """Every tensor of every expected* file is there with its dtype, shape and bytes."""
    outputs: list[Tensors] = []
    for number, folder in enumerate(gaps.readable(readable)):
        before = tree_digest(folder)
        outputs.append(consolidate(cli, folder, tmp_path / str(number), to))
        assert tree_digest(folder) == before, f"{folder} was modified"
    for file in readable.expected:
        truth = expected_tensors(file)
        if to == "safetensors":
            truth = {k: v for k, v in truth.items() if v[0] not in NOT_IN_SAFETENSORS}
        fits = [(out, p) for out in outputs if (p := prefix_of(truth, out)) is not None]
        if not fits:
            why = gaps.lookup(gaps.UNMATCHED, readable.name)
            names = sorted(truth)[:3], [sorted(o)[:3] for o in outputs]
            assert why, f"no output holds the names of {file.name}: {names}"
        for out, prefix in fits:
            assert not differences(truth, out, prefix)


def consolidate(cli: Cli, folder: Path, under: Path, to: str) -> Tensors:
    """Return the tensors of one folder after `consolidate`."""
    under.mkdir()
    dst = under / ("out" if to == "safetensors" else "out.pt")
    done = cli("consolidate", folder, dst, "--to", to, "--output", "json")
    if to == "safetensors" and done.code == 14:
        # Refused before any work, each tensor named; without those the rest must come through.
        assert not dst.exists()
        assert done.json["error"]["code"] == "unsupported-dtype"
        odd = [k for k, v in torch_output(cli, folder, under).items() if v[0] in NOT_IN_SAFETENSORS]
        assert odd
        flags = [word for name in odd for word in ("--exclude", name)]
        done = cli("consolidate", folder, dst, "--to", to, "--output", "json", *flags)
    assert done.code == 0, done
    assert isinstance(done.json, dict)
    return read_safetensors(dst) if to == "safetensors" else tensors_of(read_torch(dst))


def torch_output(cli: Cli, folder: Path, under: Path) -> Tensors:
    """Return the tensors of a folder after a conversion into a torch file."""
    dst = under / "all.pt"
    done = cli("consolidate", folder, dst, "--to", "torch_save")
    assert done.code == 0, done
    return tensors_of(read_torch(dst))


def test_equals_torchs_own_loader(readable: Sample, cli: Cli, tmp_path: Path) -> None:
    """The names are exactly those that torch loads, every tensor is bit-equal, values are equal."""
    why = gaps.lookup(gaps.NO_ORACLE, readable.name)
    if why:
        pytest.skip(f"no oracle: {why}")
    for number, folder in enumerate(gaps.readable(readable)):
        dst = tmp_path / f"{number}.pt"
        done = cli("consolidate", folder, dst, "--to", "torch_save", "--output", "json")
        assert done.code == 0, done
        theirs = load_with_torch(folder, tmp_path / f"{number}-theirs.pt")
        ours = flatten(read_torch(dst))
        truth, found = tensors_of(theirs), tensors_of(ours)
        assert sorted(found) == sorted(truth)
        assert not differences(truth, found)
        plain = {k: v for k, v in theirs.items() if isinstance(v, (bool, int, float, str, bytes))}
        # An object with refused classes is reported, and left out as a whole.
        named = [w["fqn"] for w in done.json["warnings"] if w["code"] == "refused-global"]
        plain = {k: v for k, v in plain.items() if not any(f"{k}.".startswith(f"{n}.") for n in named)}
        missing = {k: v for k, v in plain.items() if k not in ours or ours[k] != v}
        assert not missing, "plain values that were not carried over"


def load_with_torch(folder: Path, scratch: Path) -> dict[str, Any]:
    """Return leaves by dotted path, as torch loads them. This runs pickles: for own files only."""
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if b"olmo_core" in (folder / ".metadata").read_bytes():
            let_torch_read_olmo()
        try:
            dcp_to_torch_save(folder, scratch)
        except CheckpointException as error:
            if "No module named" in str(error):
                pytest.skip("no oracle: torch's loader needs a package that is not installed")
            raise
        # What Lightning puts beside a DCP folder belongs to the checkpoint.
        meta = folder / "meta.pt"
        beside = read_torch(meta, trusted=True) if meta.exists() else {}
        return flatten(arrays_as_tensors({**read_torch(scratch, trusted=True), **beside}))


def arrays_as_tensors(tree: Any) -> Any:
    """Return a tree as our torch files store it: `weights_only` allows no numpy."""
    import numpy as np
    import torch

    if isinstance(tree, np.ndarray):
        return tree.tolist() if tree.dtype.kind in "SU" else torch.from_numpy(np.array(tree, order="C"))
    if isinstance(tree, dict):
        return {k: arrays_as_tensors(v) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(arrays_as_tensors(v) for v in tree)
    return tree


def test_refused(refused: Sample, cli: Cli, tmp_path: Path) -> None:
    """Missing data is refused with its stable code, and nothing is published."""
    for folder, refusal in gaps.refused(refused):
        before = tree_digest(folder)
        dst = tmp_path / "out"
        done = cli("consolidate", folder, dst, "--output", "json")
        assert done.code == refusal.exit, f"{refusal.why}\n{done}"
        assert "Traceback" not in done.stderr
        assert not dst.exists()
        error = done.json["error"]
        assert error["exit_code"] == refusal.exit
        assert error["hint"], "no next step"
        checked = cli("validate", folder, "--level", "bytes", "--output", "json")
        assert checked.code == refusal.exit, checked
        if refusal.exit == 1:
            codes = {f["code"] for f in checked.json["findings"]}
            assert codes & refusal.codes, checked
        else:
            assert error["code"] in refusal.codes, done
        assert tree_digest(folder) == before


def test_recovers_on_request(recoverable: Sample, cli: Cli, tmp_path: Path) -> None:
    """A `.metadata.tmp` with complete data is read only on request."""
    (folder,) = recoverable.dcp_folders
    dst = tmp_path / "out"
    done = cli("consolidate", folder, dst, "--allow-incomplete", "--output", "json")
    assert done.code == 0, done
    truth = expected_tensors(recoverable.root / "expected.safetensors")
    assert not differences(truth, read_safetensors(dst))
    checked = cli("validate", folder, "--allow-incomplete", "--level", "bytes", "--output", "json")
    assert checked.code == 0, checked


def test_valid_to_the_bytes(readable: Sample, cli: Cli) -> None:
    """`validate --level bytes` has no error to report for a good checkpoint, and counts it all."""
    for folder in gaps.readable(readable):
        done = cli("validate", folder, "--level", "bytes", "--output", "json")
        assert done.code == 0, done
        report = done.json
        assert report["ok"] is True
        assert report["level"] == "bytes"
        assert [f for f in report["findings"] if f.get("severity") == "error"] == []
        assert set(report) >= {"ok", "level", "format", "tensors", "bytes", "findings"}
        assert report["tensors"] > 0


def test_a_process_of_its_own_gives_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    """The driver's forks print and write the same as a user's command."""
    source = next(s for s in _small() if s.name == "dcp_stale_4r").dcp_folders[0]
    for dst, run in ((tmp_path / "fork", cli), (tmp_path / "process", run_process)):
        done = run("consolidate", source, dst, "--output", "json")
        assert done.code == 0, done
    names = sorted(p.name for p in (tmp_path / "fork").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "process").iterdir())
    assert [n for n in names if n.endswith(".safetensors")]
    for name in names:
        if name.endswith((".safetensors", ".json")):
            assert (tmp_path / "fork" / name).read_bytes() == (tmp_path / "process" / name).read_bytes()


def _small() -> list[Sample]:
    from samples import FIXTURES

    return [Sample(p.name, p) for p in sorted((FIXTURES / "torch").iterdir()) if p.is_dir()]
