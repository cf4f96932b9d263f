"""Read the configs that trainers leave in a checkpoint: evidence of the architecture and its numbers.

Every export looks for them, so this waits for nothing that only those who map names need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from ckptcore.core.manifest import Manifest
from ckptcore.errors import CkptError
from ckptcore.naming.maps.numbers import Config
from ckptcore.naming.worlds import HUB
from ckptcore.store import open_store

# Configs that trainers leave in a checkpoint's folder, and the world whose spelling they have; None: that is
# found by what they hold.
_BESIDE = (
    ("config.json", None),
    ("config.yaml", None),
    ("huggingface/config.json", HUB),
    ("run_config.yaml", "megatron"),
)
_MOST = 4 << 20  # bytes of a config


def stored_configs(source: Manifest, world: str) -> Iterator[Config]:
    """The configs that a checkpoint has: its training's arguments, and files that trainers leave."""
    args = next((b for b in source.blobs if b.key == "args" and b.known), None)
    if args is not None and isinstance(args.tree, dict) and isinstance(args.tree.get("value"), dict):
        yield Config("the checkpoint's args", "megatron", args.tree["value"])
    with closing(open_store(source.root)) as store:
        for path, spelled in _BESIDE:
            try:
                size = store.size(path)
                data = store.read(path, 0, size) if size is not None and size <= _MOST else None
            except CkptError:  # a folder, or nothing that may be read: no evidence
                continue
            content = None if data is None else _parsed(path, data)
            if content is None:
                continue
            kind = spelled or (HUB if isinstance(content.get("model_type"), str) else world)
            yield Config(path, kind, content)


def _parsed(path: str, data: bytes) -> Mapping[str, Any] | None:
    """A config's content; None for what is no mapping."""
    try:
        if path.endswith(".json"):
            content = json.loads(data)
        else:
            import yaml

            content = yaml.load(data, _plain_loader())
    except (ValueError, RecursionError):
        return None
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            return None
        raise
    return content if isinstance(content, dict) else None


def _plain_loader() -> Any:
    """A YAML loader of plain values, for which objects of other programs are nothing."""
    import yaml

    class Plain(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Plain.add_multi_constructor("", lambda loader, suffix, node: None)
    return Plain
