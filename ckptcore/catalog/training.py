"""Facts about the training that wrote a checkpoint: metrics, commit, config, dataset, user, job.

They come from users, from announcements and from what the checkpoint itself stores. `read_facts` turns any
JSON form into `TrainingFacts` that every database can store: bounded in size, without credentials, numbers
finite or named. What does not fit is left out and reported, because facts about a training must never cost
its checkpoint a conversion.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from ckptcore.catalog.normalize import clean
from ckptcore.errors import UsageError
from ckptcore.redaction import GONE, without_arguments
from ckptcore.utils.foreign_text import InvalidText, load_json
from ckptcore.utils.text import listed
from ckptcore.utils.text import short_repr as quoted

# Where facts come from. An earlier one replaces a later one, never the other way round.
USER, ANNOUNCED, STORED, INHERITED = "user", "announced", "stored", "inherited"
PRECEDENCE = (USER, ANNOUNCED, STORED, INHERITED)

MAX_METRICS = 200  # of one checkpoint
MAX_NAME = 200  # characters of a metric's name, or of a key
MAX_TEXT = 2000  # characters of a text
MAX_JSON = 64 << 10  # bytes of a config, and of the other facts
MAX_NODES = 20_000  # values in one tree
MAX_DEPTH = 12
_MOST = (1 << 63) - 1  # the largest number of a column

TEXTS = ("git_commit", "user", "dataset", "job_url", "framework")
# Fingerprints of what the job had in memory, as `ckptcore.fingerprint_state` computes them.
LIVE = ("live_fingerprint", "live_model_fingerprint")
COUNTS = ("samples", "tokens")
OF_A_STEP = ("epoch", *COUNTS, *LIVE)  # beside the metrics: facts with another value at each step of a run
# Words in names of metrics, and other names of the step, that people write without ``metrics.``.
_METRIC_WORD = re.compile(
    r"(?i)(?:^|[_./-])(?:loss|nll|bpb|ppl|perplexity|acc|accuracy|f1|auc|bleu|rouge\w*|wer|reward|score|mmlu|"
    r"grad_?norm)(?:$|[_./@-])"
)
_STEPS = frozenset({"step", "steps", "global_step", "iteration", "iterations"})
# Other names of the same facts, as trainers and trackers write them.
SYNONYMS = {
    "commit": "git_commit",
    "git_sha": "git_commit",
    "author": "user",
    "username": "user",
    "url": "job_url",
    "consumed_samples": "samples",
    "consumed_train_samples": "samples",
    "consumed_tokens": "tokens",
    "num_input_tokens_seen": "tokens",
}
NOT_FINITE = {"nan": "nan", "inf": "inf", "infinity": "inf", "-inf": "-inf", "-infinity": "-inf"}

# Keys whose text grants access. Special tokens of a tokenizer are texts, too, and no secrets.
_SECRET_KEY = re.compile(
    r"(?i)(?:^|[_.-])(?:[a-z0-9]*secret[a-z0-9]*|token|passw(?:or)?d|passphrase|pwd|credentials?|authorization|"
    r"cookie|jwt|bearer|apikey|(?:api|access|private|secret|account|auth|ssh|license|wandb|hf|encryption)_?key"
    r"(?:_id)?)(?:$|[_.-])|(?:password|apikey|secretkey|accesskey|authtoken|accesstoken)$"
)
_SPECIAL_TOKEN = re.compile(
    r"(?i)^(?:bos|eos|pad|unk|cls|sep|mask|image|video|audio|start|end|think|tool|fim|eot|eod)_.*token$"
    r"|^(?:bos|eos|pad|unk|cls|sep|mask)_token$"
)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_PLACEHOLDER = re.compile(r"\$\{[^{}]*\}")  # of a sender's template, with nothing to fill in


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of a metric. value: None if it is not finite; then `nonfinite` is nan, inf or -inf.

    step: when it was measured; None for the step of the checkpoint. trouble: what is odd in its row.
    """

    value: float | None
    nonfinite: str | None = None
    step: int | None = None
    trouble: str = ""

    @property
    def text(self) -> str:
        """The value as text."""
        if self.trouble:
            return "unreadable"
        return self.nonfinite or ("-" if self.value is None else f"{self.value:.6g}")


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """What is known about the training at the step of a checkpoint. None: unknown.

    Attributes:
        git_commit: of the training code.
        user: who trained.
        dataset: its name or place.
        job_url: a page about the job.
        framework: the trainer's name.
        epoch: epochs so far.
        samples: training samples so far.
        tokens: training tokens so far.
        live_fingerprint: of everything that the job saved, under the names of
            `torch.distributed.checkpoint`, 64 hex digits.
        live_model_fingerprint: of the model alone, under the names of its module.
        metrics: values by name.
        config: the trainer's config, or its hyperparameters.
        extra: other facts.
    """

    git_commit: str | None = None
    user: str | None = None
    dataset: str | None = None
    job_url: str | None = None
    framework: str | None = None
    epoch: float | None = None
    samples: int | None = None
    tokens: int | None = None
    live_fingerprint: str | None = None
    live_model_fingerprint: str | None = None
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return whether anything is known."""
        return any(getattr(self, f.name) not in (None, {}) for f in fields(self))

    def as_form(self) -> dict[str, Any]:
        """Return the JSON form, which `read_facts` reads."""
        form = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "metrics"}
        form["metrics"] = {
            name: {"value": m.nonfinite or m.value, **({} if m.step is None else {"step": m.step})}
            for name, m in self.metrics.items()
        }
        return {name: value for name, value in form.items() if value is not None and value != {}}


EQUAL, DIFFERENT = "equal", "different"
_LIVE_TEXT = {
    EQUAL: "equals what the job had in memory",
    DIFFERENT: "differs from what the job had in memory",
}


@dataclass(frozen=True, slots=True)
class LiveVerdict:
    """Whether a checkpoint has what its job had in memory.

    Attributes:
        verdict: `EQUAL` or `DIFFERENT`.
        compared: the job's fingerprint that it was compared with.
    """

    verdict: str
    compared: str

    @property
    def text(self) -> str:
        """The verdict in words."""
        return _LIVE_TEXT[self.verdict]


@dataclass(frozen=True, slots=True)
class Training:
    """The recorded facts of a checkpoint.

    Attributes:
        facts: the facts.
        sources: the origin of each fact, and of each metric as ``metrics.NAME``: user, announced, stored or
            inherited.
        updated_at: when one of them last changed.
        live_verdict: `EQUAL` or `DIFFERENT`, if the checkpoint was compared with the job's fingerprint; None
            if it was not, or the recorded fingerprint is another one since.
        trouble: what is odd in the row, where an odd value is unknown here.
    """

    facts: TrainingFacts
    sources: dict[str, str]
    updated_at: datetime | None
    live_verdict: str | None = None
    trouble: str = ""

    @property
    def live_text(self) -> str:
        """The verdict in words, also of an odd row."""
        return _LIVE_TEXT.get(self.live_verdict or "", "not compared with what the job had in memory")


def read_facts(form: Any) -> tuple[TrainingFacts, tuple[str, ...]]:
    """Read facts from a JSON form.

    >>> facts, left_out = read_facts({"commit": "3f9a", "metrics": {"loss": 2.5}, "hub_token": "x"})
    >>> facts.git_commit, facts.metrics["loss"].value, facts.extra, left_out
    ('3f9a', 2.5, {'hub_token': '...'}, ())

    Args:
        form: An object with the fields of `TrainingFacts`, or their synonyms; other keys become `extra`.

    Returns:
        The facts, and a message for each part that is left out.
    """
    if form is None or form == "":
        return TrainingFacts(), ()
    if not isinstance(form, Mapping):
        return TrainingFacts(), (f"meta must be an object (got {type(form).__name__})",)
    left_out: list[str] = []
    recognised: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    nested = form.get("extra")
    for key, value in form.items():
        name = SYNONYMS.get(str(key), str(key))
        if name == "extra" and isinstance(nested, Mapping):
            rest |= nested
        elif name in TEXTS:
            _put(recognised, name, _text(name, value, left_out))
        elif name in COUNTS:
            _put(recognised, name, _count(name, value, left_out))
        elif name in LIVE:
            _put(recognised, name, _fingerprint(name, value, left_out))
        elif name == "epoch":
            _put(recognised, name, _finite(name, value, left_out))
        elif name not in ("metrics", "config"):
            rest[str(key)] = value
    return (
        TrainingFacts(
            **recognised,
            metrics=_metrics(form.get("metrics"), left_out),
            config=bounded("config", form.get("config"), left_out),
            extra=bounded("other facts", rest, left_out),
        ),
        tuple(left_out),
    )


def facts_of_pairs(texts: Iterable[str], option: str = "--meta") -> TrainingFacts:
    """Read facts from texts of the form KEY=VALUE. Raises `UsageError`.

    ``metrics.NAME`` is a metric, ``config.NAME`` an entry of the config. Values that are JSON are read as
    such.

    >>> facts_of_pairs(["metrics.loss=2.5", "git_commit=3f9a", "note=warm"]).as_form()
    {'git_commit': '3f9a', 'extra': {'note': 'warm'}, 'metrics': {'loss': {'value': 2.5}}}
    """
    form: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        group, dot, name = key.partition(".")
        if not equals or not key.strip() or (dot and not name):
            raise UsageError(
                f"{option} must have the form KEY=VALUE (got {quoted(text)})",
                hint="for example metrics.loss=2.31, git_commit=3f9a, config.lr=3e-4",
            )
        group = "metrics" if group == "metric" else group
        if dot and group in ("metrics", "config"):
            form.setdefault(group, {})[name] = value if group == "metrics" else _parse_value(value)
        else:
            form[key] = value if SYNONYMS.get(key, key) in (*TEXTS, *LIVE) else _parse_value(value)
    facts, left_out = read_facts(form)
    if left_out:
        raise UsageError(f"cannot use {option}: {'; '.join(left_out)}", hint="correct or remove it")
    return facts


def facts_of_every(texts: Iterable[str], option: str = "--meta") -> TrainingFacts:
    """Read facts that hold for several checkpoints from texts of the form KEY=VALUE.

    >>> facts_of_every(["user=ada", "config.lr=3e-4"]).as_form()
    {'user': 'ada', 'config': {'lr': 0.0003}}

    Raises:
        UsageError: A text cannot be read, or it is a fact of one step, such as a metric: recorded for all, it
            would rank them wrongly, and as a user's it would replace what each of them stores.
    """
    facts = facts_of_pairs(texts, option)
    of_a_step = [f"metrics.{name}" for name in facts.metrics]
    of_a_step += [name for name in OF_A_STEP if getattr(facts, name) is not None]
    bare = unnamed_metrics(facts)
    if bare and not of_a_step:
        raise UsageError(
            f"cannot use {option} for {', '.join(bare)}: a sweep records one value for every checkpoint, and "
            "this looks like a metric, which has another value at each step",
            hint=f"for one checkpoint, run: ckptcore catalog meta ID metrics.{bare[0]}=VALUE. What holds at "
            f"every step is an entry of the config: {option} config.{bare[0]}=VALUE",
        )
    if of_a_step:
        raise UsageError(
            f"cannot use {option} for {', '.join(of_a_step)}: a sweep records one value for every "
            "checkpoint, and this fact has another value at each step",
            hint=f"leave it out: what a checkpoint stores about its training is recorded by itself. For one "
            f"checkpoint, run: ckptcore catalog meta ID {of_a_step[0]}=VALUE",
        )
    return facts


def unnamed_metrics(facts: TrainingFacts) -> list[str]:
    """Return the facts without a group that look like metrics: ``loss=2.3`` is ranked by nothing."""
    return [name for name, value in facts.extra.items() if _is_measured(name, value)]


def _is_measured(name: str, value: Any) -> bool:
    """Report whether a fact without a group looks like a value that was measured at one step."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or str(value).lower() in NOT_FINITE):
        return False
    return name.lower() in _STEPS or _METRIC_WORD.search(name) is not None


