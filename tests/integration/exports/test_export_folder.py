"""Files beside an export's weights: found in the source, named, or missing; and its model card."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from paths import FIXTURES

import ckptcore
from ckptcore.catalog import open_catalog
from ckptcore.checking.export_proof import VALUES, Check
from ckptcore.conversion import pipeline
from ckptcore.errors import AmbiguousModel, NameMismatch, UsageError
from ckptcore.operations.export_target import options_digest
from ckptcore.planning import model_card, transformers_process
from ckptcore.planning.model_card import CardSource, is_untouched, provenance
from ckptcore.planning.request import Request
from ckptcore.store import open_store

TENSORS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b.weight": torch.arange(4.0)}
UNKNOWN = {"model_type": "of_nobody", "architectures": ["OfNobody"], "torch_dtype": "float32"}
TOKENIZER = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "chat_template.jinja": "{{ x }}",
    "additional_chat_templates/rag.jinja": "{{ rag }}",
    "tekken.json": "[]",
    "qwen.tiktoken": "IQ== 0",
    "video_preprocessor_config.json": "{}",
}
MODEL = {"generation_config.json": "{}", "modeling_x.py": "raise SystemExit(1)"}
LEGAL = {"NOTICE": "notice", "LICENSE": "licence"}
IGNORED = {
    "notes.txt": "x",
    "model.safetensors": "weights",
    "README.md": "# base",
    "logs/tokenizer.json": "{}",
}


def put(folder: Path, files: dict[str, str], config: dict[str, Any] | None = None) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if config is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """``run/step-3``: a DCP folder."""
    dcp.save({"model": TENSORS}, checkpoint_id=tmp_path / "run/step-3", no_dist=True)
    return tmp_path / "run/step-3"


def export(source: Path, target: Path, **options: Any) -> Any:
    return ckptcore.convert(str(source), str(target), verb="export", catalog=False, **options)


BARE = {"config": "none", "tokenizer": "none"}


def values_of(proof: ckptcore.ExportProof) -> Check:
    """Return the check of an export's tensors against its source."""
    return next(check for check in proof.checks if check.name == VALUES)


def codes(result: Any) -> list[str]:
    return [w.code for w in result.warnings]


def beside(folder: Path) -> set[str]:
    found = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    return found - {"README.md", "model.safetensors"}


@pytest.mark.parametrize(
    "place",
    [
        "step-3",
        "step-3/huggingface",
        "step-3/of_any_name",
        "step-3/.hf_metadata",
        "huggingface",
        "model_assets",
        ".",
    ],
)
def test_files_are_found_where_trainers_leave_them(source: Path, tmp_path: Path, place: str) -> None:
    put(
        source.parent / place,
        TOKENIZER | MODEL | LEGAL,
        {**UNKNOWN, "auto_map": {"AutoModel": "modeling_x.X"}},
    )
    result = export(source, tmp_path / "out")
    assert beside(tmp_path / "out") == {*TOKENIZER, *MODEL, *LEGAL, "config.json"}
    assert "found-files" in codes(result)
    assert "not-loadable" not in codes(result)
    (message,) = [w.message for w in result.warnings if w.code == "found-files"]
    assert str((source.parent / place).resolve()) in message


