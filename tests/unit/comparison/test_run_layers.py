"""Norms and changes of layers are those of their weights, for many steps of many tensors."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from ckptcore.comparison import step_history
from ckptcore.comparison.step_history import RunHistory
from ckptcore.core import columnar_file
from ckptcore.fingerprints.step_columns import TensorPoint, pack_points, unpack_columns
from ckptcore.naming.optimizer_state import STATE, TRAINED
from ckptcore.page.pictures import change_map, chart
from ckptcore.utils.foreign_text import InvalidText

FIRST, SECOND, HEAD = "model.layers.0.a.weight", "model.layers.0.b.weight", "lm_head.weight"


def point(fqn, norm, change=math.nan, role=TRAINED):
    return TensorPoint(fqn, "float32", role, 9, norm, 0.0, 1.0, 0, 0, 0, change)


def history(*steps):
    """The history of steps 10, 20, ... of these tensors."""
    measured = [SimpleNamespace(step=10 * n) for n in range(1, len(steps) + 1)]
    columns = [unpack_columns(pack_points(points), len(points)) for points in steps]
    return RunHistory("run", measured, (), columns)


def test_layers_have_the_norm_of_their_weights_where_they_are():
    run = history(
        [point(FIRST, 3.0), point("optim.x", 9.0, role=STATE), point(HEAD, math.inf)],
        [],
        [point(SECOND, 4e200), point(FIRST, 3e200), point(HEAD, 1e-200)],
    )
    assert run.layers() == {
        "head": [(10, None), (30, pytest.approx(1e-200, rel=1e-12))],
        "layer 0": [(10, 3.0), (30, pytest.approx(5e200))],
    }


def test_a_layer_moves_by_what_was_measured_or_else_by_its_norm():
    run = history(
        [point(FIRST, 3.0), point(SECOND, 4.0), point(HEAD, 0.0)],
        [point(SECOND, 4.0, 0.75), point(FIRST, 7.0), point(HEAD, 1.0)],
        [point(HEAD, math.inf), point("model.layers.1.a.weight", 1.0)],
    )
    assert run.moves() == {
        "head": [None, None, math.inf],
        "layer 0": [None, pytest.approx(1.0), None],
        "layer 1": [None, None, None],
    }
    assert list(run.moves()) == ["head", "layer 0", "layer 1"]
    assert [p.norm for _, p in run.tensor(HEAD)] == [0.0, 1.0, math.inf]


def test_a_name_is_read_once_for_all_steps(monkeypatch):
    asked = []
    layer_name = step_history.layer_name
    monkeypatch.setattr(step_history, "layer_name", lambda fqn: asked.append(fqn) or layer_name(fqn))
    run = history(*[[point(FIRST, 1.0), point(HEAD, 2.0)]] * 50)
    assert (len(run.moves()), len(run.layers())) == (2, 2)
    assert sorted(asked) == [HEAD, FIRST]


def test_columns_of_unknown_kinds_are_refused(monkeypatch):
    points = [point(FIRST, 3.0), point(HEAD, 1.0)]
    columns = unpack_columns(pack_points(points), len(points))
    assert str(columns.points()) == str(tuple(points))  # a NaN equals none
    head, arrays = columnar_file.load(pack_points(points))
    for kind in (-1, 1):
        arrays["kind"] = arrays["kind"] * 0 + kind
        monkeypatch.setattr(columnar_file, "load", lambda _, **limits: (head, arrays))
        with pytest.raises(InvalidText, match="unknown dtypes"):
            unpack_columns(b"", 2)


def test_a_blob_that_grows_beyond_its_tensors_is_refused():
    points = [point(FIRST, 3.0), point(HEAD, 1.0)]
    blob = pack_points(points)
    for tensors in (1, 3, 0, -1):
        with pytest.raises(InvalidText, match="2 tensors, and not of"):
            unpack_columns(blob, tensors)
    head, arrays = columnar_file.load(blob)
    grown = columnar_file.dump(head, arrays | {"more": np.zeros(1 << 20, np.int64)})
    with pytest.raises(InvalidText, match="must be at most"):
        unpack_columns(grown, len(points))


def test_a_map_of_change_escapes_names():
    drawn = change_map([1, 2], {'<b x="&': [None, 0.5], "z": [None, None]}, {2})
    assert "<title>&lt;b x=&#34;&amp;, step 2: 0.5</title>" in drawn
    assert "<b" not in drawn


def test_steps_share_a_column_where_they_do_not_fit():
    changes = [0.1] * 400
    changes[7], changes[8] = 0.9, None
    drawn = change_map(list(range(1000, 1400)), {"head": changes}, {1008, 1009})
    assert drawn.count("<title>head, step ") == 134
    assert "<title>head, step 1006 to 1008: 0.9</title>" in drawn
    assert "<title>head, step 1399: 0.1</title>" in drawn
    assert [f"step {step} has an alarm" in drawn for step in (1007, 1008, 1009)] == [False, True, True]


def test_a_line_of_many_points_keeps_its_extremes_and_its_gaps():
    points = [(step, math.sin(step / 50)) for step in range(2000)]
    points[701], points[1203] = (701, 40.0), (1203, None)
    drawn = chart("loss", points)
    lines = [line.split('"')[0].split() for line in drawn.split('points="')[1:]]
    assert len(lines) == 2
    assert sum(map(len, lines)) < 300
    places = [tuple(map(float, point.split(","))) for line in lines for point in line]
    assert places == sorted(places, key=lambda place: place[0])
    assert min(y for _, y in places) == 14.0
    assert [y for _, y in places].count(14.0) == 1
    assert (places[0][0], places[-1][0]) == (70.0, 325.0)
