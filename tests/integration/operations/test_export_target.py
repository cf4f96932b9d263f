"""Test that targets are checked like requests, and that two sources never get one destination."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptcore.errors import UsageError
from ckptcore.operations.export_target import TemplateFields, colliding, options_digest, target_of
from ckptcore.planning.request import Request

PLACE = TemplateFields("/runs", "llama", 300, "step-300", "llama/step-300")


def test_the_default_goes_beside_the_root():
    assert target_of({}).fill(PLACE) == "/exports/llama/step-300"
    request = target_of({"verb": "export", "dtype": "bfloat16"}).request("/runs/llama/step-300", PLACE)
    assert request == Request("/runs/llama/step-300", "/exports/llama/step-300", "export", dtype="bfloat16")


@pytest.mark.parametrize(
    ("template", "place", "filled"),
    [
        ("{root}/../exports/{run}/step-{step}", PLACE, "/exports/llama/step-300"),
        ("/out/{step:08d}", PLACE, "/out/00000300"),
        ("s3://b/{path}", PLACE, "s3://b/llama/step-300"),
        (
            "{root}/../out/{name}",
            TemplateFields("s3://b/runs", "r", 1, "s=1.ckpt", "r/s=1.ckpt"),
            "s3://b/out/s=1",
        ),
        # A folder called s=1.ckpt would be one file to every export.
        ("/out/{path}", TemplateFields("/b/runs", "r", 1, "s=1.ckpt", "r/s=1.ckpt"), "/out/r/s=1"),
    ],
)
def test_templates(template, place, filled):
    assert target_of({"destination": template}).fill(place) == filled


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"destination": "/out/{host}/{step}"}, "host"),
        ({"destination": "/out/{step.real}"}, "step.real"),
        ({"destination": "/out/{step!r}"}, "step"),
        ({"destination": "/out/{name:>9}"}, "formats"),
        ({"destination": "/out/{step"}, "not a template"),
        ({"destination": "/out/{run}"}, "same for every checkpoint"),
        ({"source": "/elsewhere"}, "source"),
        ({"colour": "red"}, "colour"),
        ({"verb": "reshard"}, "mesh"),
        ({"verb": "reshard", "mesh": "nonsense"}, "nonsense"),
        ({"verb": "paint"}, "paint"),
        ({"to": "no-such-format"}, "no-such-format"),
        ({"max_file_size": "much"}, "cannot be used"),
        ({"destination": "{path}.safetensors", "to": "dcp"}, "does not fit"),
    ],
)
def test_an_invalid_target_is_refused_when_it_is_set(form, word):
    with pytest.raises(UsageError, match=word):
        target_of(form)


@pytest.mark.parametrize("name", ["allow_incomplete", "recover"])
def test_the_option_and_the_field_of_a_request_are_one(name):
    target = target_of({name: True})
    place = TemplateFields("/runs", "llama", 1, "step-1", "llama/step-1")
    assert target.request("/runs/llama/step-1", place).recover is True
    assert target.as_dict()["recover"] is True


def test_a_missing_step():
    with pytest.raises(UsageError, match=r"\{step\}: no step number in 'llama/final'"):
        target_of({"destination": "/out/{step}"}).fill(
            TemplateFields("/runs", "llama", None, "final", "llama/final")
        )


def test_the_digest_covers_the_options_that_change_the_bytes():
    one = Request("/a", "/b", "export", dtype="bfloat16")
    same = Request("/other", "/elsewhere", "export", "safetensors", dtype="bfloat16", overwrite=True)
    assert options_digest(one) == options_digest(same)
    assert options_digest(one) != options_digest(Request("/a", "/b", "export"))
    assert options_digest(one) != options_digest(Request("/a", "/b", dtype="bfloat16"))


names = st.text("ab/", min_size=1, max_size=5).map(lambda s: "/" + s.strip("/"))


@given(st.lists(names, max_size=6))
def test_equal_and_nested_destinations_collide(places):
    found = colliding(places)
    for at, each in enumerate(places):
        others = places[:at] + places[at + 1 :]
        meets = any(
            each == o
            or (len(o) > 1 and each.startswith(o + "/"))
            or (len(each) > 1 and o.startswith(each + "/"))
            for o in others
        )
        if "//" not in "".join(places):
            assert (each in found) == meets


@pytest.mark.parametrize(
    "form",
    [
        {"recover": "false"},
        {"overwrite": 1},
        {"include": "*.weight"},
        {"exclude": [1]},
        {"rename": "a=b"},
        {"rename": [["a"]]},
        {"max_file_size": "5GB"},
        {"max_file_size": 1.5},
        {"dtype": ["bf16"]},
        {"config": {}},
        {"mesh": 4},
        {"to": None},
        {"tie": [["a", "b", "c"]]},
        {"keep_quantized": None},
        {"dtype_for": {"*": "keep"}},
    ],
)
def test_a_value_of_another_type_is_refused(form):
    # `"false"` would be true, and a text a list of its letters.
    with pytest.raises(UsageError, match=f"{next(iter(form))} cannot be"):
        target_of(form)
