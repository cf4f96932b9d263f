"""Find the files beside an export's weights: config, tokenizer, templates, code, licence.

Options come first (``--config``, ``--tokenizer``). Other files are searched where trainers write them: in the
folder of the checkpoint's files and its subfolders, in every folder from there up to the source that the user
named, and beside that source in `TRAINER_FOLDERS`. The nearest place counts. Two that differ in one place are
an error that lists the candidates.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.core.used_files import placed
from ckptcore.errors import AmbiguousModel, Finding, SourceUnreadable, UsageError, finding
from ckptcore.formats.base import natural
from ckptcore.naming.wrapper_prefix import note_of_wrapper
from ckptcore.planning.config_folder import ConfigFolder
from ckptcore.planning.hub_files import (
    ADAPTER,
    CARD,
    CONFIG,
    LEGAL,
    MAX_FILE,
    MODEL,
    NONE,
    OTHER,
    PEFT,
    TOKENIZER,
    HubFolder,
    agree,
    front_matter,
    is_of_training,
    left_out,
    look,
    read_named,
)
from ckptcore.planning.request import Request
from ckptcore.planning.stored_configs import TRAINER_FOLDERS
from ckptcore.store import join_url, local_path, split_url
from ckptcore.store.listing import Folder, folder_at
from ckptcore.store.place import Relation, identify, relation
from ckptcore.utils.average_url import is_average, is_of_last, split_average
from ckptcore.utils.merged_url import merged_url, split_merged
from ckptcore.utils.text import count, listed
from ckptcore.utils.units import show_size

_OWN_LORA = frozenset({"phi4mm"})  # models with LoRA weights of their own
_MAX_LISTED = 8  # files that are left out by name
_MAX_FOLDERS = 64  # subfolders that are searched; of more, only `TRAINER_FOLDERS`
_KNOWN = tuple(folder.path for folder in TRAINER_FOLDERS if folder.path)
_IS: Mapping[str, tuple[Callable[[HubFolder], bool], str]] = {
    "config": (HubFolder.has_config, MODEL),
    "adapter config": (HubFolder.has_adapter, PEFT),
    "tokenizer": (HubFolder.has_tokenizer, TOKENIZER),
}


@dataclass(frozen=True)
class AdapterConfig:
    """An adapter_config.json. url: of its folder. form: its content."""

    url: str
    form: Mapping[str, Any]


@dataclass(frozen=True)
class ModelFiles:
    """The files beside the weights.

    Attributes:
        config: The config with the other files of its folder, or None.
        tokenizer: Name -> bytes of files from another folder, or None.
        taken_from: URL of that folder, or "".
        findings: About files that were found, or left out.
        base_model: Name of the base model in the files, or "".
        licence: Licence in the files, or "".
        adapter: The config of an adapter, or None.
        base: The config of the model that it adapts, or None.
    """

    config: ConfigFolder | None = None
    tokenizer: Mapping[str, bytes] | None = None
    taken_from: str = ""
    findings: tuple[Finding, ...] = ()
    base_model: str = ""
    licence: str = ""
    adapter: AdapterConfig | None = None
    base: ConfigFolder | None = None

    @property
    def code(self) -> tuple[str, ...]:
        """Names of the Python files."""
        content = self.config.content if self.config is not None else {}
        return tuple(sorted(n for n in content if n.endswith(".py")))

    @property
    def urls(self) -> frozenset[str]:
        """URLs of the files that are written, or that names were compared with."""
        taken = [(self.taken_from, name) for name in self.tokenizer or {}]
        for folder in (self.config, self.base):
            taken += [] if folder is None else [(folder.url, name) for name in folder.content]
        taken += [] if self.adapter is None else [(self.adapter.url, ADAPTER)]
        return urls_of_files(taken)


def urls_of_files(files: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the URLs of files, of which each is a folder's URL and a path in it, with absolute paths."""
    return frozenset(join_url(_absolute(url), name) for url, name in files)


def find_files(request: Request, manifest: Manifest) -> ModelFiles:
    """Find the files beside the weights of an export.

    Args:
        request: The export.
        manifest: The checkpoint.

    Raises:
        UsageError: A named file is missing, too large, or no config.
        AmbiguousModel: Two candidates in one place differ.
    """
    single = request.single is not None
    config = _option_folder(request.config, "--config")
    if config is not None:
        _require_object(config, str(request.config))
    tokenizer = _named_tokenizer(request.tokenizer)
    findings = []
    places = _Places(request, manifest)
    # A named config was chosen; only without one the places around the checkpoint are searched.
    if config is None and request.config != NONE and not single:
        config = _nearest("config", places.nearest_first())
        if config is not None:
            findings.append(_found_finding("config.json", config))
    # The config's own folder is the nearest place of a tokenizer.
    config_has_tokenizer = config is not None and config.has_tokenizer()
    if tokenizer is None and request.tokenizer != NONE and not config_has_tokenizer and not single:
        tokenizer = _nearest("tokenizer", places.nearest_first())
        if tokenizer is not None:
            findings.append(_found_finding("the tokenizer", tokenizer))
    return _collected(request, config, tokenizer, findings)


