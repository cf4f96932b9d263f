"""Read the small files beside the weights of a Hugging Face folder, by their role.

`FILES` lists the files of a model folder by name. Other small text files at its top, such as vocabularies of
other libraries, have the role `OTHER`, unless `_TRAINING` names them: weights, states and logs of a trainer.
So do all files of the modules that sentence-transformers keeps in folders of their own, beside
``modules.json``. What has neither role is named to the user. Custom code is carried as bytes, and never
imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ckptcore.errors import SourceUnreadable, UsageError
from ckptcore.store import hub_hint, join_url, local_path, open_store, split_url
from ckptcore.store.listing import Folder, folder_at
from ckptcore.utils.foreign_text import InvalidText, load_json_object
from ckptcore.utils.plain_yaml import load_yaml
from ckptcore.utils.units import show_size

NONE = "none"  # as --config or --tokenizer: take none, not even one in the source
CONFIG, ADAPTER, CARD = "config.json", "adapter_config.json", "README.md"
INDEX = "model.safetensors.index.json"  # of a model in several files
MODEL, TOKENIZER, LEGAL, PEFT, OTHER = "model", "tokenizer", "legal", "peft", "other"
# Role -> names of files, as globs. A slash is a folder of its own; no other folder is searched.
FILES: Mapping[str, tuple[str, ...]] = {
    MODEL: (CONFIG, "generation_config.json", "*.py"),
    PEFT: (ADAPTER,),
    TOKENIZER: (
        "tokenizer*",
        "tekken.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.*",
        "merges.txt",
        "*.model",
        "*.tiktoken",
        "chat_template*",
        "additional_chat_templates/*.jinja",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    ),
    LEGAL: ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*"),
}
# A folder with one of these holds a tokenizer.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt")  # of a tokenizer that has no file of its own
# Small files of any library: vocabularies, merges, settings.
_TEXTS = (".json", ".model", ".spm", ".codes", ".bpe", ".vocab", ".dict", ".jinja", ".tiktoken")
# What a folder of a training run has beside the model: weights and their indexes, states, settings and logs.
_TRAINING = re.compile(
    r"(?i)^(?:.*\.(?:safetensors|bin|pt|pth|ckpt|pkl|distcp|gguf|h5|msgpack|onnx|np[yz]|zip|tar|gz|log|lock|tmp)"
    r"|.*\.index(?:\.[^.]+)?\.json|events\.out\..*|\..*|.*\.py|.*\.(?:sh|md|ipynb)"
    r"|(?:trainer_state|training_args|scheduler|optimizer|optim|rng_state|random_states|latest|global_step"
    r"|deepspeed|ds_config|accelerate_config|fsdp_config|metadata|wandb)\b.*"
    r"|(?:all|train|eval|test)_results\.json|(?:.*[_.-])?(?:logs?|loss|metrics|history|nohup)(?:[_.-].*)?)$"
)
# Settings of other forms of the weights, which loaders would apply to those that are written.
_OTHER_FORMS = re.compile(r"(?i)^(?:params\.json|.*quant.*config.*\.json)$")
_MODULES = "modules.json"  # of sentence-transformers (sentence_transformers/SentenceTransformer.py)
_MODULE = re.compile(r"^\d{1,3}_\w+$")
_MAX_TEXT = 8 << 20  # bytes of a file of the role `OTHER`
_MAX_LISTED = 8  # files that are left out by name
MAX_FILE = 64 << 20  # bytes of a file that is carried
_MAX_TOTAL = 128 << 20  # they are in memory until they are written
_MAX_FILES = 500
_FOLDERS = tuple({p.split("/")[0] for ps in FILES.values() for p in ps if "/" in p})


@dataclass(frozen=True)
class HubFolder:
    """The small files of a folder.

    Attributes:
        url: URL of the folder.
        names: Path in it -> (bytes, role).
        too_large: The same for files above the size limit.
        left_out: Files of no role, that are neither weights nor a trainer's own.
    """

    url: str
    names: Mapping[str, tuple[int, str]]
    too_large: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    _content: dict[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def has_config(self) -> bool:
        """Return whether it has a model's config.json, of transformers or diffusers."""
        form = self.json(CONFIG)
        return form is not None and (isinstance(form.get("model_type"), str) or is_of_diffusers(form))

    def has_adapter(self) -> bool:
        """Return whether it has an adapter's config: a JSON object with a ``peft_type``."""
        return "peft_type" in (self.json(ADAPTER) or {})

    def has_tokenizer(self) -> bool:
        """Return whether it has a tokenizer, also one above the size limit."""
        names = (*self.names, *self.too_large)
        return any(_is_any(name, _TOKENIZERS) for name in names)

    def read(self, name: str) -> bytes:
        """Read one of its files; raise `SourceUnreadable`, `StorageTrouble`."""
        if name not in self._content:
            self._content[name] = _file_bytes(join_url(self.url, name), self.names[name][0])
        return self._content[name]

    def of(self, *roles: str) -> dict[str, bytes]:
        """Read its files of these roles, name -> bytes.

        Raises:
            UsageError: They are too large together, or a tokenizer's file is above the limit. Without that
                file, another tokenizer could load.
        """
        for name, (nbytes, role) in sorted(self.too_large.items()):
            if role in roles and _is_any(name, (*_TOKENIZERS, *_VOCABULARIES)):
                raise UsageError(
                    f"cannot take the tokenizer from {self.url}: {name} has {show_size(nbytes)} "
                    f"(limit {show_size(MAX_FILE)})",
                    hint=f"try --tokenizer FOLDER with another one, or --tokenizer {NONE}",
                )
        total = sum(nbytes for nbytes, role in self.names.values() if role in roles)
        if total > _MAX_TOTAL:
            raise UsageError(
                f"cannot take config and tokenizer from {self.url}: its files have {show_size(total)} "
                f"together (limit {show_size(_MAX_TOTAL)})",
                hint="try a folder with fewer files",
            )
        return {name: self.read(name) for name, (_, role) in sorted(self.names.items()) if role in roles}

    def json(self, name: str) -> dict[str, Any] | None:
        """Read a file as a JSON object; None if it is missing, or no JSON object."""
        if name not in self.names:
            return None
        return json_object(self.read(name))

    def without_code(self) -> HubFolder:
        """Return the folder without Python files, unless one of its configs uses them."""
        asks = any("auto_map" in (self.json(n) or {}) for n in self.names if n.endswith("config.json"))
        names = self.names if asks else {n: v for n, v in self.names.items() if not n.endswith(".py")}
        return HubFolder(self.url, names, self.too_large, self.left_out, self._content)

    def without_others(self) -> HubFolder:
        """Return the folder without files of the role `OTHER`, where all together are too large to carry."""
        if sum(nbytes for nbytes, _ in self.names.values()) <= _MAX_TOTAL:
            return self
        names = {n: v for n, v in self.names.items() if v[1] != OTHER}
        left_out = (*self.left_out, *(n for n in self.names if n not in names))
        return HubFolder(self.url, names, self.too_large, left_out, self._content)


