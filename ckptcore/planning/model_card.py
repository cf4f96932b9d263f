"""Write the model card (README.md) of an export, and read existing ones.

A card has the origin of the weights, so that a lost catalog can be rebuilt from it (`provenance`). A card
that nobody edited may be replaced (`is_untouched`). Both read the three lines of the
source, whatever version wrote the card.

Cards are published. So a local path is written as the way from the export's folder, which tells a stranger
nothing of the machine, and leads to the source when both are moved together. Where even that would begin at
the root or name a user's home, the last name is there alone, and the digest says which one is meant. Cards of
older versions have full paths.
"""

from __future__ import annotations

import os
import pwd
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ckptcore.core.manifest import Manifest, TensorSpec
from ckptcore.errors import UsageError
from ckptcore.naming.rename import Mapped
from ckptcore.naming.worlds import HUB
from ckptcore.planning.model_files import ModelFiles
from ckptcore.planning.request import Request
from ckptcore.redaction import bare_url, redacted
from ckptcore.store import local_path, split_url
from ckptcore.utils.average_url import is_average, split_average, with_inputs
from ckptcore.utils.markdown import code, prose, uncoded, yaml_text
from ckptcore.utils.merged_url import merged_url, roots_of

_PROVENANCE = re.compile(
    r"^- source: `(?P<source>[^`\n]{1,4096})` \(.*\)\n"
    r"- source manifest \(BLAKE3\): `(?P<digest>[0-9a-f]{64})`\n"
    r"- exported by: ckptcore (?P<version>[\w.+-]{1,64})$",
    re.MULTILINE,
)
# The head of a card, and its facts in their order, each at most once but for ties.
_HEAD = r"---\n(?:(?:library_name|base_model|license): [^\n]+\n)+---\n\n"
_FACTS = (
    "names",
    "cast to",
    "dtype",
    "architecture",
    "base model",
    "licence",
    "config",
    "adapter",
    "tokenizer",
    "code",
    "note",
)
# A card as `model_card` writes it, or wrote it, from its first byte to its last.
_PLAIN_CARD = re.compile(
    rf"({_HEAD})?# (?P<title>[^\n]+)\n\n"
    r"[\d,]+ parameters in \d+ tensors, exported from a sharded training checkpoint\.\n\n## Provenance\n\n"
    r"- source: `[^\n]{1,4096}\n- source manifest \(BLAKE3\): `[0-9a-f]{64}`\n"
    r"- exported by: ckptcore [\w.+-]{1,64}\n"
    + "".join(rf"(- {fact}: [^\n]*\n)?" for fact in _FACTS)
    + r"(- tied: `[^\n]*` is `[^\n]*`, equality checked\n)*"
    r"(- fingerprint: `[0-9a-f]{64}`\n)?"
)
_MOST_TITLE, _MOST_NAME, _MOST_NAMES = 1000, 300, 20  # characters of texts, and how many
# How names were mapped: --names, the architecture of the map if there was one, and the config that it took.
_NAMED = re.compile(
    r"^- names: `(?P<names>[\w.:-]{1,64})`(?:, by the map of `(?P<arch>[\w.-]{1,64})`)?$", re.MULTILINE
)
_CONFIG = re.compile(r"^- config: `([^`\n]{1,4096})`(?:,[^\n]*)?$", re.MULTILINE)
_TIED = re.compile(r"^- tied: `([^`\n]+)` is `([^`\n]+)`, equality checked$", re.MULTILINE)
# Configs of transformers 5 that 4.57 opens wrongly, or not at all: model type -> the key that differs.
_NEEDS_5: Mapping[str, str] = {"olmo3": "rope_parameters", "qwen3_moe": "num_local_experts"}