def require_named_files(config: str | None, tokenizer: str | None) -> None:
    """Raise `UsageError` if what ``--config`` or ``--tokenizer`` names cannot be read."""
    folder = _option_folder(config, "--config")
    if folder is not None and not folder.has_adapter():
        _require_object(folder, str(config))
    _named_tokenizer(tokenizer)


def _named_tokenizer(url: str | None) -> HubFolder | None:
    """Return the folder of ``--tokenizer``, if it is named; raise `UsageError` if it has none."""
    folder = _option_folder(url, "--tokenizer")
    if folder is not None and not folder.has_tokenizer():
        raise UsageError(
            f"cannot take a tokenizer from --tokenizer {url}: it has none",
            hint="try a folder with tokenizer.json, tokenizer.model, tekken.json or *.tiktoken",
        )
    return folder


def has_lora_of_its_own(request: Request) -> bool:
    """Return whether the named config is of a model with LoRA weights of its own: it is no adapter."""
    config = _option_folder(request.config, "--config")
    form = (config.json(CONFIG) if config is not None else None) or {}
    return form.get("model_type") in _OWN_LORA


def find_adapter_files(
    request: Request,
    manifest: Manifest,
    trainer_form: Callable[[str], Mapping[str, Any] | None] | None = None,
) -> ModelFiles:
    """Find files as `find_files` does, for a LoRA adapter: adapter_config.json in place of config.json.

    Args:
        request: The export.
        manifest: The checkpoint.
        trainer_form: Called with the base model's name, "" if unknown, where there is no adapter_config.json.
            It returns that file's content from the trainer's own config, or None.
    """
    findings = []
    single, places = request.single is not None, _Places(request, manifest)
    named = None if request.config in (None, NONE) else read_named("--config", str(request.config), ADAPTER)
    tokenizer = _option_folder(request.tokenizer, "--tokenizer")
    config = named
    # A named folder may have the base model's config alone: then the adapter's is searched for.
    if named is None or not named.has_adapter():
        if request.config != NONE:
            config = _nearest("adapter config", places.nearest_first())
            if config is not None:
                findings.append(_found_finding("adapter_config.json", config))
        if config is None and named is not None and trainer_form is None:
            raise UsageError(
                f"cannot use --config {request.config}: it has no adapter_config.json, and the model is a "
                "LoRA adapter",
                hint="try the one of the training run, or export the base weights with --exclude '*.lora_*'",
            )
    if tokenizer is None and request.tokenizer != NONE and not single:
        near = [f for f in (named, config) if f is not None and f.has_tokenizer()]
        tokenizer = near[0] if near else _nearest("tokenizer", places.nearest_first())
        if tokenizer is not None and not near:
            findings.append(_found_finding("the tokenizer", tokenizer))
    if tokenizer is not None:
        findings += _too_large(tokenizer, [TOKENIZER, LEGAL])
    form = (config.json(ADAPTER) if config is not None else None) or {}
    base_config = _base_config(request, named, places)
    adapter = AdapterConfig(config.url, form) if config is not None else None
    if adapter is None and trainer_form is not None:
        hub_name = base_config.form.get("_name_or_path") if base_config is not None else None
        of_trainer = trainer_form(str(hub_name) if _is_hub_name(hub_name) else "")
        adapter = None if of_trainer is None else AdapterConfig(manifest.root, of_trainer)
        form = dict(of_trainer or {})
    base = str(form.get("base_model_name_or_path") or "")
    return ModelFiles(
        tokenizer=tokenizer.of(TOKENIZER, LEGAL) if tokenizer is not None else None,
        taken_from=tokenizer.url if tokenizer is not None else "",
        findings=tuple(findings),
        base_model=base if _is_hub_name(base) else "",
        adapter=adapter,
        base=base_config,
    )


def _base_config(request: Request, named: HubFolder | None, places: _Places) -> ConfigFolder | None:
    """Return the config.json of the model that an adapter belongs to: the named one, or the nearest."""
    # The base config is no part of the output: several that differ only mean that nothing is compared.
    if named is None or not named.has_config():
        try:
            named = None if request.config == NONE else _nearest("config", places.nearest_first())
        except AmbiguousModel:  # no evidence: nothing of it is published
            named = None
    return None if named is None else ConfigFolder(named.url, named.of(MODEL))


