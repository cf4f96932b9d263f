"""The demo: train, convert and open a small model, from nothing.

``make demo`` trains a small Llama under FSDP2 in four processes, converts its checkpoint, and opens the
result with transformers: the logits must equal those of the model in memory, bit for bit. ``make demo
SRC=checkpoint DST=folder [CONFIG=folder]`` converts a checkpoint of your own.

Everything is in ``demo/``: the trained checkpoint, the exported model, the catalog (SQLite) and Prefect's
database. A second run trains again and replaces the model; catalog and runs are kept.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.tree import Tree

from ckptcore.store import local_path
from ckptcore.utils import terminal
from ckptcore.utils.units import show_size

HOME = Path("demo")
say = terminal.console()


def main(
    src: Annotated[str, typer.Option(help="A checkpoint of your own; default: train one.")] = "",
    dst: Annotated[str, typer.Option(help="The folder of the model.")] = "",
    config: Annotated[
        str, typer.Option(envvar="CONFIG", help="Folder with config.json and the tokenizer.")
    ] = "",
) -> None:
    """Train, convert, open the model, and show the catalog."""
    HOME.mkdir(exist_ok=True)
    os.environ["PREFECT_HOME"] = str((HOME / "prefect").resolve())
    os.environ.setdefault("CKPTCORE_CATALOG_URL", f"sqlite:///{(HOME / 'catalog.sqlite').resolve()}")
    job = HOME / "tiny-llama"
    if not src:
        step(1, "Train a small Llama: FSDP2, 4 gloo processes, AdamW, bf16")
        checkpoint = trained(job)
        source, target = str(checkpoint), dst or str(HOME / "tiny-llama-hf")
        options = ["--config", str(job / "config")]
    else:
        step(1, f"A checkpoint of your own: {src}")
        run("ckptcore", "inspect", src)
        source, target = src, dst or str(HOME / f"{src.rstrip('/').split('/')[-1]}-hf")
        options = ["--config", config] if config else []
    options += [] if dst else ["--overwrite"]  # only the demo's own folder may be replaced

    step(2, "Convert: read, check, plan, write, publish, register")
    run("flows.export", source, target, *options)

    if src:
        step(3, "Check the result, byte by byte")
        run("ckptcore", "validate", target, "--level", "bytes")
    else:
        step(3, "Open the result with transformers")
        compare(target, job / "reference.pt")

    step(4, "Show the catalog")
    run("ckptcore", "catalog", "list")
    run("ckptcore", "catalog", "lineage", target)

    step(5, "Show the files")
    show(target)


def step(number: int, title: str) -> None:
    """Print a numbered heading."""
    say.print()
    say.print(terminal.text((str(number), "bold cyan"), " ", (title, "bold")), soft_wrap=True)


def run(module: str, *arguments: str) -> None:
    """Print a command, run it, and exit with its code if it fails."""
    say.print(terminal.text(("$", "green"), f" python -m {module} {shlex.join(arguments)}"), soft_wrap=True)
    outcome = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    if outcome.returncode:
        raise typer.Exit(outcome.returncode)


def trained(job: Path) -> Path:
    """Run the training job in a fresh folder, and return the checkpoint that it saved."""
    from flows.demo_train import STEPS, train

    shutil.rmtree(job, ignore_errors=True)
    job.mkdir()
    with say.status("training"):
        train(job, lambda line: say.print(terminal.text("  ", (line, "dim")), soft_wrap=True))
    checkpoint = job / f"step-{STEPS}"
    show(str(checkpoint))
    return checkpoint


def compare(folder: str, reference: Path) -> None:
    """Open `folder` with transformers and compare its logits with the reference, bit for bit."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from flows.demo_train import logits

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ours, theirs = logits(model), torch.load(reference, weights_only=True)
    same = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    say.print(f"  {type(model).__name__}, {model.num_parameters():,} parameters, {model.dtype}")
    say.print(f"  logits {tuple(ours.shape)} of the trained model in memory and of the folder:")
    if not same:
        say.print(terminal.text(("  they differ", "bold red")))
        raise typer.Exit(1)
    say.print(terminal.text(("  equal, bit for bit", "bold green")))


def show(url: str) -> None:
    """Print the files of a folder with their sizes."""
    path = local_path(url)
    if path is None:
        say.print(terminal.text(f"  {url}"), soft_wrap=True)
        return
    tree = Tree(terminal.text((str(path), "bold")))
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        name = file.relative_to(path) if path.is_dir() else file
        tree.add(terminal.text(f"{name}  ", (show_size(file.stat().st_size), "dim")))
    say.print(tree, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
