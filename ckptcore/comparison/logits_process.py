"""Open folders with transformers, and compute and compare their logits, in a separate process.

The process (`ckptcore.planning.transformers_process`) receives the request
``{"folders": [path, ...], "dtype", "device", "seed", "batch", "length"}``. One process opens all folders, one
model at a time: logits of one model can differ in their last bits from process to process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptcore.planning.transformers_process import LOCAL, Answer, brief, quiet_transformers, serve


def answer(request: dict[str, Any]) -> Answer:
    """Compute the logits of each folder, and compare the first one's with the second's.

    Args:
        request: The request.

    Returns:
        ``folders``: for each ``{"class", "shape", "finite"}``, or ``{"refused": why}`` if transformers does
        not open it, or ``{"missing": [...], "mismatched": [...]}`` if it would initialise tensors at random.
        ``difference``: ``{"max_abs", "equal"}``, if two have logits of one shape. ``error``: why there is no
        result.
    """
    import torch

    library = quiet_transformers()
    out: Answer = {"transformers": library.__version__, "folders": []}
    configs: list[Any] = []
    for folder in request["folders"]:
        try:
            configs.append(library.AutoConfig.from_pretrained(folder, **LOCAL))
        except Exception as error:  # any failure of a third-party config class means that it does not open
            configs.append(None)
            out["folders"].append({"refused": brief(error)})
        else:
            out["folders"].append({})
    if None in configs:
        return out
    sizes = [_vocabulary(c) for c in configs]
    if None in sizes:
        at = sizes.index(None)
        return out | {"error": f"{request['folders'][at]} has no vocabulary: it is not a language model"}
    out["tokens"] = bound = min(n for n in sizes if n is not None)
    seeded = torch.Generator().manual_seed(request["seed"])
    ids = torch.randint(bound, (request["batch"], request["length"]), generator=seeded)
    found: list[Any] = []
    for place, folder in enumerate(request["folders"]):
        outcome, logits = _logits(library, torch, folder, configs[place], ids, request)
        out["folders"][place] |= outcome
        found.append(logits)
    if len(found) == 2 and all(f is not None for f in found) and found[0].shape == found[1].shape:
        one, two = found
        out["difference"] = {
            "max_abs": float((one.double() - two.double()).abs().max()),
            "equal": bool(torch.equal(one, two)),
        }
    return out


def _logits(
    library: Any, torch: Any, folder: str, config: Any, ids: Any, request: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return (outcome of a folder, its logits on the CPU or None)."""
    names = getattr(config, "architectures", None) or []
    cls = getattr(library, names[0], None) if names else None
    # Version 5 calls it dtype, earlier ones torch_dtype.
    kind = "dtype" if int(library.__version__.split(".")[0]) >= 5 else "torch_dtype"
    means = {kind: getattr(torch, request["dtype"]), "output_loading_info": True, **LOCAL}
    try:
        model, info = (cls or library.AutoModelForCausalLM).from_pretrained(folder, **means)
    except (ImportError, MemoryError):  # a library or memory is lacking: the folder may be correct
        raise
    except Exception as error:  # any failure of a third-party model class means that it does not open
        if isinstance(error, RuntimeError) and "allocate" in str(error):  # torch is out of memory
            raise
        return {"refused": brief(error)}, None
    outcome: dict[str, Any] = {"class": type(model).__name__}
    random = {k: sorted(_key_names(info.get(f"{k}_keys") or ())) for k in ("missing", "mismatched")}
    if any(random.values()):
        return outcome | random, None
    model = model.to(request["device"]).eval()
    inputs = {"input_ids": ids.to(request["device"])}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.inference_mode():
        output = model(**inputs)
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = getattr(output, "last_hidden_state", None)
    if logits is None:
        return outcome | {"refused": "it returns no logits and no hidden state"}, None
    logits = logits.float().cpu()
    outcome |= {"shape": list(logits.shape), "finite": bool(torch.isfinite(logits).all())}
    return outcome, logits


def _key_names(keys: Sequence[Any]) -> list[str]:
    """Return names of tensors; the name of a mismatch is its first element."""
    return [str(k[0]) if isinstance(k, tuple | list) else str(k) for k in keys]


def _vocabulary(config: Any) -> int | None:
    """Return the number of token ids of a model, or None."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


if __name__ == "__main__":
    serve(answer)
