"""Paths: the places of names in a saved tree survive, in the order of saving, in few bytes."""

from __future__ import annotations

import json

from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.tree_paths import Path, Paths, renamed

SAVED: dict[str, Path] = {
    "epoch": ("epoch",),
    "model.layers.0.w": ("model", "layers.0.w"),
    "optim.param_groups.0.lr": ("optim", "param_groups", 0, "lr"),
    "model.layers.10.w": ("model", "layers.10.w"),
    "list.3": ("list", 3),
    "a.0.b": ("a", "0", "b"),
    "": ("",),
}
OBJECTS = ("list.3", "optim.param_groups.0.lr", "epoch", "unknown")


def manifest_of(paths: Paths) -> Manifest:
    builder = Builder()
    for name in [*(n for n in SAVED if n not in OBJECTS), "inside.an.object"]:
        builder.tensor(TensorSpec(name, "float32", ()))
    builder.blobs += [Blob(k, -1) for k in OBJECTS]
    form = paths.form([t.fqn for t in builder.tensors], OBJECTS)
    return builder.build("test", "nowhere", {"paths": form} if form else {})


def test_paths_travel_with_a_manifest() -> None:
    paths = Paths()
    for name, path in SAVED.items():
        assert paths.add(name, path)
    found = Paths.of(Manifest.load(manifest_of(paths).dump()))
    assert dict(found) == SAVED
    assert list(found) == list(SAVED), "the order of saving"
    assert all(type(a) is type(b) for n in SAVED for a, b in zip(found[n], SAVED[n], strict=True))


def test_the_container_of_a_name_is_what_is_before_its_last_element() -> None:
    paths = Paths()
    for name, path in (SAVED | {"ends.": ("ends", "")}).items():
        assert paths.add(name, path)
        own = len(str(path[-1]))
        assert paths.container(name) == (name[: len(name) - own] if len(path) > 1 else "")
    assert paths.container("ends.") == "ends."
    assert paths.container("list.3") == "list."
    assert paths.container("model.of.nobody") == ""


def test_what_is_no_path_of_a_name_is_not_taken() -> None:
    paths = Paths()
    for name, path in {
        "a.b": ("a", "c"),
        "a": "a",
        "x.-1": ("x", -1),
        "y": (),
        "z": None,
        "True": (True,),
    }.items():
        assert not paths.add(name, path)
    assert not paths.add("a" * 3, ("a",) * 100)
    assert paths.form(["a.b"], []) is None
    assert not Paths.of(manifest_of(paths))


def test_names_that_are_cut_alike_share_a_row() -> None:
    paths = Paths()
    for n in range(100_000, 130_000):
        paths.add(f"model.layers.{n}.weight", ("model", f"layers.{n}.weight"))
    form = paths.form(list(paths), [])
    assert form is not None
    assert len(form["cuts"]) == 1
    assert len(json.dumps(form)) < 4 * len(paths)


def test_a_rename_inside_one_key_keeps_the_nesting() -> None:
    path: Path = ("optim", "state", "net.w", "exp_avg")
    assert renamed(path, "optim.state.body.w.exp_avg") == ("optim", "state", "body.w", "exp_avg")
    assert renamed(path, "optim.stat.net.w.exp_avg") == ("optim", "stat", "net.w", "exp_avg")
    assert renamed(path, "elsewhere") is None
    assert renamed(("list", 0), "list.1") is None
