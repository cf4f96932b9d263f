"""A job that makes and opens folders with the transformers that it runs under.

Run as a program it takes one JSON command a line and answers with one: ``{"make": family, "hub": folder,
"live": folder}``, ``{"compare": [right, made], "base": folder or null}`` or ``{"open": folder}``. The same
functions are called by tests in their own process, under the transformers that is pinned.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from families import model_class

UNOPENED = "the right folder does not open"
NO_CLASS = "has no such class"
NOT_BUILT = "does not open it"


def make(family: str, hub: Path, live: Path) -> str:
    """What `save_pretrained` and DCP make of a family's tiny model; why not, or ""."""
    import torch.distributed.checkpoint as dcp
    from trainer_names import tiny_model

    try:
        model = tiny_model(family)
    except KeyError as error:
        return f"no model type {error}"
    model.save_pretrained(hub)
    state = {n: t for n, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    dcp.save({"model": state}, checkpoint_id=live, no_dist=True)
    return ""


def compare(right: Path, made: Path, base: Path | None = None) -> str:
    """How the logits of two folders differ, "" when they are equal bit for bit; both opened here.

    base: of adapters, the model that they are put on. `UNOPENED` and why where the right one does not open.
    """
    logits = []
    for folder in (right, made):
        try:
            opened = _opened(folder, base)
        except Exception as error:  # of a third party's loader: it says what is wrong with the folder
            opened = f"{type(error).__name__}: {error}"
        if isinstance(opened, str):
            return f"{UNOPENED if folder is right else 'do not open'}: {opened}"
        torch.manual_seed(0)
        with torch.no_grad():
            logits.append(opened(input_ids=torch.arange(24).reshape(3, 8)).logits)
    one, two = logits
    if not one.isfinite().all() or not one.std() > 0.1:
        return "the right logits say nothing"
    if one.shape != two.shape:
        return f"shapes are {tuple(one.shape)} and {tuple(two.shape)}"
    return "" if torch.equal(one, two) else f"differ by up to {(one - two).abs().max()}"


def version() -> str:
    """The version of transformers."""
    import transformers

    return str(transformers.__version__)


def opens(folder: Path) -> str:
    """How many keys the class of a folder lacks, has too many or in another shape, "" for none."""
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    if not hasattr(library, name):
        return NO_CLASS
    try:
        _, report = getattr(library, name).from_pretrained(
            folder, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # of a third party's loader
        return f"{NOT_BUILT}: {type(error).__name__}"
    counts = {kind: len(report.get(f"{kind}_keys", ())) for kind in ("missing", "unexpected", "mismatched")}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def _opened(folder: Path, base: Path | None) -> Any:
    """The model, or what transformers would start at random or leave out."""
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    config = library.AutoConfig.from_pretrained(base or folder, local_files_only=True)
    model, report = model_class(config).from_pretrained(
        base or folder, dtype="auto", output_loading_info=True, local_files_only=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report.get(kind):
            return f"{kind}: {sorted(map(str, report[kind]))[:4]}"
    if base is not None:
        import peft

        adapter: Any = peft.PeftModel
        model = adapter.from_pretrained(model, folder)
    return model.eval()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "make" in asked:
                answer = make(asked["make"], Path(asked["hub"]), Path(asked["live"]))
            elif "version" in asked:
                answer = version()
            elif "open" in asked:
                answer = opens(Path(asked["open"]))
            else:
                base = asked.get("base")
                right, made = map(Path, asked["compare"])
                answer = compare(right, made, Path(base) if base else None)
        except Exception as error:  # the test that asked shows it
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