def _collected(
    request: Request, config: HubFolder | None, tokenizer: HubFolder | None, findings: list[Finding]
) -> ModelFiles:
    """Return the files of a model beside its weights, from the folders of its config and tokenizer."""
    tokenizer_folder = (
        tokenizer if tokenizer is not None and (config is None or tokenizer.url != config.url) else None
    )
    roles = [MODEL, LEGAL, OTHER]
    roles += [] if tokenizer_folder is not None or request.tokenizer == NONE else [TOKENIZER]
    if config is not None and (names := left_out(config)):
        message = f"files of {config.url} are left out: {names}"
        findings = [*findings, finding("left-beside", "files", message)]
    findings = [
        *findings,
        *(_too_large(config, roles) if config is not None else ()),
        *(_too_large(tokenizer_folder, [TOKENIZER, LEGAL]) if tokenizer_folder is not None else ()),
    ]
    folder = None if config is None else ConfigFolder(config.url, config.of(*roles))
    content = folder.content if folder is not None else {}
    beside = (
        # What the config's folder has under the same name counts: its files belong together.
        {n: d for n, d in tokenizer_folder.of(TOKENIZER, LEGAL).items() if n not in content}
        if tokenizer_folder
        else None
    )
    card = {} if config is None or CARD not in config.names else front_matter(config.read(CARD))
    licence = card.get("license")
    return ModelFiles(
        folder,
        beside,
        tokenizer_folder.url if tokenizer_folder is not None else "",
        tuple(findings),
        _base_model(config, card.get("base_model")),
        licence if isinstance(licence, str) else "",
    )


def _base_model(config: HubFolder | None, named: object) -> str:
    """Return the base model's name on the hub: from the config, else from a model card."""
    form = (config.json(CONFIG) if config is not None else None) or {}
    for name in (form.get("_name_or_path"), *(named if isinstance(named, list) else [named])):
        if _is_hub_name(name):
            return str(name)
    return ""


def _is_hub_name(name: object) -> bool:
    return isinstance(name, str) and name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def _option_folder(url: str | None, option: str) -> HubFolder | None:
    return None if url is None or url == NONE else read_named(option, url)


def _require_object(config: HubFolder, url: str) -> None:
    if CONFIG in config.too_large:
        nbytes, _ = config.too_large[CONFIG]
        raise UsageError(
            f"cannot read --config {url}: config.json has {show_size(nbytes)} (limit {show_size(MAX_FILE)})",
            hint="try the folder of the model that was trained",
        )
    if CONFIG not in config.names:
        raise UsageError(
            f"cannot read --config {url}: it has no config.json",
            hint="try the folder that has it, or the file",
        )
    if config.json(CONFIG) is None:
        raise UsageError(
            f"cannot read --config {url}: it is not a JSON object",
            hint="try the folder that has config.json, or that file",
        )


def _found_finding(label: str, folder: HubFolder) -> Finding:
    return finding("found-files", "files", f"{label} is taken from {folder.url}, which no option names")


def _too_large(folder: HubFolder, roles: Collection[str]) -> Iterator[Finding]:
    """Name the files that are left out because of their size; a tokenizer's own files are an error."""
    for name, (nbytes, role) in sorted(folder.too_large.items()):
        if role in roles and role != OTHER:
            size = f"{show_size(nbytes)} (limit {show_size(MAX_FILE)})"
            message = f"{name} of {folder.url} is left out: it has {size}"
            yield finding("left-beside", "files", message, hint="copy it beside the export if it matters")


class _Places:
    """The folders to search, place by place, nearest first; each is listed once."""

    def __init__(self, request: Request, manifest: Manifest) -> None:
        self._unlisted = _places_outwards(request, manifest)
        self._listed: list[list[HubFolder]] = []

    def nearest_first(self) -> Iterator[list[HubFolder]]:
        """Yield all of them, without listing one twice."""
        yield from self._listed
        for place in self._unlisted:
            self._listed.append(place)
            yield place


def _nearest(kind: str, places: Iterable[list[HubFolder]]) -> HubFolder | None:
    is_one, role = _IS[kind]
    for place in places:
        candidates = [folder for folder in place if is_one(folder)]
        # In one place only equal files are one answer; farther places are not asked, even to break a tie.
        if len(candidates) > 1 and not agree(candidates, role):
            urls = ", ".join(folder.url for folder in candidates[:8])
            raise AmbiguousModel(
                f"cannot choose the model's {kind}: several match (got {urls})",
                hint=f"try --{kind.split()[-1]} {candidates[0].url}, or --{kind.split()[-1]} {NONE}",
                candidates=[folder.url for folder in candidates],
            )
        if candidates:
            return candidates[0]
    return None


