"""Open folders with transformers, and compute and compare what their models return, in a separate process.

The process (`ckptcore.planning.transformers_process`) receives the request
``{"folders": [path, ...], "dtype", "device", "seed", "batch", "length"}``. One process opens all folders, one
model at a time: logits of one model can differ in their last bits from process to process.

Each model runs on inputs of its own kind: token ids drawn over its whole vocabulary, an image, a spectrogram,
a waveform. The answer says which inputs it has, and which of them it was not given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptcore.planning.transformers_process import LOCAL, Answer, brief, quiet_transformers, serve

_TOKENS = "input_ids"
_SAMPLES = 4000  # of a waveform: a quarter of a second
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
_BEHIND_PADDING = 2  # positions of some embeddings begin there


class _CannotRun(Exception):
    """A model was opened, and nothing is known that it runs on."""


def answer(request: dict[str, Any]) -> Answer:
    """Compute the outputs of each folder, and compare the first one's with the second's.

    Args:
        request: The request.

    Returns:
        ``folders``: for each ``{"class", "shape", "finite"}``, or ``{"refused": why}`` if transformers does
        not open it, or ``{"missing": [...], "mismatched": [...]}`` if it would initialise tensors at random.
        ``difference``: ``{"max_abs", "equal"}``, if two have outputs of one shape. ``covered``: ``{"tokens",
        "vocabulary", "inputs", "without"}``. ``error``: why there is no result.
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
    folder_outputs: list[Any] = []
    inputs: dict[str, Any] | None = None
    for place, folder in enumerate(request["folders"]):
        outcome, model = _load_model(library, torch, folder, configs[place], request)
        out["folders"][place] |= outcome
        if model is None:
            folder_outputs.append(None)
            continue
        try:
            inputs, outputs = _run(torch, model, configs, request, inputs)
        except _CannotRun as error:
            return out | {"error": str(error)}
        out.setdefault("covered", _covered(model, configs[place], inputs))
        if not outputs:
            out["folders"][place] |= {"refused": "it returns no tensor"}
            folder_outputs.append(None)
            continue
        finite = all(bool(torch.isfinite(o).all()) for o in outputs)
        out["folders"][place] |= {"shape": list(outputs[0].shape), "finite": finite}
        folder_outputs.append(outputs)
    if (
        len(folder_outputs) == 2
        and None not in folder_outputs
        and [o.shape for o in folder_outputs[0]] == [o.shape for o in folder_outputs[1]]
    ):
        pairs = list(zip(*folder_outputs, strict=True))
        out["difference"] = {
            "max_abs": max(
                float((left.double() - right.double()).abs().max()) for left, right in pairs if left.numel()
            ),
            "equal": all(torch.equal(left, right) for left, right in pairs),
        }
    return out


def _load_model(
    library: Any, torch: Any, folder: str, config: Any, request: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return the outcome of loading a folder's model, and the model; None where it is refused."""
    names = getattr(config, "architectures", None) or []
    model_class = getattr(library, names[0], None) if names else None
    # Version 5 calls it dtype, earlier ones torch_dtype.
    dtype_argument = "dtype" if int(library.__version__.split(".")[0]) >= 5 else "torch_dtype"
    load_arguments = {dtype_argument: getattr(torch, request["dtype"]), "output_loading_info": True, **LOCAL}
    try:
        model, info = (model_class or library.AutoModelForCausalLM).from_pretrained(folder, **load_arguments)
    except (ImportError, MemoryError):  # a library or memory is lacking: the folder may be correct
        raise
    except Exception as error:  # any failure of a third-party model class means that it does not open
        if isinstance(error, RuntimeError) and "allocate" in str(error):  # torch is out of memory
            raise
        return {"refused": brief(error)}, None
    outcome: dict[str, Any] = {"class": type(model).__name__}
    random_weights = {k: sorted(_key_names(info.get(f"{k}_keys") or ())) for k in ("missing", "mismatched")}
    if any(random_weights.values()):
        return outcome | random_weights, None
    return outcome, model.to(request["device"]).eval()


def _run(
    torch: Any, model: Any, configs: Sequence[Any], request: Mapping[str, Any], inputs: dict[str, Any] | None
) -> tuple[dict[str, Any], list[Any]]:
    """Return (inputs, the tensors that the model returns for them); inputs: of the model before, or None.

    Raises `_CannotRun`, in words, for a model whose inputs cannot be made, or that does not take them.
    """
    refusals = []
    tries = [inputs] if inputs is not None else _tries(torch, model, configs, request)
    for config in (model.config, _text(model.config)):
        config.use_cache = False  # it is not compared, and models of linear attention alone make none
    for trial_inputs in tries:
        torch.manual_seed(request["seed"])  # some choose patches of an image at random
        placed = {k: v.to(model.device, _dtype(model, v)) for k, v in trial_inputs.items()}
        try:
            with torch.inference_mode():
                output = model(**placed)
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
            refusals.append(f"{' and '.join(trial_inputs)}: {brief(error)}")
            continue
        return trial_inputs, [v.float().cpu() for v in _tensors(torch, output)]
    name = type(model).__name__
    why = (
        f"it does not run on {refusals[-1]}" if refusals else f"no input is known for {model.main_input_name}"
    )
    raise _CannotRun(f"{name} was opened and not run: {why}")


def _dtype(model: Any, value: Any) -> Any:
    return model.dtype if value.is_floating_point() else value.dtype


def _tensors(torch: Any, output: Any) -> Iterator[Any]:
    """Yield the floating tensors of an output: logits, hidden states, embeddings."""
    values = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else [output]
    )
    yield from (v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())