def bounded(label: str, tree: Any, left_out: list[str]) -> dict[str, Any]:
    """Return the entries of a tree that can be stored, as plain JSON values without credentials.

    Entries are taken in order until `MAX_JSON` bytes are full.
    """
    if tree is None or tree == {}:
        return {}
    if not isinstance(tree, Mapping):
        left_out.append(f"{label} must be an object (got {type(tree).__name__})")
        return {}
    entries: dict[str, Any] = {}
    size, dropped, nodes = 2, 0, [MAX_NODES]
    for key, value in tree.items():
        name = _name(str(key))
        try:
            plain = _plain(name, value, MAX_DEPTH, nodes)
        except _TooLarge:
            dropped += 1
            continue
        nbytes = len(json.dumps({name: plain}, allow_nan=False).encode())
        if size + nbytes > MAX_JSON:
            dropped += 1
            continue
        entries[name] = plain
        size += nbytes
    if dropped:
        left_out.append(f"{label}: {dropped} of its entries, beyond {MAX_JSON >> 10} KiB")
    return entries


def measured(value: Any) -> Measured | None:
    """Return a number, or a text that is one, as a value of a metric; None for anything else.

    >>> measured("NaN").nonfinite, measured(True)
    ('nan', None)
    """
    step = None
    if isinstance(value, Mapping):
        own_step = value.get("step")
        step = (
            own_step
            if isinstance(own_step, int) and not isinstance(own_step, bool) and 0 <= own_step <= _MOST
            else None
        )
        value = value.get("value")
    if isinstance(value, str):
        text = value.strip().lower().lstrip("+")
        if text in NOT_FINITE:
            return Measured(None, NOT_FINITE[text], step)
        if len(text) > 64:
            return None
        try:
            value = float(text)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if math.isfinite(number):
        return Measured(number, None, step)
    return Measured(None, "nan" if math.isnan(number) else "inf" if number > 0 else "-inf", step)


