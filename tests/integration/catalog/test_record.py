"""Recording: the rows of conversions and checkpoints, after any earlier rows."""

import json
import os
import time
from datetime import UTC, datetime

import pytest
from sqlalchemy import func, select

from ckptcore.catalog import CheckpointFacts, ConversionFacts, open_catalog
from ckptcore.catalog.models import Checkpoint, CheckpointFile, FindingRecord, Tensor, TrainingRun
from ckptcore.catalog.types import as_dict
from ckptcore.errors import CatalogError, Finding, UsageError, finding


def begin(catalog, destination="/out/model", **more):
    given = {"source_uri": "/runs/step-1", "verb": "export", "tool_version": "0.1.0"}
    return catalog.begin({}, destination_uri=destination, **(given | more))


def count(catalog, table):
    with catalog.reading() as conn:
        return conn.execute(select(func.count()).select_from(table)).scalar_one()


def test_a_running_conversion_is_visible(catalog):
    request = {"verb": "export", "rename": [["a", "b"]], "dtype": None}
    before = datetime.now(UTC)
    conversion = catalog.begin(
        request,
        source_uri="/runs/step-1/",
        destination_uri="s3://bucket/out/",
        verb="export",
        tool_version="0.1.0",
        flow_run_id="f-1",
    )
    [row] = catalog.conversions(state="running")
    assert (row.id, row.source_uri, row.destination_uri) == (conversion, "/runs/step-1", "s3://bucket/out")
    assert row.request == request
    assert (row.verb, row.tool_version, row.flow_run_id) == ("export", "0.1.0", "f-1")
    assert before <= row.started_at <= datetime.now(UTC)
    assert row.ended_at is None
    assert catalog.show(conversion).sources == ()


def test_success_links_source_and_derived(catalog, facts, convert):
    source = facts("/runs/a/step-7", step=7, run="a", origin={"ranks": 8}, verified="coverage")
    derived = facts("/out/model", content="c1", verified="bytes")
    warning = finding("stray-file", "files", "left over", file="x.distcp")
    conversion, public = convert(source, derived, findings=(warning,))

    detail = catalog.show(conversion)
    assert detail.conversion.state == "succeeded"
    assert detail.conversion.timings == {"plan": 0.25, "write": 2.0}
    assert detail.conversion.bytes_in == source.nbytes
    assert detail.conversion.peak_memory == 1 << 20
    assert detail.conversion.plan_digest == "p" * 64
    assert detail.findings == (warning,)

    made = catalog.show(public)
    [from_row], [made_row] = detail.sources, detail.derived
    assert made.checkpoint == made_row
    assert (from_row.kind, from_row.uri, from_row.step, from_row.run) == ("source", "/runs/a/step-7", 7, "a")
    assert (from_row.origin, from_row.verified_level) == ({"ranks": 8}, "coverage")
    assert (made_row.kind, made_row.format, made_row.state) == ("derived", "safetensors", "present")
    assert made_row.verified_level == "bytes"
    assert made_row.verified_at is not None
    assert [f.path for f in made.files] == ["model.safetensors"]
    assert [(t.fqn, t.dtype, t.shape, t.nbytes) for t in made.tensors] == [
        ("layers.0.weight", "bfloat16", (4, 8), 64),
        ("layers.1.weight", "bfloat16", (4, 8), 64),
        ("layers.2.weight", "bfloat16", (4, 8), 64),
        ("scale", "float32", (), 4),
    ]
    assert made_row.dtypes == ("bfloat16", "float32")
    assert (made_row.num_tensors, made_row.num_files, made_row.nbytes) == (4, 1, 196)
    assert [c.id for c in made.written_by] == [conversion]
    assert catalog.show(from_row.id).used_by == made.written_by


def test_derived_belongs_to_the_run_and_step_of_its_source(catalog, facts, convert):
    convert(facts("/runs/a/step-7", step=7, run="a"), facts("/out/model", content="c"))
    convert(facts("/out/model", content="c"), facts("/out/model.pt", content="d"))
    assert [(r.uri, r.run, r.step) for r in catalog.list(run="a")] == [
        ("/out/model.pt", "a", 7),
        ("/out/model", "a", 7),
        ("/runs/a/step-7", "a", 7),
    ]
    assert count(catalog, TrainingRun) == 1


