"""Test that text from files cannot control the terminal, forge a line, or reveal a password."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.table import Table
from safetensors.torch import save_file

from ckptcore.catalog import open_catalog
from ckptcore.cli.catalog_render import tail
from ckptcore.cli.main import run
from ckptcore.errors import CkptError, SourceUnreadable, finding
from ckptcore.redaction import bare_url, beginning, ending, redacted
from ckptcore.utils import terminal
from ckptcore.utils.text import short_repr

# Colours of our own are the only escapes; nothing of a stranger's is one.
NASTY = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202egnp\u2066\u2028\u200b[/red][bold]\u0085\x7f"
CONTROLS = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
SECRETS = {
    "userinfo": "s3://AKIA:hunter2pass@bucket/a",
    "as a path": "s3:/AKIA:hunter2pass@bucket/a",
    "slash": "s3://AKIA:hunter2pass/x+y@bucket/a",
    "question": "postgresql://me:hunter2pass?x@host/db",
    "token alone": "https://hunter2pass@host/a",
    "amazon": "https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=hunter2pass&X-Amz-Expires=9",
    "credential": "https://b.s3.amazonaws.com/k?x-amz-credential=hunter2pass",
    "session": "https://b/k?X-Amz-Security-Token=hunter2pass",
    "google": "https://storage.googleapis.com/b/k?X-Goog-Signature=hunter2pass",
    "old amazon": "https://b/k?AWSAccessKeyId=A&Expires=1&Signature=hunter2pass",
    "azure": "https://acc.blob.core.windows.net/c/k?sv=1&se=2&sig=hunter2pass%3D",
    "oss": "https://b.oss.com/k?OSSAccessKeyId=a&Signature=hunter2pass",
    "cloudfront": "https://d.net/k?Policy=x&Signature=hunter2pass&Key-Pair-Id=k",
    "gitlab": "https://host/a?private_token=hunter2pass",
    "api key": "https://host/a?key=hunter2pass#part",
    "chain": "simplecache::s3://AKIA:hunter2pass@bucket/a",
    "zip chain": "zip://a.pt::https://host/x.zip?sig=hunter2pass",
    "nested": "https://proxy/?url=https%3A%2F%2Fu%3Ahunter2pass%40host%2Fa%3Fsig%3Dhunter2pass",
    "proxy": "cannot connect to proxy http://me:hunter2pass@proxy:3128/",
    "connection string": "DefaultEndpointsProtocol=https;AccountKey=hunter2pass==;EndpointSuffix=x",
    "dsn": "host=h user=u password=hunter2pass dbname=d",
    "quoted dsn": "host=h password='hunter2pass x' dbname=d",
    "options": "{'key': 'A', 'secret': 'hunter2pass', 'token': \"hunter2pass\"}",
    "xml": "<Error><Code>X</Code><AWSAccessKeyId>hunter2pass</AWSAccessKeyId></Error>",
    "header": "Authorization: AWS4-HMAC-SHA256 Credential=hunter2pass/x, Signature=hunter2pass",
    "bearer": "sent Bearer hunter2passhunter2pass",
    "not only a variable": "authorization: Bearer $TOKEN-hunter2pass",
    "variable and more": "authorization: ${SCHEME} hunter2pass",
    "an option": "train.py --token hunter2pass --lr 1e-4",
    "an option with =": "train.py --hf-token=hunter2pass",
    "a long option": "train --wandb_api_key hunter2pass",
    "a quoted option": "train --password 'hunter2pass hunter2pass' x",
    "a short option": "train -password hunter2pass",
    "an option in JSON": json.dumps({"note": "run --secret-key hunter2pass", "x": 1}),
    "options in a list": str(["train.py", "--token", "hunter2pass"]),
    "options in a list of JSON": json.dumps(["train.py", "--api-key", "hunter2pass"]),
    "a variable": "WANDB_API_KEY=hunter2pass python train.py",
    "a variable in lower case": "my_access_token=hunter2pass",
    "an assignment": "api_key=hunter2pass",
    "a key": "key=hunter2passHUNTER2PASS",
    "a hexadecimal key": "key=" + b"hunter2".hex() + "0123456789abcdef0123",
    "a line of a config": "api_key: hunter2passhunter2pass",
    "a password in prose": "the password: hunter2pass",
    "a header with a key": "X-Api-Key: hunter2passhunter2pass",
    "a header of GitLab": "PRIVATE-TOKEN: hunter2passhunter2pass",
    "basic": "Authorization: Basic hunter2passhunter2pass",
    "a proxy": "Proxy-Authorization: hunter2pass",
    "a cookie": "Cookie: session=hunter2pass; b=1",
    "curl": "curl -u ada:hunter2pass https://host/a",
    "OpenAI": "it used sk-hunter2pass-hunter2pass here",
    "a token of JSON": "eyJhunter2passhunter2.eyJhunter2passhunter2.hunter2",
    "a key of PEM": "-----BEGIN RSA PRIVATE KEY-----\nhunter2pass\n-----END RSA PRIVATE KEY-----",
    "yarl": "ClientResponseError: 403, url=URL('https://h/a?token=hunter2pass')",
}
HARMLESS = [
    "http://host:9000/bucket/run@5",
    "file:/runs/a@5",
    "C:/runs/a:b",
    "s3://bucket/token=1/sig=2/a",
    "blocks.0.token=5",
    "/runs/key=3/step-1",
    "model.embed_tokens.weight",
    "postgresql+psycopg://user:***@host/db",
    "sftp://me@host/a",
    "memory://a/b@c",
    "a@b.c",
    "s3://bucket/a?versionId=abc",
    "http://[::1]:80/a@b",
    "basic configuration",
    "train.py --max-tokens 512 --num_tokens=4096 --tokens 300B --tokenizer ./tok --token-budget 7",
    "train.py --eos-token </s> --pad_token=[PAD] --image-token '<image>' --use-token --lr 3e-4",
    "train.py --token $HF_TOKEN --api-key ${KEY} --password=$PASSWORD --secret <yours>",
    "--token true --access-token none --token 5",
    "TOKENIZERS_PARALLELISM=false MAX_TOKENS=4096 NUM_TOKENS=1T TOKENS_SEEN=3",
    "key=value sort_key=step primary_key=id key=model.layers.0.attention.weight key=layer_12_query_proj_w",
    "key=3f9a2c1 commit=3f9a2c1b3f9a2c1b3f9a2c1b3f9a2c1b3f9a2c1b",
    "the token: a unit of text; the secret: patience; password: forgotten",
    "a secret of training: warm up slowly. Authorization is needed, and a session key, too",
    "loss: 2.31 tokens: 4096 tokenizer: gpt2 key: value",
    "docker run --user 1000:1000 -u 0:0 image",
    "Cookie: is a word; basket=3",
    "sk-learn and sk-optimize-for-search, skip-connections",
    "https://wandb.ai/team/run/abc123 at step 300",
    'curl -H "Authorization: Bearer $CKPTCORE_HOOK_TOKEN" -H "authorization: ${HEADER}" https://host/hooks',
]


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_left_out(name: str) -> None:
    text = SECRETS[name]
    for seen in (redacted(text), redacted(f"cannot read '{text}': no ({text})"), redacted(redacted(text))):
        assert "hunter2" not in seen
    assert redacted(text) != text
    error = SourceUnreadable(f"cannot read {text}", hint=f"look at {text}", url=text, more=[{"a": (text,)}])
    for seen in (
        str(error),
        repr(error),
        json.dumps(error.as_dict()),
        repr(error.values),
        repr(error.__reduce__()),
    ):
        assert "hunter2" not in seen
    assert "hunter2" not in finding("hole", "coverage", text).message


@pytest.mark.alike(8)
@pytest.mark.parametrize("name", SECRETS)
def test_text_is_redacted_before_it_is_cut(name: str) -> None:
    """A URL without its beginning or its end is not a URL, and its password looks like any word."""
    text = SECRETS[name]
    long = f"{text} {'x' * 400}"
    for length in range(4, len(text) + 1):
        for seen in (tail(text, length), beginning(text, length), ending(text, length)):
            assert "hunt" not in seen
            assert "ter2" not in seen
        assert "hunt" not in short_repr(long, length)
    assert "hunt" not in short_repr([{"a": ("y" * 150, text + "y" * 300)}], 4000)


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redacted(text) == text
    assert bare_url(text) == text or "@" in text


@pytest.mark.alike(4)
@pytest.mark.parametrize(
    "part",
    [
        *("a", "?token", "a://", "://u:", "'a':", "token=", "%3A%2F%2F", "&", "<sig>", "--token ", "token: "),
        *(
            "a_",
            "key=a1B",
            "eyJa.",
            "cookie: a",
            "-u a:",
            "'--token', ",
            "password: a1",
            "-----BEGIN PRIVATE KEY-----",
        ),
    ],
)
def test_a_long_text_costs_little(part: str) -> None:
    redacted(part * 25_000)  # half a second at most; squared it would be a quarter of an hour


def test_a_text_is_written_out() -> None:
    assert not CONTROLS.search(terminal.clean(NASTY + "\n"))
    assert terminal.printable("é\u4e2d\U0001f600 ok") == "é\u4e2d\U0001f600 ok"


def test_no_text_gets_past_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    out = terminal.console()
    table = Table(title=NASTY)
    table.add_column(NASTY)
    table.add_row(NASTY)
    from rich.text import Text

    table.add_row(Text(NASTY))
    for what in (NASTY, Text(NASTY), table, [NASTY], {"a": NASTY}):
        out.print(what)
    out.rule(NASTY)
    found = capsys.readouterr().out
    assert not CONTROLS.search(found)
    assert "[/red]" in found


def test_a_forged_line_is_indented(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.block("bad\nok at level bytes", err=True)
    terminal.line("bad\nok at level bytes")
    found = capsys.readouterr()
    assert found.err == "bad\n  ok at level bytes\n"
    assert found.out == "bad\\nok at level bytes\n"


def test_logs(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    theirs = logging.StreamHandler(stream)
    theirs.addFilter(terminal.Clean())
    ours = logging.StreamHandler(stream)
    ours.setFormatter(terminal.Formatter("%(message)s"))
    log = logging.getLogger("ckptcore.test_terminal")
    log.propagate = False
    for handler in (theirs, ours):
        log.addHandler(handler)
        try:
            int(NASTY + SECRETS["userinfo"])
        except ValueError:
            log.exception("%s", NASTY + SECRETS["amazon"])
        log.removeHandler(handler)
    assert not CONTROLS.search(stream.getvalue())
    assert "hunter2" not in stream.getvalue()
    assert stream.getvalue().count("ValueError: ") == 2


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """A checkpoint whose folder, tensors and objects have names with control characters."""
    folder = tmp_path / NASTY.replace("/", "|").replace("\x00", "")
    folder.mkdir()
    save_file({NASTY.replace("\x00", ""): torch.ones(2)}, folder / "model.safetensors", {NASTY: NASTY})
    torch.save({NASTY: torch.ones(2), "a" + NASTY: NASTY}, folder.parent / "one.pt")
    return folder


VERBS = (
    ["inspect", "{src}"],
    ["validate", "{src}", "--no-catalog"],
    ["diff", "{src}", "{pt}"],
    ["plan", "{src}", "{src}.out"],
    ["fingerprint", "{src}", "--no-catalog"],
    ["consolidate", "{src}"],
    ["inspect", "{pt}"],
    ["consolidate", "{pt}", "{src}.pt.out", "--exclude", "\x1b*"],
    ["catalog", "list"],
    ["catalog", "show", "{src}"],
    ["catalog", "show", "{src}", "--tensors"],
    ["catalog", "lineage", "{src}"],
    ["catalog", "find", "{src}"],
    ["catalog", "list", "--conversions"],
    ["catalog", "sql", "SELECT uri, '\x1b[31m' AS \"\x1b[32m\" FROM checkpoint"],
    ["catalog", "root", "add", NASTY, "{src}"],
    ["catalog", "root", "list"],
    ["catalog", "alias", "set", NASTY, "{src}"],
    ["catalog", "alias", "list"],
    ["catalog", "tag", "{src}", f"{NASTY}={NASTY}"],
    ["sweep", "--dry-run"],
    ["catalog", "rebuild", "{src}"],
    ["scrub"],
    ["retire"],
    ["inspect", "/nowhere/[/red]" + NASTY],
    [NASTY],
    ["inspect", "--" + NASTY],
    ["catalog", "show", NASTY],
    ["reshard", "{src}", "{src}.2", "--mesh", NASTY],
    ["export", "{src}", "{src}.3", "--dtype", NASTY],
    ["validate", "{src}", "--level", NASTY],
    ["plan", "{src}", "{src}.4", "--rename", NASTY],
    ["catalog", "find", NASTY, "--fingerprint"],
)


@pytest.mark.parametrize("how", ["text", "json"])
def test_no_verb_writes_control_characters(
    how: str, nasty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "catalog.sqlite"))
    seen = 0
    for verb in VERBS:
        argv = [w.format(src=nasty, pt=nasty.parent / "one.pt") if "{" in w else w for w in verb]
        code = run([*argv, "--output", how] if how == "json" else argv)
        found = capsys.readouterr()
        assert not CONTROLS.search(found.out + found.err), (verb, found)
        assert code != 70, (verb, found)
        seen += "\\x1b" in found.out + found.err or "\\u001b" in found.out + found.err
        if how == "json" and found.out:
            json.loads(found.out)
    assert seen > 15


def test_a_terminal_shows_nothing_raw(nasty: Path, tmp_path: Path) -> None:
    # Coloured, as a person sees it: escapes are those of colours, and none is the stranger's.
    env = os.environ | {"CKPTCORE_CATALOG_URL": str(tmp_path / "c.sqlite"), "TERM": "xterm-256color"}
    env["COLUMNS"] = "400"  # room for the name behind any folder of tests
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-m", "ckptcore", "consolidate", str(nasty)], stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        found += part
    os.close(ours)
    assert done.wait() == 0
    text = found.decode()
    assert "\\x1b[2J" in text
    for bad in ("\x1b[2J", "\x1b]0;", "\x9b", "\x07", "\u202e", "\u2066", "\x08"):
        assert bad not in text


@pytest.mark.parametrize("how", ["traceback", "warning", "log", "thread", "net"])
def test_output_of_python_itself(how: str) -> None:
    code = {
        "traceback": "raise ValueError(text)",
        "warning": "import warnings; warnings.warn(text)",
        "log": "import logging; logging.getLogger('lib').warning('%s', text)",
        "thread": "import threading; t = threading.Thread(target=lambda: 1 / len(text[:0]) or text);"
        "\ndef f(): raise ValueError(text)\nt = threading.Thread(target=f); t.start(); t.join()",
        "net": "import os; os.environ['CKPTCORE_TRACEBACK'] = '1'\nfrom ckptcore.cli import main as cli\n"
        "def broken(*a, **k): raise RuntimeError(text)\ncli.program = broken\nassert cli.run([]) == 70",
    }[how]
    start = f"from ckptcore.utils import terminal; terminal.guard(); text = {NASTY + SECRETS['userinfo']!r}\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=False)
    assert "\\x1b[2J" in done.stderr
    assert not CONTROLS.search(done.stderr)
    assert "hunter2" not in done.stderr


def test_a_terminal_without_unicode() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckptcore", "inspect", "/nowhere/modèle"],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 8
    assert b"mod\\xe8le" in done.stderr


URL_VERBS = (
    ["inspect", "{url}"],
    ["validate", "{url}"],
    ["consolidate", "{url}", "/nowhere/a"],
    ["diff", "{url}", "{url}"],
    ["plan", "{url}", "{url}2"],
    ["export", "/nowhere/a", "{url}"],
    ["catalog", "show", "{url}"],
    ["catalog", "find", "{url}"],
    ["catalog", "root", "add", "x", "{url}"],
    ["catalog", "root", "list"],
    ["catalog", "rebuild", "{url}"],
    ["sweep"],
)


@pytest.mark.parametrize("how", ["text", "json"])
@pytest.mark.parametrize(
    "url",
    [
        "memory://me:hunter2pass@bucket/a",
        "file2://x/a?sig=hunter2pass",
        "simplecache::memory://hunter2pass@b/a",
    ],
)
def test_no_verb_repeats_a_password(
    how: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CKPTCORE_CATALOG_URL", str(tmp_path / "catalog.sqlite"))
    for verb in URL_VERBS:
        argv = [w.format(url=url) for w in verb]
        code = run([*argv, "--output", how])
        found = capsys.readouterr()
        assert "hunter2" not in found.out + found.err, (argv, found)
        assert code != 70, (argv, found)
    assert b"hunter2" not in (tmp_path / "catalog.sqlite").read_bytes()


def test_a_library_takes_the_url_apart(capsys: pytest.CaptureFixture[str]) -> None:
    # botocore quotes the bucket it would need: all of the userinfo, without a scheme.
    assert run(["inspect", "s3://me:hunter2pass@bucket/a"]) == 8
    found = capsys.readouterr().err
    assert "Invalid bucket name" in found
    assert "hunter2" not in found


def test_the_password_of_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    url = "postgresql+psycopg://me:hunter2pass@127.0.0.1:1/db?connect_timeout=1"
    for argv in (["catalog", "list"], ["catalog", "upgrade"], ["catalog", "sql", "SELECT 1"], ["scrub"]):
        for how in ("text", "json"):
            assert run([*argv, "--catalog", url, "--output", how]) in (16, 24)
            found = capsys.readouterr()
            assert "hunter2" not in found.out + found.err
    assert run(["catalog", "list", "--catalog", "postgresql://me:hunter2pass@host:port/db"]) == 16
    assert "hunter2" not in capsys.readouterr().err


def test_credentials_do_not_make_another_checkpoint(tmp_path: Path) -> None:
    assert bare_url("s3://a:b@bucket/run") == bare_url("s3://bucket/run") == "s3://bucket/run"
    # Names are names: two folders of a partitioned store are two checkpoints.
    from ckptcore.catalog.normalize import normal_uri

    one, other = (normal_uri(f"{tmp_path}/token={n}/step-1") for n in (1, 2))
    assert one != other
    assert normal_uri("s3://b/sig=1/a") != normal_uri("s3://b/sig=2/a")


def test_an_unknown_error_is_recorded_without_secrets(tmp_path: Path) -> None:
    with open_catalog(str(tmp_path / "c.sqlite")) as catalog:
        made = catalog.begin(
            {},
            source_uri=SECRETS["userinfo"],
            destination_uri=SECRETS["amazon"],
            verb="export",
            tool_version="1",
        )
        catalog.fail(made, code="internal", message=SECRETS["amazon"])
        text = repr(catalog.show(made))
    assert "hunter2" not in text
    assert "X-Amz-Signature=..." in text


def test_errors_cross_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(CkptError("a", hint="b", url=SECRETS["userinfo"], n=np.int64(3))))
    assert error.values == {"url": "s3://bucket/a", "n": 3}