class _TooLarge(Exception):
    """A tree has more values than are stored."""


def _metrics(form: Any, left_out: list[str]) -> dict[str, Measured]:
    """Return the metrics that are numbers; add what is omitted, and why, to ``left_out``."""
    if form is None or form == {}:
        return {}
    if not isinstance(form, Mapping):
        left_out.append(f"metrics must be an object of numbers by name (got {type(form).__name__})")
        return {}
    metrics: dict[str, Measured] = {}
    no_number, too_many = list[str](), 0
    for key, value in form.items():
        if isinstance(value, str) and _PLACEHOLDER.search(value):
            continue
        measurement = measured(value)
        if measurement is None:
            no_number.append(f"metrics.{_name(str(key))} must be a number{_got(str(key), value)}")
        elif len(metrics) >= MAX_METRICS:
            too_many += 1
        else:
            metrics[_name(str(key))] = measurement
    if no_number:
        left_out.append(listed(no_number, 3))
    if too_many:
        left_out.append(f"metrics: {too_many} beyond the first {MAX_METRICS}")
    return metrics


def _got(name: str, value: Any) -> str:
    """Return what was given in place of a number, for a message; nothing of what may be a secret."""
    return "" if _is_secret(name) else f" (got {clean(quoted(value, 40))})"


def _put(facts: dict[str, Any], name: str, value: Any) -> None:
    """Add a value unless it is None: a fact under two names keeps the one that could be read."""
    if value is not None:
        facts[name] = value