def test_a_conversion_records_the_stamps_of_its_source(catalog, facts):
    done = ConversionFacts("p", 1, 1, None, {}, source_stamp="5" * 64, source_ctime="c" * 64)
    conversion = begin(catalog)
    catalog.succeed(conversion, done, source=facts("/a"), derived=facts("/b", content="c1"))
    catalog.record_validation(facts("/a"))  # registering a source once more revokes nothing
    row = catalog.show(conversion).conversion
    assert (row.source_stamp, row.source_ctime) == ("5" * 64, "c" * 64)


def test_a_second_success_changes_nothing(catalog, facts):
    conversion = begin(catalog)
    given = {
        "source": facts("/runs/step-1"),
        "derived": facts("/out/model", content="c1"),
        "facts": ConversionFacts(
            "p", 1, 1, None, {}, findings=(finding("stray-file", "files", "left over"),)
        ),
    }
    first = catalog.succeed(conversion, **given)
    before = catalog.show(conversion)
    assert catalog.succeed(conversion, **given) == first
    assert catalog.show(conversion) == before
    assert count(catalog, FindingRecord) == 1


def test_failure_records_its_error_and_findings_of_the_source(catalog, facts):
    conversion = begin(catalog)
    torn = finding("truncated-file", "files", "500 of 900 bytes", file="__0_0.distcp")
    catalog.fail(
        conversion, code="damaged", message="1 finding", findings=[torn], source=facts("/runs/step-1")
    )
    detail = catalog.show(conversion)
    assert detail.conversion.state == "failed"
    assert (detail.conversion.error_code, detail.conversion.error_message) == ("damaged", "1 finding")
    assert detail.conversion.ended_at is not None
    assert detail.findings == (torn,)
    assert [row.state for row in detail.sources] == ["damaged"]
    assert detail.derived == ()


def test_failure_before_the_source_was_read(catalog):
    conversion = begin(catalog)
    catalog.fail(conversion, code="source-unreadable", message="no such path")
    assert catalog.show(conversion).conversion.error_code == "source-unreadable"
    assert catalog.list() == ()


def test_a_failed_conversion_may_still_succeed_but_not_the_other_way(catalog, facts):
    conversion = begin(catalog)
    catalog.fail(conversion, code="storage-trouble", message="connection reset")
    catalog.succeed(
        conversion,
        ConversionFacts("p", 1, 1, None, {}),
        source=facts("/runs/step-1"),
        derived=facts("/out/model", content="c1"),
    )
    [row] = catalog.conversions()
    assert (row.state, row.error_code, row.error_message) == ("succeeded", None, None)
    with pytest.raises(CatalogError, match=f"cannot fail conversion {conversion}"):
        catalog.fail(conversion, code="x", message="y")
    assert catalog.conversions() == (row,)


def test_unknown_conversion(catalog, facts):
    with pytest.raises(UsageError, match="no conversion nope"):
        catalog.fail("nope", code="x", message="y")


def test_success_ends_killed_conversions_of_the_destination(catalog, facts, monkeypatch):
    monkeypatch.setattr("ckptcore.utils.processes.is_running", lambda process: False)
    killed, elsewhere = begin(catalog), begin(catalog, "/out/other")
    conversion, waiting = begin(catalog), begin(catalog)
    catalog.succeed(
        conversion,
        ConversionFacts("p", 1, 1, None, {}),
        source=facts("/runs/step-1"),
        derived=facts("/out/model", content="c1"),
    )
    states = {row.id: (row.state, row.error_code) for row in catalog.conversions()}
    assert states == {
        killed: ("failed", "interrupted"),
        elsewhere: ("running", None),
        conversion: ("succeeded", None),
        waiting: ("running", None),
    }