def _places_outwards(request: Request, manifest: Manifest) -> Iterator[list[HubFolder]]:
    root, source = manifest.root, request.source
    paths = placed(manifest)
    # An average has the config of its last input.
    if is_average(root):
        root, paths = split_average(root)[0][-1], [path for path in paths if is_of_last(path)]
    alone = manifest.origin.get("file") is not None
    listed = identify(root).family != "http"  # a page is no folder: it may list nothing, or anything
    if alone:  # its folder has other files, too
        yield _folders_beside(root, request) if listed else []
        return
    files, top = paths, _absolute(source)
    common = posixpath.commonpath([posixpath.dirname(path) for path in files]) if files else ""
    above = _absolute(join_url(root, common) if common else root)
    yield _folders_in(above, request)
    # Up to what the user named, and not beyond: folders above belong to others.
    while above.startswith(f"{top}/"):
        above = split_url(above)[0]
        yield _folders_in(above, request)
    parent, name = split_url(top)
    if name and parent != top and listed and not parent.endswith("://"):
        try:
            yield _folders_beside(parent, request)
        except SourceUnreadable:  # not named by the user: no evidence
            return


def _absolute(url: str) -> str:
    if is_average(url):
        # The config and the tokenizer of an average are the last input's.
        return _absolute(split_average(url)[0][-1])
    roots, inner = split_merged(url)
    if roots:
        top = merged_url(map(_absolute, roots))
        return f"{top}/{inner}" if inner else top
    path = local_path(url)
    return url.rstrip("/") if path is None else str(path.absolute())


def _folders_in(root: str, request: Request) -> list[HubFolder]:
    listing = folder_at(root)
    # Of a folder with thousands of subfolders, only those with a trainer's name are looked at.
    few = listing.folders if len(listing.folders) <= _MAX_FOLDERS else ()
    nested = [name for name in _KNOWN if "/" in name and name.split("/")[0] in listing.folders]
    trainer_folders = [name for name in _KNOWN if name in listing.folders] + nested
    return _apart(root, listing, [*trainer_folders, *(n for n in few if n not in trainer_folders)], request)


def _folders_beside(root: str, request: Request) -> list[HubFolder]:
    listing = folder_at(root)
    return _apart(root, listing, [name for name in _KNOWN if name.split("/")[0] in listing.folders], request)


def _apart(root: str, listing: Folder, names: Iterable[str], request: Request) -> list[HubFolder]:
    """Look into a folder and some below it, without the output of an earlier run and code of no config."""
    folders = [
        look(root, inside=root, listing=listing),
        *(look(join_url(root, name), inside=root) for name in names),
    ]
    target = identify(request.destination)
    usable = [f for f in folders if f.names or f.too_large]
    # An earlier output would pass for the source's own config.
    usable = [f for f in usable if relation(identify(f.url), target) not in (Relation.SAME, Relation.INSIDE)]
    return [f.without_code() for f in usable]


def files_left_out(manifest: Manifest, carried: Collection[str]) -> Iterator[Finding]:
    """Yield a finding about all files of a source that are neither read nor carried.

    Args:
        manifest: The source.
        carried: URLs of the files that are carried, as `ModelFiles.urls`.
    """
    root = _absolute(manifest.root)
    paths = [file.path for file in manifest.beside if join_url(root, file.path) not in carried]
    if not paths:
        return
    # What is of no training matters most to those who miss it.
    paths.sort(key=lambda path: (is_of_training(path), natural(path)))
    names = f"{count(len(paths), 'file')} of {manifest.root} ({listed(paths, _MAX_LISTED)})"
    yield finding("left-out", "files", f"left out, neither read nor carried: {names}")


def unopened(request: Request, beside: ModelFiles, names: Collection[str]) -> Iterator[Finding]:
    """Yield findings for what keeps transformers from opening an output that has these names of tensors."""
    if request.single is None:
        is_reported = any(f.code == "not-loadable" for f in beside.findings)
        if beside.config is None and beside.adapter is None and not is_reported:
            note, advice = note_of_wrapper(names)
            message = f"no config.json was named or found: transformers will not open the output{note}"
            hint = f"name the model's with --config DIR or FILE, add {advice}, and export again"
            yield finding("not-loadable", "files", message, hint=hint if advice else None)
        return
    options = {"--config": request.config, "--tokenizer": request.tokenizer}
    named = [f"{option} {value}" for option, value in options.items() if value not in (None, NONE)]
    if named:
        message = f"{request.destination} is one file: nothing of {' and '.join(named)} is written beside it"
        yield finding("left-beside", "files", message)