def _tries(
    torch: Any, model: Any, configs: Sequence[Any], request: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield inputs to try: the model's main one, and all that its forward takes."""
    seeded = torch.Generator().manual_seed(request["seed"])
    config, takes = configs[0], inspect.signature(model.forward).parameters
    inputs = {}
    for name, make in _MAKERS.items():
        if name in takes and (value := make(torch, configs, request, seeded)) is not None:
            inputs[name] = value
    main = inputs.get(model.main_input_name)
    if main is not None:
        yield _with_decoder(torch, config, configs, request, seeded, {model.main_input_name: main})
    if inputs and (main is None or len(inputs) > 1):
        end = getattr(_text(config), "eos_token_id", None)
        if _TOKENS in inputs and isinstance(end, int) and 0 <= end < (_vocabulary(config) or 0):
            inputs[_TOKENS][:, -1] = end  # models with an embedding of a text take it from there
        yield _with_decoder(torch, config, configs, request, seeded, inputs)


def _with_decoder(
    torch: Any,
    config: Any,
    configs: Sequence[Any],
    request: Mapping[str, Any],
    seeded: Any,
    inputs: dict[str, Any],
) -> dict[str, Any]:
    if not getattr(config, "is_encoder_decoder", False):
        return inputs
    ids = inputs.get(_TOKENS)
    ids = _token_ids(torch, configs, request, seeded) if ids is None else ids
    return inputs if ids is None else inputs | {"decoder_input_ids": ids}


def _token_ids(torch: Any, configs: Sequence[Any], request: Mapping[str, Any], seeded: Any) -> Any:
    """Return ids at equal distances over the vocabulary, in random order; None without a vocabulary."""
    sizes = [_vocabulary(c) for c in configs]
    if None in sizes:
        return None
    bound = min(n for n in sizes if n is not None)
    texts = [_text(c) for c in configs]
    positions = [n for t in texts for k in _POSITIONS if isinstance(n := getattr(t, k, None), int) and n > 0]
    length = max(1, min([request["length"], *(n - _BEHIND_PADDING for n in positions)]))
    count = request["batch"] * length
    drawn = (torch.arange(count) + torch.rand(1, generator=seeded, dtype=torch.float64)) * (bound / count)
    ids = drawn.long().clamp_(max=bound - 1)[torch.randperm(count, generator=seeded)]
    return ids.reshape(request["batch"], length)


def _image(torch: Any, configs: Sequence[Any], request: Mapping[str, Any], seeded: Any) -> Any:
    config = getattr(configs[0], "vision_config", None) or configs[0]
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if not size or not isinstance(channels, int):
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    return torch.randn(request["batch"], channels, *sides, generator=seeded)


def _spectrogram(torch: Any, configs: Sequence[Any], request: Mapping[str, Any], seeded: Any) -> Any:
    bins, positions = (getattr(configs[0], k, None) for k in ("num_mel_bins", "max_source_positions"))
    if not isinstance(bins, int) or not isinstance(positions, int):
        return None
    return torch.randn(request["batch"], bins, 2 * positions, generator=seeded)  # halved by a convolution


def _waveform(torch: Any, configs: Sequence[Any], request: Mapping[str, Any], seeded: Any) -> Any:
    frames = getattr(configs[0], "max_length", None), getattr(configs[0], "num_mel_bins", None)
    if all(isinstance(n, int) for n in frames) and not hasattr(configs[0], "conv_stride"):
        return torch.randn(request["batch"], *frames, generator=seeded)
    return torch.randn(request["batch"], _SAMPLES, generator=seeded)


_MAKERS: Mapping[str, Callable[[Any, Sequence[Any], Mapping[str, Any], Any], Any]] = {
    _TOKENS: _token_ids,
    "pixel_values": _image,
    "input_features": _spectrogram,
    "input_values": _waveform,
}


def _covered(model: Any, config: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model was run on, and which kinds of input it takes besides."""
    takes = inspect.signature(model.forward).parameters
    ids = [v for k, v in inputs.items() if k.endswith(_TOKENS)]
    return {
        "inputs": list(inputs),
        "without": [k for k in _MAKERS if k in takes and k not in inputs],
        "tokens": len(ids[0].unique()) if ids else 0,
        "vocabulary": _vocabulary(config) or 0,
    }


def _text(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _key_names(keys: Sequence[Any]) -> list[str]:
    """Return names of tensors; the name of a mismatch is its first element."""
    return [str(k[0]) if isinstance(k, tuple | list) else str(k) for k in keys]


def _vocabulary(config: Any) -> int | None:
    """Return the number of token ids of a model, or None."""
    size = getattr(_text(config), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else None


if __name__ == "__main__":
    serve(answer)