def test_the_same_checkpoint_is_one_row(catalog, facts):
    first = catalog.record_validation(facts("/runs/step-1"))
    assert catalog.record_validation(facts("/runs/step-1/")) == first
    assert catalog.record_validation(facts("file:///runs/step-1")) == first
    assert catalog.record_validation(facts("/runs/../runs/step-1")) == first
    assert count(catalog, Checkpoint) == 1
    assert (count(catalog, Tensor), count(catalog, CheckpointFile)) == (4, 1)


def test_links_are_followed(catalog, facts, tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "latest").symlink_to("step-1")
    first = catalog.record_validation(facts(tmp_path / "latest"))
    assert catalog.record_validation(facts(tmp_path / "step-1")) == first


def test_other_content_replaces_the_checkpoint_at_the_uri(catalog, facts, convert):
    source = facts("/runs/step-1")
    _, first = convert(source, facts("/out/model", manifest="m1", content="c1"))
    _, second = convert(source, facts("/out/model", manifest="m2", content="c2"))
    rows = {row.id: row for row in catalog.list(kind="derived")}
    assert (rows[first].state, rows[second].state) == ("replaced", "present")
    assert rows[first].replaced_at is not None
    assert catalog.show("/out/model").checkpoint.id == second
    # The row of the first content becomes the current one once more.
    _, third = convert(source, facts("/out/model", manifest="m1", content="c1"))
    assert third == first
    rows = {row.id: row for row in catalog.list(kind="derived")}
    assert (rows[first].state, rows[second].state) == ("present", "replaced")
    assert rows[first].replaced_at is None


def test_equal_manifests_with_other_bytes_are_other_content(catalog, facts, convert):
    # Two steps of one run have equal manifests: only the digests of their files differ.
    one, first = convert(facts("/runs/step-1"), facts("/out/model", content="c1"))
    two, second = convert(facts("/runs/step-2"), facts("/out/model", content="c2"))
    assert first != second
    assert [c.id for c in catalog.show(first).written_by] == [one]
    assert [c.id for c in catalog.show(second).written_by] == [two]
    assert [step.source.uri for step in catalog.lineage("/out/model").ancestors] == ["/runs/step-2"]


def test_unknown_digests_match_the_known_checkpoint(catalog, facts, convert):
    _, public = convert(facts("/runs/step-1"), facts("/out/model", content="c1"))
    seen = facts("/out/model", files=[("model.safetensors", 260, None)], format="safetensors")
    assert catalog.record_validation(seen, level="bytes") == public
    detail = catalog.show(public)
    assert detail.checkpoint.kind == "derived"
    assert detail.files[0].digest is not None


def test_digests_learned_later_fill_the_row(catalog, facts):
    seen = facts("/out/model", files=[("model.safetensors", 260, None)])
    public = catalog.record_validation(seen)
    assert catalog.show(public).checkpoint.content_digest is None
    assert catalog.record_validation(facts("/out/model", content="c1")) == public
    detail = catalog.show(public)
    assert detail.checkpoint.content_digest is not None
    assert detail.files[0].digest == b"c1".hex().ljust(64, "0")


def test_files_that_were_only_seen_replace_no_digest(catalog, facts):
    def recorded(*extra):
        catalog.record_validation(facts("/runs/step-1", extra=extra))
        return {f.path: (f.nbytes, f.digest and f.digest[:2]) for f in catalog.at("/runs/step-1")[1]}

    data = {"__0_0.distcp": (260, None)}
    assert recorded((".metadata", 7, None)) == data | {".metadata": (7, None)}
    assert recorded((".metadata", 9, None)) == data | {".metadata": (9, None)}
    proven = recorded((".metadata", 9, "ab" * 32), ("config.json", 3, "cd" * 32))
    assert proven == data | {".metadata": (9, "ab"), "config.json": (3, "cd")}
    seen = ((".metadata", 9, None), ("index.json", 5, None), ("__0_0.distcp", 260, None))
    assert recorded(*seen) == proven | {"index.json": (5, None)}
    assert recorded() == proven | {"index.json": (5, None)}
    assert recorded(("config.json", 4, "ef" * 32)) == data | {"config.json": (4, "ef")}