def is_of_diffusers(form: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of a diffusers model: it names a class, and no type of transformers."""
    return isinstance(form.get("_class_name"), str) and "model_type" not in form


def json_object(data: bytes) -> dict[str, Any] | None:
    """Return the JSON object in these bytes, or None; as transformers does, in UTF-8 without a BOM.

    >>> json_object(b'{"a": 1}'), json_object('{"a": 1}'.encode("utf-16")), json_object(b"[]")
    ({'a': 1}, None, None)
    """
    try:
        return load_json_object(data)
    except InvalidText:
        return None


def look(url: str, *, inside: str | None = None, listing: Folder | None = None) -> HubFolder:
    """List the small files at the top of a folder; none if there is no such folder.

    Args:
        url: The folder.
        inside: Ignore links to files outside of this local folder; None to follow all.
        listing: The listing of the folder, or None to list it.

    Raises:
        StorageTrouble: The storage failed.
        UsageError: The URL cannot be used.
    """
    folder = folder_at(url) if listing is None else listing
    sizes = {**folder.files, **_files_below(url, [name for name in _FOLDERS if name in folder.folders])}
    # All files of the modules of sentence-transformers, weights among them.
    modules = _files_below(url, filter(_MODULE.match, folder.folders)) if _MODULES in folder.files else {}
    names: dict[str, tuple[int, str]] = {}
    too_large: dict[str, tuple[int, str]] = {}
    left_out: list[str] = []
    for name, nbytes in {**sizes, **modules}.items():
        role = _role(name) or (OTHER if name in modules or _is_other(name) else None)
        if role is None:
            left_out += [] if _TRAINING.match(name) or "/" in name else [name]
        elif inside is None or _stays(join_url(url, name), inside):
            most = _MAX_TEXT if role == OTHER and name not in modules else MAX_FILE
            (names if nbytes <= most else too_large)[name] = nbytes, role
    if len(names) > _MAX_FILES:
        names = {n: v for n, v in names.items() if not n.endswith(".py")}
    # The card is read for its licence and base model alone, and never copied.
    if CARD in sizes and sizes[CARD] <= MAX_FILE and (inside is None or _stays(join_url(url, CARD), inside)):
        names[CARD] = sizes[CARD], ""
    return HubFolder(url, names, too_large, tuple(left_out)).without_others()


def _files_below(url: str, folders: Iterable[str]) -> dict[str, int]:
    """Return the files of some folders in a folder: path in that -> bytes."""
    inside = {name: folder_at(join_url(url, name)).files for name in folders}
    return {f"{name}/{inner}": nbytes for name, files in inside.items() for inner, nbytes in files.items()}


def read_named(option: str, url: str, name: str = CONFIG) -> HubFolder:
    """List the folder that an option names, or one file, which counts as ``name``.

    Args:
        option: The option, for errors.
        url: Its value.
        name: Name of a single file.

    Raises:
        UsageError: There is nothing.
    """
    if url.endswith(f"/{name}") or url == name:
        url = split_url(url)[0]
    elif (nbytes := _file_size(url)) is not None:
        if nbytes > MAX_FILE:
            raise UsageError(
                f"cannot read {option} {url}: it has {show_size(nbytes)} (limit {show_size(MAX_FILE)})",
                hint="try a JSON file",
            )
        return HubFolder(url, {name: (nbytes, MODEL)}, _content={name: _file_bytes(url, nbytes)})
    folder = folder_at(url)
    if not folder.files and not folder.folders:
        raise UsageError(
            f"cannot read {option} {url}: it does not exist, or is empty",
            hint=hub_hint(url) or "try a folder or a file",
        )
    return look(url, listing=folder)


def front_matter(card: bytes) -> dict[str, Any]:
    r"""Return the YAML at the head of a README, {} if there is none.

    >>> front_matter(b"---\nlicense: mit\n---\n# x")
    {'license': 'mit'}
    """
    header = re.match(r"---\r?\n(.{0,65536}?)\r?\n---\s", card.decode(errors="replace"), re.DOTALL)
    if header is None:
        return {}
    try:
        form = load_yaml(header[1])
    except InvalidText:  # only licence and base model are used
        return {}
    return form if isinstance(form, dict) else {}


def agree(folders: Sequence[HubFolder], role: str) -> bool:
    """Return whether folders have the same config, or tokenizer: files of one name are equal."""
    names = [{n for n, (_, r) in f.names.items() if r == role} for f in folders]
    common = set.intersection(*names)
    if not any(_is_any(name, (CONFIG, ADAPTER, *_TOKENIZERS)) for name in common):
        return len(folders) == 1
    first = folders[0]
    pairs = [(f, n) for f in folders[1:] for n in common]
    return all(f.names[n] == first.names[n] and f.read(n) == first.read(n) for f, n in pairs)


def _is_any(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _role(name: str) -> str | None:
    for role, globs in FILES.items():
        for glob in globs:
            if name.count("/") == glob.count("/") and fnmatchcase(name, glob):
                return role
    return None


def _is_other(name: str) -> bool:
    r"""Return whether a file at the top of a folder is a small text of the model's, by its name.

    >>> [n for n in ("source.spm", "bpe.codes", "trainer_state.json", "loss.txt") if _is_other(n)]
    ['source.spm', 'bpe.codes']
    """
    if "/" in name or _TRAINING.match(name) or _OTHER_FORMS.match(name):
        return False
    return name.endswith(_TEXTS)


def is_of_training(path: str) -> bool:
    """Return whether a file's name, or a folder's above it, is of a trainer's states and logs, or of weights.

    >>> is_of_training("onnx/model.onnx"), is_of_training("logs/a.csv"), is_of_training("eval/a.csv")
    (True, True, False)
    """
    return any(map(_TRAINING.match, path.split("/")))


def left_out(folder: HubFolder) -> str:
    """Return the names of files that are left out, for people; "" for none."""
    names = [
        *sorted(folder.left_out),
        *sorted(n for n, (_, role) in folder.too_large.items() if role == OTHER),
    ]
    rest = f" and {len(names) - _MAX_LISTED} more" if names[_MAX_LISTED:] else ""
    return ", ".join(names[:_MAX_LISTED]) + rest


def _file_size(url: str) -> int | None:
    """Return bytes of a file; None if there is no file."""
    path = local_path(url)
    if path is not None:
        try:
            return os.stat(path).st_size if os.path.isfile(path) else None
        except OSError as error:
            raise SourceUnreadable(f"cannot open {url}: {error.strerror}") from error
    parent, name = split_url(url)
    if "." not in name:  # as `open_source` does: object stores have no folders
        return None
    with closing(open_store(parent)) as store:
        return store.size(name)


def _file_bytes(url: str, nbytes: int) -> bytes:
    """Read an entire file. Links are followed: a folder of the hub's cache consists of them."""
    path = local_path(url)
    if path is not None:
        url = os.path.realpath(path)
    parent, name = split_url(url)
    with closing(open_store(parent)) as store:
        return store.read(name, 0, nbytes)


def _stays(url: str, inside: str) -> bool:
    """Return whether a file is below a folder, links followed; true on object stores, without links."""
    path, root = local_path(url), local_path(inside)
    if path is None or root is None:
        return True
    return os.path.realpath(path).startswith(os.path.join(os.path.realpath(root), ""))