def model_card(
    request: Request,
    mapped: Mapped,
    manifest: Manifest,
    written: Mapping[str, str],
    files: ModelFiles,
    arch: str = "",
) -> bytes:
    """Return the README of an export.

    Args:
        request: The export.
        mapped: Its tensors.
        manifest: The source.
        written: Name -> dtype of the tensors that are cast.
        files: The files beside the weights.
        arch: Architecture of the map of names, or "".
    """
    from ckptcore.utils.version import __version__

    specs = mapped.manifest.tensors
    head, count = list(_head(files)), sum(t.numel for t in specs)
    lines = [
        *(["---", *head, "---", ""] if head else []),
        f"# {prose(split_url(request.destination)[1], _MOST_TITLE)}",
        "",
        f"{count:,} parameters in {len(specs)} tensors, exported from a sharded training checkpoint.",
        "",
        "## Provenance",
        "",
        f"- source: {code(_stated(request.source, request.destination))} ({manifest.format})",
        f"- source manifest (BLAKE3): `{manifest.digest}`",
        f"- exported by: ckptcore {__version__}",
        *(f"- {name}: {text}" for name, text in _facts(request, specs, written, files, arch) if text),
        *[f"- tied: {code(a)} is {code(b)}, equality checked" for a, b in mapped.ties],
        "",
    ]
    return "\n".join(lines).encode()


def fingerprint_line(fingerprint: str) -> bytes:
    """Return the last line of a card: the fingerprint of the tensors before any cast."""
    return f"- fingerprint: `{fingerprint}`\n".encode()


@dataclass(frozen=True, slots=True)
class CardSource:
    """The source that a card names.

    Attributes:
        name: The source as the card names it.
        place: Its path or URL, or "" where the card has its name alone.
        digest: BLAKE3 of its manifest.
        version: Of ckptcore that exported it.
    """

    name: str
    place: str
    digest: str
    version: str


def provenance(card: str, export: str) -> CardSource | None:
    """Read the source from the README of an export; None if `model_card` did not write it."""
    match = _PROVENANCE.search(card)
    if match is None:
        return None
    name = uncoded(match["source"])
    return CardSource(name, _place(name, export), match["digest"], match["version"])


def tied_by_card(card: str) -> tuple[tuple[str, str], ...]:
    """Read the ties from a README: (name that is not stored, name that is)."""
    return tuple((uncoded(m[1]), uncoded(m[2])) for m in _TIED.finditer(card))


def names_by_card(card: str, export: str) -> dict[str, str]:
    """Read how names were mapped from the README of an export, as fields of a request; {} for the hub's."""
    match = _NAMED.search(card)
    if match is None:
        return {}
    fields = {"names": match["names"]} | ({"arch": match["arch"]} if match["arch"] else {})
    config = _CONFIG.search(card)
    place = _place(uncoded(config[1]), export) if config is not None else ""
    # An export under names of the hub has the config itself.
    return fields | ({"config": place} if place and match["arch"] else {})


def is_untouched(card: bytes, name: str) -> bool:
    """Return whether `model_card` wrote the README of a folder of this name, and nobody edited it."""
    match = _PLAIN_CARD.fullmatch(card.decode(errors="replace"))
    return match is not None and match["title"] in (prose(name, _MOST_TITLE), name)


def _head(files: ModelFiles) -> Iterator[str]:
    """Yield the lines of YAML that hubs read."""
    if files.config is None and files.adapter is None:
        return
    of_diffusers = files.config is not None and files.config.of_diffusers
    of_model = "diffusers" if of_diffusers else "transformers"
    yield f"library_name: {of_model if files.adapter is None else 'peft'}"
    if files.base_model:
        yield f"base_model: {yaml_text(files.base_model)}"
    if files.licence:
        yield f"license: {yaml_text(files.licence)}"