def test_run_and_step_learned_later_fill_the_row(catalog, facts):
    public = catalog.record_validation(facts("/runs/step-1"))
    catalog.record_validation(facts("/runs/step-1", run="a", step=3))
    catalog.record_validation(facts("/runs/step-1"))
    row = catalog.show(public).checkpoint
    assert (row.run, row.step) == ("a", 3)


def test_tags(catalog, facts):
    public = catalog.record_validation(facts("/runs/step-1"))
    catalog.tag(public, "eval.mmlu", "70")
    catalog.tag("/runs/step-1", "eval.mmlu", "71.3")
    catalog.tag(public[:8], "owner", "ana")
    assert catalog.show(public).tags == {"eval.mmlu": "71.3", "owner": "ana"}
    catalog.tag(public, "owner", None)
    assert catalog.show(public).tags == {"eval.mmlu": "71.3"}
    with pytest.raises(UsageError, match="cannot set tag ' '"):
        catalog.tag(public, " ", "x")
    with pytest.raises(UsageError, match="is a conversion"):
        catalog.tag(begin(catalog), "a", "b")


def test_credentials_are_not_kept(catalog, facts, url):
    secret = "hunter2"
    conversion = catalog.begin(
        {"source": f"s3://me:{secret}@bucket/x", "extra": [{"at": f"https://u:{secret}@h/"}]},
        source_uri=f"s3://me:{secret}@bucket/x",
        destination_uri=f"https://host/x?X-Amz-Signature={secret}&v=1",
        verb="export",
        tool_version="0.1.0",
    )
    found = Finding("malformed-metadata", "files", f"at s3://me:{secret}@bucket/x", hint="none")
    catalog.fail(
        conversion,
        code="x",
        message=f"GET https://me:{secret}@host/x?sig={secret} failed",
        findings=[found],
        source=facts(f"s3://me:{secret}@bucket/x"),
    )
    detail = catalog.show(conversion)
    assert secret not in str(detail)
    assert detail.sources[0].uri == "s3://bucket/x"
    assert detail.conversion.destination_uri == "https://host/x?X-Amz-Signature=...&v=1"
    if "://" not in url:
        with open(url, "rb") as file:
            assert secret.encode() not in file.read()


def test_any_name_can_be_kept(catalog, facts):
    names = ["наука.weight", "nul\x00byte", os.fsdecode(b"bad-\xff.bin"), "a'b;--", "😀", ""]
    public = catalog.record_validation(
        facts(
            "/runs/" + os.fsdecode(b"step-\xfe"),
            tensors=[(name, "float32", (1,), 4) for name in names],
            files=[(name, 4, None) for name in names],
            run="run\x00\udcff",
            origin={"odd\udc80": "\x00", "set": {3, 1}, "when": datetime(2026, 1, 1, tzinfo=UTC)},
        ),
        [Finding("hole", "coverage", "in \udcff\x00", fqn="nul\x00byte")],
    )
    detail = catalog.show(public)
    assert {t.fqn for t in detail.tensors} == {
        "наука.weight",
        "nul\\x00byte",
        "bad-\\udcff.bin",
        "a'b;--",
        "😀",
        "",
    }
    assert detail.checkpoint.uri == "/runs/step-\\udcfe"
    assert detail.checkpoint.run == "run\\x00\\udcff"
    assert detail.checkpoint.origin["set"] == [1, 3]
    assert detail.findings[0].message == "in \\udcff\\x00"
    json.dumps(detail.checkpoint.origin)


def test_large_numbers_fit(catalog, facts):
    huge = 405_000_000_000_000_000
    public = catalog.record_validation(
        facts(
            "/runs/big",
            nbytes=huge,
            tensors=[("w", "bfloat16", (1 << 40,), huge)],
            files=[("f", huge, None)],
            step=1 << 40,
        )
    )
    detail = catalog.show(public)
    assert detail.checkpoint.nbytes == detail.tensors[0].nbytes == detail.files[0].nbytes == huge
    assert detail.tensors[0].shape == (1 << 40,)


