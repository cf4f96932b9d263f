"""Export a source of several models, such as a pipeline of diffusers, as one folder of the same kind again.

Each model keeps its names, and its names and shapes are compared with the class of its own config.json. The
small files of its folder, of folders without weights (schedulers, tokenizers, processors) and of the top are
carried by the rules of `ckptcore.planning.hub_files`. Python files of a component are carried as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptcore.core.manifest import Manifest
from ckptcore.errors import AmbiguousModel, Finding, NameMismatch, UsageError, finding
from ckptcore.formats import by_name
from ckptcore.formats.base import Layout
from ckptcore.naming.rename import Dropped, Mapped
from ckptcore.naming.worlds import HUB
from ckptcore.planning.casts import half_dtype, loaded_as
from ckptcore.planning.config_folder import ConfigFolder, Expected, check_names
from ckptcore.planning.hub_files import LEGAL, MODEL, NONE, OTHER, TOKENIZER, left_out, look
from ckptcore.planning.model_files import urls_of_files
from ckptcore.planning.request import STORED, Request
from ckptcore.store import join_url

_STEMS = {True: "diffusion_pytorch_model", False: "model"}  # whether diffusers opens it -> of its files
_OF_ONE_MODEL = ("config", "include", "exclude", "rename", "tie")  # options
_CHECKED = ("diffusers", "transformers")  # libraries whose classes are compared
_INDEX = "model_index"  # the object, and the file, that lists the components


@dataclass(frozen=True)
class SeveralModels:
    """What one folder of several models needs.

    Attributes:
        format: Name of the format, which is the source's.
        layout: Of its files.
        configs: Component -> the files of its folder, with config.json.
        files: Path -> bytes of all other small files.
        objects: Keys of the objects that the layout writes.
        findings: About names, and files that are left out.
        float32: Names of tensors that their classes keep in float32 in a cast to 16 bits.
    """

    format: str
    layout: Layout
    configs: Mapping[str, ConfigFolder]
    files: Mapping[str, bytes]
    objects: tuple[str, ...]
    findings: tuple[Finding, ...]
    float32: frozenset[str]

    def urls(self, root: str) -> frozenset[str]:
        """Return the URLs of the files of a source at ``root`` that are written again."""
        of_configs = [(config.url, name) for config in self.configs.values() for name in config.content]
        return urls_of_files([*of_configs, *((root, path) for path in self.files)])

    def extra(self, request: Request, mapped: Mapped, written: Mapping[str, str]) -> dict[str, bytes]:
        """Return path -> bytes of all small files. written: name -> dtype of the tensors that are cast."""
        files = dict(self.files)
        for name, config in self.configs.items():
            specs = [t for t in mapped.manifest.tensors if t.fqn.startswith(f"{name}.")]
            content = config.files(loaded_as(request.dtype, specs, written)) if specs else config.content
            files |= {f"{name}/{path}": data for path, data in content.items()}
        return files

    def dropped(self, manifest: Manifest) -> list[Dropped]:
        """Return the objects that the folder has no place for."""
        keys = (blob.key for blob in manifest.blobs)
        return [Dropped(key, "an export holds the models only") for key in keys if key not in self.objects]


def several_models(request: Request, manifest: Manifest) -> SeveralModels | None:
    """Return what an export of a source with several models needs; None where it is of one model.

    Raises:
        AmbiguousModel: Options are about one model, and the source has several.
        NameMismatch: The names or shapes of one do not fit its config.
        StorageTrouble, UsageError: As `look` and `check_names`.
    """
    models = manifest.origin.get("models")
    if models is None or request.model_prefix is not None:
        return None
    reader = by_name(manifest.format).reader
    write = None if reader is None else reader.several
    odd = [name for name in _OF_ONE_MODEL if getattr(request, name)]
    odd += ["tokenizer"] if request.tokenizer not in (None, NONE) else []
    odd += ["arch"] if request.arch != "auto" else []
    # Each model keeps its names, and the card of such an export says that they are the stored ones.
    is_folder = request.verb == "export" and request.names in (HUB, STORED) and request.single is None
    if write is None or odd or not is_folder or request.to not in ("", "safetensors"):
        if len(models) < 2:
            return None
        by = f"--{odd[0].replace('_', '-')} is" if odd else "this output is"
        raise AmbiguousModel(
            f"cannot choose the model of {request.source}: {by} of one model, and it has a folder for each "
            f"of several (got {', '.join(models)})",
            hint=f"export each from its own folder, such as {join_url(request.source, models[0])}",
            candidates=[f"{name}." for name in models],
        )
    configs, files, findings = _small_files(manifest)
    expected = expected_of(manifest, configs)
    half = half_dtype(request.dtype)
    return SeveralModels(
        manifest.format,
        write({name: _STEMS[_of_diffusers(manifest, name, configs)] for name in models}),
        configs,
        files,
        (_INDEX,),
        (*findings, *expected.warnings),
        frozenset((expected.float32 or {}).get(half, ())),
    )


def expected_of(manifest: Manifest, configs: Mapping[str, ConfigFolder] | None = None) -> Expected:
    """Compare each model of a source with its own config, and return what they expect, under all names.

    Args:
        manifest: The source.
        configs: Component -> its folder; None to look for them.

    Raises:
        NameMismatch: Names or shapes of one do not fit.
        UsageError: There is no model of its config.
    """
    if configs is None:
        configs, _, _ = _small_files(manifest)
    warnings: list[Finding] = []
    float32: dict[str, list[str]] = {}
    for name in manifest.origin["models"]:
        is_known = manifest.origin["components"][name] in _CHECKED
        expected = _expected(name, configs.get(name) if is_known else None, manifest)
        warnings += expected.warnings
        for dtype, names in (expected.float32 or {}).items():
            float32.setdefault(dtype, []).extend(f"{name}.{inner}" for inner in names)
    return Expected((), tuple(warnings), float32=float32)


def _small_files(manifest: Manifest) -> tuple[dict[str, ConfigFolder], dict[str, bytes], list[Finding]]:
    """Return component -> its folder with config.json, path -> bytes of all others, and findings."""
    root = manifest.root
    folders = {"": look(root, inside=root)}
    folders |= {name: look(join_url(root, name), inside=root) for name in manifest.origin["components"]}
    configs: dict[str, ConfigFolder] = {}
    files: dict[str, bytes] = {}
    findings = [
        finding("left-beside", "files", f"files of {folder.url} are left out: {names}")
        for folder in folders.values()
        if (names := left_out(folder))
    ]
    for name, folder in folders.items():
        content = folder.of(MODEL, TOKENIZER, LEGAL, OTHER)
        if name and folder.has_config():
            configs[name] = ConfigFolder(folder.url, content)
        else:
            files |= {f"{name}/{path}" if name else path: data for path, data in content.items()}
    files.pop(f"{_INDEX}.json", None)  # the layout writes it
    return configs, files, findings


def _of_diffusers(manifest: Manifest, name: str, configs: Mapping[str, ConfigFolder]) -> bool:
    """Return whether diffusers opens a model, and finds its files by the stem that it gives them."""
    config = configs.get(name)
    return manifest.origin["components"][name] == "diffusers" if config is None else config.of_diffusers


def _expected(name: str, config: ConfigFolder | None, manifest: Manifest) -> Expected:
    """Compare one model with its config; a tensor of another name is the loader's to find, and a warning."""
    if config is None:
        message = f"names and shapes of {name} were not checked: its library or its config.json is unknown"
        return Expected((), (finding("names-unchecked", "coverage", message),))
    prefix = f"{name}."
    shapes = {t.fqn.removeprefix(prefix): t.shape for t in manifest.tensors if t.fqn.startswith(prefix)}
    try:
        expected = check_names(config, shapes)
    except (NameMismatch, UsageError) as error:
        hint = f"export the others from their own folders, and look at {config.url}"
        raise type(error)(f"{name}: {error.message}", hint=hint, **error.values) from error
    of_name = (
        replace(f, message=f"{name}: {f.message}") for f in (*expected.warnings, *expected.kept_names())
    )
    return replace(expected, warnings=tuple(of_name))