def _facts(
    request: Request, specs: tuple[TensorSpec, ...], written: Mapping[str, str], files: ModelFiles, arch: str
) -> Iterator[tuple[str, str]]:
    """Yield (fact, text on one line), in the order of `_FACTS`; the text is empty if unknown."""
    by_map = f", by the map of {code(arch)}" if arch else ""
    yield "names", "" if request.names == HUB else f"{code(request.names)}{by_map}"
    yield "cast to", request.dtype or ""
    total: Counter[str] = Counter()
    for spec in specs:
        dtype = written.get(spec.fqn, spec.dtype)
        total[dtype] += spec.numel
    yield "dtype", ", ".join(f"{dtype} ({count:,})" for dtype, count in total.most_common())
    form = files.config.form if files.config is not None else {}
    names = form.get("architectures") or [form.get("_class_name")]
    texts = [n for n in names if isinstance(n, str)] if isinstance(names, list) else []
    named = ", ".join(_span(n) for n in texts[:_MOST_NAMES])
    kind = form.get("model_type")
    yield "architecture", f"{named} ({prose(kind)})" if named and isinstance(kind, str) else named
    yield "base model", _span(files.base_model) if files.base_model else ""
    legal = [n for n in (files.config.content if files.config else {}) if n.startswith(("LIC", "NOTICE"))]
    licence = [_span(files.licence)] if files.licence else []
    yield "licence", ", ".join(licence + [f"see {prose(name)}" for name in legal])
    version = form.get("transformers_version")
    by = f", written by transformers {prose(version)}" if isinstance(version, str) else ""
    config = files.config or files.adapter
    yield "config", f"{code(_stated(config.url, request.destination))}{by}" if config is not None else ""
    lora = files.adapter.form if files.adapter is not None else {}
    rank, alpha = (prose(str(lora.get(key))) for key in ("r", "lora_alpha"))
    is_lora = lora.get("peft_type") in (None, "LORA")
    kind_of_adapter = f"LoRA, r {rank}, lora_alpha {alpha}" if is_lora else prose(str(lora.get("peft_type")))
    yield "adapter", kind_of_adapter if lora else ""
    yield "tokenizer", code(_stated(files.taken_from, request.destination)) if files.taken_from else ""
    modules = ", ".join(map(code, files.code))
    yield "code", f"{modules}, as it was found: read it before you trust it" if modules else ""
    key = _NEEDS_5.get(kind) if isinstance(kind, str) else None
    if key is not None and key in form and _major(version) >= 5:
        yield "note", f"transformers 4.57 does not open this config as it is meant (`{key}`): open it with 5"


def _major(version: object) -> int:
    match = re.match(r"\d{1,4}", version) if isinstance(version, str) else None
    return int(match[0]) if match else 0


def _stated(url: str, export: str) -> str:
    """Return how a card names a path or URL, without credentials and without a path of this machine."""

    def stated(place: str) -> str:
        path, folder = local_path(place), local_path(export)
        if path is None:
            return bare_url(place)
        target = os.path.abspath(path)
        export_folder = os.path.abspath(folder) if folder is not None else os.sep
        shared = os.path.commonpath([target, export_folder])
        # Then the way would have the name of a disk or of a user.
        if shared == os.sep or (_is_in(homes, shared) and _is_in(target, homes)):
            return os.path.basename(target) or target
        return os.path.relpath(target, export_folder)

    homes = _homes()
    return _of_all(url, stated)


def _homes() -> str:
    """Return the folder of users' homes: of the account, since $HOME may be anything."""
    try:
        return os.path.dirname(os.path.abspath(pwd.getpwuid(os.getuid()).pw_dir))
    except KeyError:  # an account of a container alone
        return os.sep


def _is_in(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _place(text: str, export: str) -> str:
    """Return the path or URL that a card names with `_stated`; "" for a name alone."""

    def place(named: str) -> str:
        if local_path(named) is None or os.path.isabs(named):
            return named
        folder = local_path(export)
        if folder is None or not named.startswith("../"):
            raise UsageError(f"{named!r} is a name without a place")
        return os.path.abspath(folder / named)

    try:
        return _of_all(text, place)
    except UsageError:
        return ""


def _of_all(url: str, change: Callable[[str], str]) -> str:
    """Return a path or URL, or that of several, with each of its places changed."""
    if is_average(url):
        return with_inputs(url, [_of_all(root, change) for root in split_average(url)[0]])
    if roots := roots_of(url):
        return merged_url(change(root) for root in roots)
    return change(url)


def _span(text: str) -> str:
    """Return a text of a file as a code span of bounded length, without credentials."""
    return code(redacted(text)[:_MOST_NAME])