def _text(name: str, value: Any, left_out: list[str]) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        left_out.append(f"{name} must be a text (got {type(value).__name__})")
        return None
    text = value if isinstance(value, str) else _number_text(value)
    if _PLACEHOLDER.fullmatch(text):
        return None
    if len(text) > MAX_TEXT:
        left_out.append(f"{name} is longer than {MAX_TEXT} characters")
        return None
    return clean(text)


def _fingerprint(name: str, value: Any, left_out: list[str]) -> str | None:
    if value is None or value == "" or (isinstance(value, str) and _PLACEHOLDER.fullmatch(value)):
        return None
    if isinstance(value, str) and _FINGERPRINT.fullmatch(value):
        return value
    left_out.append(f"{name} must be 64 hex digits (got {quoted(value)})")
    return None


def _count(name: str, value: Any, left_out: list[str]) -> int | None:
    number = _finite(name, value, left_out)
    if number is None:
        return None
    exact = value if isinstance(value, int) else int(number)
    if not 0 <= exact <= _MOST:
        left_out.append(f"{name} must be from 0 to 2**63 - 1")
        return None
    return exact


def _finite(name: str, value: Any, left_out: list[str]) -> float | None:
    if value is None or (isinstance(value, str) and (not value or _PLACEHOLDER.fullmatch(value))):
        return None
    measurement = measured(value)
    if measurement is None or measurement.value is None:
        left_out.append(f"{name} must be a finite number{_got(name, value)}")
        return None
    return measurement.value


def _plain(key: str, value: Any, depth: int, nodes: list[int]) -> Any:
    """Return a JSON value that both databases store and every JSON parser reads."""
    nodes[0] -= 1
    if nodes[0] < 0 or depth < 0:
        raise _TooLarge
    if isinstance(value, str):
        if _is_secret(key):
            return GONE
        if len(value) > MAX_JSON:
            raise _TooLarge
        return clean(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -_MOST <= value <= _MOST else _number_text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {
            (name := _name(str(k))): (GONE if _grants(name, v) else _plain(name, v, depth - 1, nodes))
            for k, v in value.items()
        }
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        items = without_arguments(value) if isinstance(value, Sequence) else value
        return [_plain(key, item, depth - 1, nodes) for item in items]
    return clean(str(value)[:MAX_TEXT])


def _grants(name: str, value: Any) -> bool:
    """Return whether a value under a secret's name is bytes or a list, which `_plain` would not recognise."""
    return _is_secret(name) and isinstance(value, bytes | bytearray)


def _is_secret(name: str) -> bool:
    return _SECRET_KEY.search(name) is not None and _SPECIAL_TOKEN.search(name) is None


def _number_text(value: float) -> str:
    # Python refuses to write an integer of more than 4300 digits.
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def _name(text: str) -> str:
    return clean(text)[:MAX_NAME]


def _parse_value(text: str) -> Any:
    try:
        return load_json(text)
    except InvalidText:
        return text