def test_what_a_named_folder_holds_is_copied_untouched(source: Path, tmp_path: Path) -> None:
    hub = put(tmp_path / "hub", TOKENIZER | MODEL | LEGAL | IGNORED, UNKNOWN)
    export(source, tmp_path / "out", config=str(hub))
    assert beside(tmp_path / "out") == {*TOKENIZER, *MODEL, *LEGAL, "config.json"}
    for name in {*TOKENIZER, *MODEL, *LEGAL, "config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (hub / name).read_bytes()
    card = (tmp_path / "out/README.md").read_text()
    assert "- code: `modeling_x.py`" in card


def _grow(file: Path) -> None:
    """To more bytes than are carried; they cost no disk."""
    with file.open("ab") as out:
        out.truncate((64 << 20) + 1)


@pytest.mark.parametrize("name", ["LICENSE", "modeling_x.py", "other.model"])
def test_a_large_file_beside_a_named_config_is_left_out_by_name(
    source: Path, tmp_path: Path, name: str
) -> None:
    hub = put(tmp_path / "hub", TOKENIZER | MODEL | LEGAL | {name: "x"}, UNKNOWN)
    _grow(hub / name)
    result = export(source, tmp_path / "out", config=str(hub))
    assert beside(tmp_path / "out") == {*TOKENIZER, *MODEL, *LEGAL, "config.json"} - {name}
    (warning,) = [w for w in result.warnings if w.code == "left-beside"]
    assert (warning.severity, name in warning.message, "64.0 MiB" in warning.message) == (
        "warning",
        True,
        True,
    )


@pytest.mark.parametrize("option", ["config", "tokenizer", ""])
@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
def test_a_tokenizer_is_not_exported_without_a_large_file(
    source: Path, tmp_path: Path, option: str, name: str
) -> None:
    """What is left could open, and be another tokenizer."""
    hub = put(tmp_path / "hub" if option else source, {**TOKENIZER, name: "{}"}, UNKNOWN)
    _grow(hub / name)
    with pytest.raises(UsageError, match=name) as error:
        export(source, tmp_path / "out", **({option: str(hub)} if option else {}))
    assert "tokenizer=" in error.value.hint
    assert not (tmp_path / "out").exists()
    export(source, tmp_path / "out", **({"config": str(hub)} if option == "config" else {}), tokenizer="none")
    assert name not in beside(tmp_path / "out")


def test_a_large_config_is_named(source: Path, tmp_path: Path) -> None:
    hub = put(tmp_path / "hub", TOKENIZER, UNKNOWN)
    _grow(hub / "config.json")
    with pytest.raises(UsageError, match=r"config\.json has 64\.0 MiB"):
        export(source, tmp_path / "out", config=str(hub))


def test_files_beside_a_components_own_files_are_its_own(tmp_path: Path) -> None:
    """As verl lays it out: the files of the actor and of the critic, each with a config of its own."""
    step = tmp_path / "run/global_step_10"
    (step / "actor").mkdir(parents=True)
    torch.save(TENSORS, step / "actor/model_world_size_1_rank_0.pt")
    (step / "actor/fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    put(step / "actor/huggingface", TOKENIZER, UNKNOWN)
    put(step / "critic/huggingface", TOKENIZER, {**UNKNOWN, "of_the": "critic"})
    export(step, tmp_path / "out")
    assert beside(tmp_path / "out") == {*TOKENIZER, "config.json"}
    assert json.loads((tmp_path / "out/config.json").read_text()) == UNKNOWN


def test_code_is_found_only_where_a_config_asks_for_it(source: Path, tmp_path: Path) -> None:
    put(source, {"zero_to_fp32.py": "", **TOKENIZER}, UNKNOWN)
    export(source, tmp_path / "out")
    assert beside(tmp_path / "out") == {*TOKENIZER, "config.json"}


def test_a_config_is_a_file_of_any_name(source: Path, tmp_path: Path) -> None:
    put(tmp_path, {"qwen.cfg": json.dumps(UNKNOWN), "tokenizer.json": "[]"})
    put(source / "tokenizer", TOKENIZER)
    export(source, tmp_path / "out", config=str(tmp_path / "qwen.cfg"))
    assert json.loads((tmp_path / "out/config.json").read_text()) == UNKNOWN
    assert beside(tmp_path / "out") == {*TOKENIZER, "config.json"}
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_a_tokenizer_is_taken_with_all_its_files(source: Path, tmp_path: Path) -> None:
    hub = put(tmp_path / "hub", {**TOKENIZER, "merges.txt": "of the config's"}, UNKNOWN)
    other = put(tmp_path / "other", {"tokenizer.model": "m", "config.json": "{}"})
    export(source, tmp_path / "out", config=str(hub), tokenizer=str(other))
    assert beside(tmp_path / "out") == {"config.json", "tokenizer.model"}
    assert json.loads((tmp_path / "out/config.json").read_text()) == UNKNOWN
    export(source, tmp_path / "two", config=str(hub), tokenizer="none")
    assert beside(tmp_path / "two") == {"config.json"}


@pytest.mark.parametrize(("option", "files"), [("config", {}), ("tokenizer", TOKENIZER)])
def test_of_two_that_differ_none_is_guessed(
    source: Path, tmp_path: Path, option: str, files: dict[str, str]
) -> None:
    for number, name in enumerate(("one", "two")):
        config = {**UNKNOWN, "rope_theta": number} if option == "config" else None
        put(source / name, {**files, "tokenizer.json": str(number)} if files else {}, config)
    with pytest.raises(AmbiguousModel) as caught:
        export(source, tmp_path / "out")
    assert all(str(source / name) in caught.value.message for name in ("one", "two"))
    assert f"{option}='{source / 'one'}'" in caught.value.hint
    assert not (tmp_path / "out").exists()
    export(source, tmp_path / "out", **{option: str(source / "two")})
    export(source, tmp_path / "none", **{option: "none"})
    assert beside(tmp_path / "none") == set()


def test_two_that_are_equal_are_one(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        put(source / name, TOKENIZER, UNKNOWN)
    export(source, tmp_path / "out")
    assert beside(tmp_path / "out") == {*TOKENIZER, "config.json"}


def test_the_nearest_counts(source: Path, tmp_path: Path) -> None:
    put(source.parent / "huggingface", {}, {**UNKNOWN, "far": True})
    put(source / "huggingface", {}, UNKNOWN)
    export(source, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == UNKNOWN


def test_other_peoples_folders_beside_are_no_candidates(source: Path, tmp_path: Path) -> None:
    put(source.parent / "llama-3", TOKENIZER, UNKNOWN)
    put(source, {"config.json": '{"model": {"_CLASS_": "olmo_core.nn.transformer.TransformerConfig"}}'})
    result = export(source, tmp_path / "out")
    assert beside(tmp_path / "out") == set()
    assert "not-loadable" in codes(result)


def test_a_link_out_of_the_source_is_not_followed(source: Path, tmp_path: Path) -> None:
    """A checkpoint of a stranger could publish any file of this machine."""
    secret = put(tmp_path / "secret", {"id_rsa": "key"}) / "id_rsa"
    put(source, {"tokenizer_config.json": "{}"}, UNKNOWN)
    (source / "tokenizer.json").symlink_to(secret)
    export(source, tmp_path / "out")
    assert beside(tmp_path / "out") == {"config.json", "tokenizer_config.json"}


def test_a_named_folder_may_be_made_of_links(source: Path, tmp_path: Path) -> None:
    """As the hub's cache is."""
    blobs = put(tmp_path / "blobs", {"c": json.dumps(UNKNOWN), "t": "{}"})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/config.json").symlink_to(blobs / "c")
    (tmp_path / "snapshot/tokenizer.json").symlink_to(blobs / "t")
    export(source, tmp_path / "out", config=str(tmp_path / "snapshot"))
    assert beside(tmp_path / "out") == {"config.json", "tokenizer.json"}


@pytest.mark.usefixtures("asked_here")
def test_a_found_config_that_does_not_fit_stops_the_export(source: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(source)
    with pytest.raises(NameMismatch):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "not-loadable" in codes(export(source, tmp_path / "out", config="none"))


@pytest.mark.usefixtures("asked_here")
def test_a_second_export_has_the_answer_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("CKPTCORE_CACHE", str(tmp_path / "cache"))
    source = FIXTURES / "torch/verl_fsdp2_4r/ckpt"
    wrong = {"rename": [("model.norm.", "model.other.")]}
    export(source, tmp_path / "first")
    with pytest.raises(NameMismatch) as first:
        export(source, tmp_path / "wrong", **wrong)
    monkeypatch.setattr(transformers_process, "ask", lambda *_, **__: pytest.fail("asked again"))
    export(source, tmp_path / "second")
    assert beside(tmp_path / "second") == beside(tmp_path / "first")
    with pytest.raises(NameMismatch) as second:
        export(source, tmp_path / "wrong", **wrong)
    assert second.value.as_dict() == first.value.as_dict()


@pytest.mark.usefixtures("asked_here")
def test_a_part_is_exported_whatever_config_is_found(tmp_path: Path) -> None:
    source = FIXTURES / "torch/verl_fsdp2_4r/ckpt"
    with pytest.raises(NameMismatch) as caught:
        export(source, tmp_path / "out", rename=[("model.norm.", "model.other.")])
    assert "config='none'" in caught.value.hint
    result = export(source, tmp_path / "out", exclude=["*norm*"])
    assert beside(tmp_path / "out") == set()
    (warning,) = [w for w in result.warnings if w.code == "not-loadable"]
    assert "missing: " in warning.message
    assert "found-files" not in codes(result)
    with pytest.raises(NameMismatch):
        export(source, tmp_path / "named", exclude=["*norm*"], config=str(next(source.rglob("huggingface"))))


def test_an_export_without_a_config_says_so(source: Path, tmp_path: Path) -> None:
    result = export(source, tmp_path / "out")
    (warning,) = [w for w in result.warnings if w.code == "not-loadable"]
    assert warning.severity == "warning"
    assert "--config" in warning.hint
    assert result.as_dict()["loadable"] == "no"
    single = export(source, tmp_path / "out.safetensors")
    assert "not-loadable" not in codes(single)


def test_one_file_has_nothing_beside_it(source: Path, tmp_path: Path) -> None:
    hub = put(tmp_path / "hub", TOKENIZER, UNKNOWN)
    result = export(source, tmp_path / "one.safetensors", config=str(hub))
    (warning,) = [w for w in result.warnings if w.code == "left-beside"]
    assert f"--config {hub}" in warning.message
    assert "left-beside" not in codes(export(source, tmp_path / "two.safetensors"))


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ({"torch_dtype": "float32"}, {"dtype": "bf16"}, {"torch_dtype": "bfloat16"}),
        (
            {"dtype": "float32", "text_config": {"dtype": "float32", "x": 1}},
            {"dtype": "bf16"},
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "x": 1}},
        ),
        ({"vocabulary_map": {"dtype": 7}}, {"dtype": "bf16"}, {"vocabulary_map": {"dtype": 7}}),
        (
            {"dtype": "float32"},
            {"dtype": "bf16", "dtype_for": [("*b.weight", "keep")]},
            {"dtype": "bfloat16"},
        ),
        ({"dtype": "auto"}, {"dtype": "bf16"}, {"dtype": "auto"}),
        ({}, {"dtype": "bf16"}, {}),
    ],
)
def test_the_dtype_follows_the_cast(
    source: Path, tmp_path: Path, config: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]
) -> None:
    form = {"model_type": "of_nobody", "note": "ä\ud800"}
    hub = put(tmp_path / "hub", {}, form | config)
    export(source, tmp_path / "out", config=str(hub), **options)
    assert json.loads((tmp_path / "out/config.json").read_text()) == form | expected


