"""Define findings: plain values, bytes that are none, parts of series, what is left out, unused options.

`ckptcore.errors` adds its own, and is as long as a file may be.
"""

from __future__ import annotations

# code: (severity, meaning, default next step)
VALUE_FINDINGS: dict[str, tuple[str, str, str]] = {
    "restated-value": (
        "warning",
        "a value is written in a plain form of the same content, because the output names no class for it",
        "write a format that keeps it, such as dcp or safetensors",
    ),
    "needs-classes": (
        "info",
        "a value keeps its class, so that torch.load opens the output with weights_only=False only",
        "open it with weights_only=False, or leave the value out with --exclude",
    ),
    "unused-rule": (
        "warning",
        "a --sharding rule applies to no parameter",
        "check its globs and its place among the rules; keep it if it is for other models",
    ),
    "lost-content": (
        "warning",
        "contents that were deleted in favour of a copy are in no recorded checkpoint any more",
        "record the copy where it is now (`ckptcore fingerprint COPY`), or restore it from a backup",
    ),
    "unused-bytes": (
        "warning",
        "bytes of a file belong to no tensor, object or structure of its format; they are left out",
        "find out what wrote them before the file is deleted; nothing else depends on them",
    ),
    "odd-value": (
        "warning",
        "a key of a metadata file has a value of another type than its writer gives; it is an object",
        "compare the file with another copy of the checkpoint",
    ),
    "not-finite": ("warning", "a tensor holds NaN or Inf", "check the training run"),
    "dropped-keys": ("warning", "keys of the source are left out", "use --keep-object, or do not load them"),
    "left-out": (
        "info",
        "an export has the model only: training state and other values of its source are left out",
        "keep the source, or write everything with consolidate or reshard",
    ),
    "left-out-weights": (
        "warning",
        "an export leaves out tensors that are no training state: averages of weights, or of no known kind",
        "export them with --model-prefix, or leave them out by name with --exclude",
    ),
    "kept-quantized": (
        "warning",
        "a cast leaves quantised values and their scales as they are stored: alone they mean nothing",
        "for other dtypes, dequantise them first, with what made them; `--dtype-for` casts scales",
    ),
    "catalog-row": (
        "error",
        "a row of the catalog holds a value that its column should not have; it is left empty",
        "record it anew: ckptcore catalog rebuild PLACE",
    ),
    "unread-state": (
        "warning",
        "training state beside the weights is not read with them",
        "name its file to read it",
    ),
    "unproven-parts": (
        "error",
        "nothing states how many parts there are, so a missing last part could not be seen",
        "add what states it, or accept what is there with --allow-incomplete",
    ),
    "unproven-whole": (
        "warning",
        "files are read as the complete save, as their writer makes it; nothing in them proves that",
        "compare the shapes with the model's, or export it with --config",
    ),
    "files-differ": (
        "error",
        "two folders of one source have a file of one name with different bytes",
        "name the folders of one save, or move the file that does not belong to it away",
    ),
    "unused-option": (
        "warning",
        "a glob or rename of a command matches no tensor",
        "check its spelling: `ckptcore inspect SRC` lists the names",
    ),
}