def test_a_failed_recording_leaves_no_rows(catalog, facts):
    twice = facts("/runs/step-1", tensors=[("w", "float32", (1,), 4)] * 2)
    with pytest.raises(CatalogError, match=r"(?i)unique"):
        catalog.record_validation(twice)
    assert count(catalog, Checkpoint) == count(catalog, Tensor) == 0


def test_an_empty_checkpoint(catalog):
    public = catalog.record_validation(CheckpointFacts("/runs/none", "dcp", "m", 0, (), ()))
    detail = catalog.show(public)
    assert (detail.files, detail.tensors, detail.checkpoint.dtypes) == ((), (), ())


def test_names_are_in_natural_order(catalog, facts):
    public = catalog.record_validation(facts("/runs/step-1", num_tensors=12))
    names = [t.fqn for t in catalog.show(public).tensors]
    assert names == [*(f"layers.{i}.weight" for i in range(12)), "scale"]


@pytest.mark.soak
def test_a_hundred_thousand_tensors_take_seconds(tmp_path, facts):
    tensors = [(f"model.layers.{i}.mlp.experts.weight", "bfloat16", (64, 64), 8192) for i in range(100_000)]
    files = [(f"__{i}_0.distcp", 8192, f"{i:064x}") for i in range(1024)]
    with open_catalog(str(tmp_path / "big.sqlite")) as catalog:
        start = time.process_time()
        public = catalog.record_validation(facts("/runs/big", tensors=tensors, files=files))
        took = time.process_time() - start
        assert took < 20  # a second and a half where nothing else runs
        start = time.process_time()
        catalog.record_validation(facts("/runs/big", tensors=tensors, files=files))
        assert time.process_time() - start < took / 2  # known already: not written again
        assert len(catalog.show(public).tensors) == 100_000


@pytest.mark.parametrize(
    ("verb", "extra", "loadable"),
    [
        ("export", ["README.md"], "no"),
        ("export", ["README.md", "tokenizer.json"], "no"),
        ("export", ["README.md", "config.json"], "unproven"),
        ("export", ["README.md", "adapter_config.json"], "unproven"),
        ("export", [], "unproven"),  # one file
        ("consolidate", ["README.md"], None),
    ],
)
def test_an_export_without_a_config_is_not_loadable(catalog, facts, convert, verb, extra, loadable):
    derived = facts("/out/model", content="c1", extra=[(name, 3, None) for name in extra])
    _, public = convert(facts("/runs/a/step-7"), derived, verb=verb)
    assert catalog.show(public).loadable == loadable
    assert as_dict(catalog.show(public))["loadable"] == loadable


def test_findings_of_the_output_are_recorded_against_it(catalog, facts, convert):
    found = [finding("not-loadable", "files", "no config"), finding("stray-file", "files", "x", file="x")]
    source, derived = (
        facts("/runs/a/step-7", verified="coverage"),
        facts("/out/model", content="c1", verified="coverage"),
    )
    conversion, public = convert(source, derived, findings=tuple(found))
    assert {f.code for f in catalog.show(conversion).findings} == {"not-loadable", "stray-file"}
    assert [f.code for f in catalog.show(public).findings] == ["not-loadable"]
    assert [f.code for f in catalog.show("/runs/a/step-7").findings] == ["stray-file"]
    assert catalog.show(public).checkpoint.state == "present"


def test_the_uri_of_a_row_is_the_place_that_was_read(catalog, tmp_path, monkeypatch):
    """RFC 8089 allows localhost in a file's URL, and a folder may be called ~."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of-nobody")
    (tmp_path / "~" / "out").mkdir(parents=True)
    for given, place in (
        (f"file://localhost{tmp_path}/a", f"{tmp_path}/a"),
        ("~/out", f"{tmp_path}/~/out"),
        ("~/elsewhere", "/home/of-nobody/elsewhere"),
    ):
        begin(catalog, given)
        assert catalog.conversions()[0].destination_uri == place