def test_the_index_counts_parameters(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "out", max_file_size=20)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 16, "total_size": 64}
    ckptcore.convert(str(source), str(tmp_path / "all"), catalog=False, max_file_size=20)
    consolidated = json.loads((tmp_path / "all/model.safetensors.index.json").read_text())
    assert consolidated["metadata"] == {"total_size": 64}


def test_the_card_says_where_all_of_it_comes_from(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        **UNKNOWN,
        "_name_or_path": "org/base-7b",
        "transformers_version": "4.57.1",
        "auto_map": {"AutoModel": "modeling_x.X"},
    }
    hub = put(tmp_path / "hub", {**MODEL, **LEGAL, "README.md": "---\nlicense: apache-2.0\n---\n"}, config)
    monkeypatch.chdir(source.parent)
    export(Path("step-3"), tmp_path / "out", config=str(hub), dtype="bf16")
    card = (tmp_path / "out/README.md").read_text()
    assert "- source: `../run/step-3` (dcp)" in card
    for line in (
        'base_model: "org/base-7b"',
        'license: "apache-2.0"',
        "- cast to: bf16",
        "- dtype: bfloat16 (16)",
        "- architecture: `OfNobody` (of_nobody)",
        "- base model: `org/base-7b`",
        "- licence: `apache-2.0`, see LICENSE, see NOTICE",
        "- config: `../hub`, written by transformers 4.57.1",
        "- code: `modeling_x.py`, as it was found: read it before you trust it",
    ):
        assert f"{line}\n" in card, line
    assert "- note:" not in card
    recorded = provenance(card, str(tmp_path / "out"))
    assert recorded is not None
    assert recorded.place == str(source)
    assert str(tmp_path) not in card
    assert is_untouched(card.encode(), "out")
    assert not is_untouched(card.encode() + b"- mine: yes\n", "out")


def test_a_card_leads_to_a_source_that_was_moved_with_the_export(source: Path, tmp_path: Path) -> None:
    run = source.parent
    average = [str(source), str(shutil.copytree(source, run / "step-4"))]
    export(source, tmp_path / "models/llama", **BARE)
    ckptcore.merge(average, tmp_path / "models/mean", verb="export", catalog=False, **BARE)
    moved = tmp_path / "moved"
    moved.mkdir()
    for folder in ("models", "run"):
        shutil.move(tmp_path / folder, moved / folder)
    for name, origin in (("llama", str(moved / "run/step-3")), ("mean", "average://[")):
        proof = ckptcore.verify_export(moved / "models" / name, catalog=False)
        assert (values_of(proof).verdict, proof.found_by) == ("ok", "the model card")
        assert str(proof.source).startswith(origin)


def test_a_card_names_no_disk_and_no_user(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the way from the export would, it has the name of the source alone."""

    def account(home: Path) -> SimpleNamespace:
        return SimpleNamespace(pw_dir=str(home))

    hidden = tmp_path / "home/ada/secret/step-3"
    shutil.copytree(source, hidden)
    for name, home in (("a", tmp_path / "home/bob"), ("b", Path("/root"))):
        monkeypatch.setattr(model_card, "pwd", SimpleNamespace(getpwuid=lambda _, home=home: account(home)))
        out = tmp_path / "home/bob" / name
        export(hidden, out, **BARE)
        card = (out / "README.md").read_text()
        recorded = provenance(card, str(out))
        assert recorded is not None
        is_beside = name == "b"
        assert recorded.name == ("../../ada/secret/step-3" if is_beside else "step-3")
        assert recorded.place == (str(hidden) if is_beside else "")
        proof = ckptcore.verify_export(out, catalog=False)
        message = values_of(proof).summary
        assert is_beside or ("'step-3'" in message and "--against" in message)
        assert values_of(ckptcore.verify_export(out, against=hidden, catalog=False)).verdict == "ok"


def test_the_card_ends_with_the_fingerprint(source: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "catalog.sqlite")
    options = {"verb": "export", "catalog": url, "settings": ckptcore.Settings(fingerprint=True)}
    result = ckptcore.convert(str(source), str(tmp_path / "out"), **options)
    card = (tmp_path / "out/README.md").read_bytes()
    assert card.endswith(f"- fingerprint: `{result.fingerprint}`\n".encode())
    assert is_untouched(card, "out")
    ((size, digest),) = [row[1:] for row in result.published if row[0] == "README.md"]
    assert (size, digest) == (len(card), blake3(card).hexdigest())
    with open_catalog(url) as catalog:
        kept = {f.path: f.digest for f in catalog.show(str(tmp_path / "out")).files}
        assert catalog.show(str(tmp_path / "out")).loadable == "no"
    assert kept["README.md"] == digest
    second = ckptcore.convert(str(source), str(tmp_path / "out"), overwrite=True, **options)
    assert second.fingerprint == result.fingerprint
    plain = ckptcore.convert(str(source), str(tmp_path / "plain"), verb="export", catalog=False)
    assert plain.fingerprint is None
    assert "fingerprint" not in (tmp_path / "plain/README.md").read_text()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_card_with_its_fingerprint_is_published_in_the_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, remote: bool
) -> None:
    """Killed after the card was written, after it was published, and before it was registered."""
    out = "memory://cards/out" if remote else str(tmp_path / "out")
    take = ckptcore.Settings(fingerprint=True)
    prepared = pipeline.prepare(Request(str(source), out, "export"), take)
    pipeline.execute(prepared.plan_uri, settings=take)
    if times == 1:
        name = "remote_publication.publish_remote" if remote else "local_staging.publish_local"
        with monkeypatch.context() as patch:
            patch.setattr(f"ckptcore.conversion.staging.{name}", killed)
            with pytest.raises(KeyboardInterrupt):
                pipeline.finish(prepared.plan_uri, take)
    else:
        for _ in range(times - 1):
            pipeline.finish(prepared.plan_uri, take)
    prepared = pipeline.prepare(Request(str(source), out, "export"), take)
    pipeline.execute(prepared.plan_uri, settings=take)
    result = pipeline.finish(prepared.plan_uri, take)
    pipeline.remove_staging(prepared.plan_uri)
    with closing(open_store(out)) as store:
        card = store.read("README.md", 0, store.size("README.md") or 0)
        store.remove_all() if remote else None
    assert card.endswith(f"- fingerprint: `{result.fingerprint}`\n".encode())


def killed(*given: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "key", "version", "noted"),
    [
        ("olmo3", "rope_parameters", "5.23.0", True),
        ("qwen3_moe", "num_local_experts", "5.0.0.dev0", True),
        ("olmo3", "rope_parameters", "4.57.6", False),
        ("llama", "rope_parameters", "5.23.0", False),
    ],
)
def test_the_card_says_which_transformers_opens_it(
    source: Path, tmp_path: Path, kind: str, key: str, version: str, noted: bool
) -> None:
    hub = put(tmp_path / "hub", {}, {"model_type": kind, key: 1, "transformers_version": version})
    export(source, tmp_path / "out", config=str(hub))
    card = (tmp_path / "out/README.md").read_text()
    assert f"written by transformers {version}" in card
    assert ("- note: transformers 4.57 does not open this config" in card) is noted
    assert is_untouched(card.encode(), "out")


@pytest.fixture(autouse=True)
def _unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of transformers, which takes seconds to start and knows no such model."""

    def ask(module: str, asked: object, *, seconds: float | None) -> dict[str, Any]:
        return {"error": "nobody is asked here"}

    monkeypatch.setattr("ckptcore.planning.transformers_process.ask", ask)


OLD_CARD = """---
library_name: transformers
---

# out

16 parameters in 2 tensors, exported from a sharded training checkpoint.

## Provenance

- source: `/runs/step-3` (dcp)
- source manifest (BLAKE3): `{digest}`
- exported by: ckptcore 0.1.0
- cast to: bf16
- tied: `lm_head.weight` is `embed.weight`, equality checked
"""


def test_cards_of_earlier_versions_are_still_known() -> None:
    card = OLD_CARD.format(digest="ab" * 32)
    assert provenance(card, "out") == CardSource("/runs/step-3", "/runs/step-3", "ab" * 32, "0.1.0")
    assert is_untouched(card.encode(), "out")
    assert not is_untouched(card.encode() + b"\n## Evaluation\n", "out")


def test_no_credentials_stand_in_a_card(source: Path) -> None:
    from ckptcore.planning.compose import compose

    manifest = ckptcore.open(str(source))
    request = Request(
        "s3://me:secret@bucket/step-3?X-Amz-Signature=abcd",
        "/nowhere/out",
        "export",
        config="none",
        tokenizer="none",
    )
    card = compose(request, manifest).extra["README.md"].decode()
    assert "secret" not in card
    assert "abcd" not in card
    assert "s3://bucket/step-3" in card


def test_requests_of_earlier_versions_keep_their_digests() -> None:
    request = Request("/a/step-1", "/b/out", "export", config="/c", dtype="bf16")
    assert "tokenizer" not in request.as_dict()
    assert options_digest(request) == "b6c11dd4b49987035526f8202cf5c2c7b0ed9f5710a571ef48700bba732ff950"
    assert Request.from_dict(request.as_dict()) == request
    other = Request("/a/step-1", "/b/out", "export", config="/c", dtype="bf16", tokenizer="/t")
    assert options_digest(other) != options_digest(request)
    assert Request.from_dict(other.as_dict()) == other


@pytest.mark.parametrize("option", ["config", "tokenizer"])
@pytest.mark.parametrize("there", [True, False])
def test_a_name_on_the_hub_is_no_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, there: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if there:
        put(tmp_path / "Qwen", {"x": ""})
    with pytest.raises(UsageError) as caught:
        export(source, tmp_path / "out", **{option: "Qwen/Qwen3-0.6B"})
    assert ("hf download Qwen/Qwen3-0.6B" in caught.value.hint) is not there


def test_the_destination_is_apart_from_the_tokenizer(source: Path, tmp_path: Path) -> None:
    put(tmp_path / "tok/in", TOKENIZER)
    for target in (tmp_path / "tok/in", tmp_path / "tok"):
        with pytest.raises(UsageError, match="--tokenizer folder"):
            export(source, target, tokenizer=str(tmp_path / "tok/in"), overwrite_foreign=True)


@pytest.mark.usefixtures("asked_here")
def test_a_real_save_of_verl_opens_without_an_option(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    export(FIXTURES / "torch/verl_fsdp2_4r/ckpt", tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    manifest = ckptcore.open(str(FIXTURES / "torch/verl_fsdp2_4r/ckpt"))
    for name, tensor in model.state_dict().items():
        if name in {t.fqn for t in manifest.tensors}:
            assert torch.equal(tensor, ckptcore.read(manifest, name)), name


OTHERS = {
    "source.spm": "v",
    "vocab-src.json": "{}",
    "bpe.codes": "a b",
    "modules.json": "[]",
    "config_sentence_transformers.json": "{}",
    "1_Pooling/config.json": "{}",
    "2_Dense/model.safetensors": "weights of a module",
}
LEFT = {"params.json": "{}", "hf_quant_config.json": "{}", "notes.odt": "x", "trainer_state.json": "{}"}


def test_small_files_of_other_libraries_are_carried(source: Path, tmp_path: Path) -> None:
    """Settings of other forms of the weights are left out by name, and a trainer's state without a word."""
    hub = put(tmp_path / "hub", MODEL | OTHERS | LEFT, UNKNOWN)
    result = export(source, tmp_path / "out", config=str(hub))
    assert beside(tmp_path / "out") == {*MODEL, *OTHERS, "config.json"}
    (warning,) = [w for w in result.warnings if w.code == "left-beside"]
    assert all((name in warning.message) == (name != "trainer_state.json") for name in LEFT)


def test_a_large_file_of_another_library_is_left_out_by_name(source: Path, tmp_path: Path) -> None:
    hub = put(tmp_path / "hub", MODEL | OTHERS, UNKNOWN)
    _grow(hub / "source.spm")
    result = export(source, tmp_path / "out", config=str(hub))
    assert beside(tmp_path / "out") == {*MODEL, *OTHERS, "config.json"} - {"source.spm"}
    assert ["source.spm" in w.message for w in result.warnings if w.code == "left-beside"] == [True]


REST = {f"eval/round_{n}.csv": "1,2" for n in range(12)} | {
    "onnx/model.onnx": "weights in another form",
    "trainer_state.json": "{}",
    "README.md": "# base",
}


def test_every_file_of_the_source_is_used_carried_or_named(source: Path, tmp_path: Path) -> None:
    """Also in folders of its own; what is of no training comes first among the examples."""
    put(source, MODEL | OTHERS | REST | {"hf/config.json": json.dumps(UNKNOWN), "hf/LICENSE": "x"})
    put(source, {}, UNKNOWN)
    result = export(source, tmp_path / "out", config=str(source))
    (note,) = [w for w in result.warnings if w.code == "left-out"]
    assert note.severity == "info"
    # The other folder's config and licence are of no model that was written, and neither is this card.
    left = [*(f"eval/round_{n}.csv" for n in range(12)), "hf/LICENSE", "hf/config.json"]
    assert note.message == (
        f"left out, neither read nor carried: 17 files of {source} ({', '.join(left[:8])} and 9 more)"
    )


def test_few_files_that_are_left_out_are_all_named(source: Path, tmp_path: Path) -> None:
    """Code that no config uses is not carried."""
    put(source, MODEL | OTHERS | {"onnx/model.onnx": "x", "scheduler.pt": "x"}, UNKNOWN)
    (note,) = [w for w in export(source, tmp_path / "out").warnings if w.code == "left-out"]
    files = "modeling_x.py, onnx/model.onnx, scheduler.pt"
    assert note.message == f"left out, neither read nor carried: 3 files of {source} ({files})"


def test_a_source_that_is_carried_completely_leaves_nothing_out(source: Path, tmp_path: Path) -> None:
    put(source, LEGAL | OTHERS | TOKENIZER, UNKNOWN)
    assert "left-out" not in codes(export(source, tmp_path / "out"))


def test_a_pipeline_names_what_it_leaves_out(tmp_path: Path) -> None:
    """Its components' small files are carried: only what belongs to none is named."""
    source = shutil.copytree(FIXTURES / "diffusers/dit_pipeline/ckpt", tmp_path / "in")
    assert "left-out" not in codes(export(source, tmp_path / "out"))
    put(source, {"eval/a.csv": "1"})
    (note,) = [w for w in export(source, tmp_path / "out2").warnings if w.code == "left-out"]
    assert note.message == f"left out, neither read nor carried: 1 file of {source} (eval/a.csv)"
