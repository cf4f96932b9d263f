"""Training state is known by keys and forms: averages, modules with trainers' names, states of every kind."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore.core.manifest import Blob, Manifest, TensorSpec
from ckptcore.core.manifest_builder import Builder
from ckptcore.core.object_tree import Named, encode
from ckptcore.naming.moments import state_of
from ckptcore.naming.trainer_keys import AVERAGES, SCHEDULERS, STATES, all_keys
from ckptcore.naming.training_state import (
    AVERAGE,
    DATA_LOADER,
    LOSS_SCALER,
    OPTIMIZER,
    PROGRESS_KIND,
    RANDOM_STATE,
    SCHEDULER,
    StoredKinds,
)

W = ("float32", (4, 4))
V = ("float32", (4,))
ONE = ("float32", ())
COUNT = ("int64", ())
BYTES = ("uint8", (5056,))
MODEL = {"model.w": W, "model.b": V}
ADAM = {
    **{f"optim.state.{n}.{k}": W for n in ("w", "b") for k in ("exp_avg", "exp_avg_sq")},
    "optim.param_groups.0.lr": 0.1,
}


def array(value: Any) -> Named:
    plain = np.asarray(value)
    form = {"dtype": plain.dtype.str, "shape": list(plain.shape), "data": plain.tobytes()}
    return Named("ndarray", form)


def manifest_of(content: Mapping[str, Any]) -> Manifest:
    """A checkpoint of tensors (dtype, shape) and of plain values."""
    builder = Builder()
    for name, value in content.items():
        if (
            isinstance(value, tuple)
            and value
            and value[0] in ("float32", "int64", "uint8", "int8", "bfloat16")
        ):
            builder.tensor(TensorSpec(name, *value))
        else:
            builder.blobs.append(Blob(name, -1, encode(value)))
    return builder.build("test", "nowhere", {})


# What it is -> (content beside a model and its Adam, what each name of it is). None: needs its own name.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    # averages of weights, wherever trainers put them
    "NeMo's EMA in the optimizer": ({"optim.ema.0": W, "optim.ema.1": V}, AVERAGE),
    "NeMo's EMA in Lightning": (
        {"optimizer_states.0.ema.0": W, "optimizer_states.0.opt.param_groups": [{}]},
        None,
    ),
    "an optimizer of an average": ({"optimizer.ema_params.w": W}, AVERAGE),
    "torchtitan's ema_state": ({"ema_state.w": W, "ema_state.decay": 0.99}, AVERAGE),
    "diffusers' shadow_params": ({"shadow_params.0": W}, AVERAGE),
    "timm's state_dict_ema": ({"state_dict_ema.w": W}, AVERAGE),
    "model_ema": ({"model_ema.module.w": W}, AVERAGE),
    "SWA": ({"swa_model.module.w": W, "swa_model.n_averaged": COUNT}, AVERAGE),
    "torch's AveragedModel": ({"averaged_model.module.w": W}, AVERAGE),
    "ASGD's ax": ({"optim.state.w.ax": W}, AVERAGE),
    "schedule-free's z": ({"optim.state.w.z": W}, AVERAGE),
    "Lookahead's slow weights": (
        {"optim.state.w.lookahead_slow_buff": W, "optim.state.b.slow_buffer": V},
        AVERAGE,
    ),
    "an average per state": ({"optim.state.w.ema": W}, AVERAGE),
    "an average in an extra state": ({"extra_state.ema.w": W}, AVERAGE),
    # modules that are called as trainers call their entries
    "a module scheduler": ({"scheduler.proj.weight": W}, None),
    "a module lr_scheduler": ({"lr_scheduler.net.0.weight": W}, None),
    "a module sampler": ({"sampler.proj.weight": W, "sampler.proj.bias": V}, None),
    "a module scaler": ({"scaler.mean": V, "scaler.scale": ONE}, None),
    "a module rng": ({"rng.net.weight": W, "rng.codes": ("int8", (64, 64))}, None),
    "a module step": ({"step.proj.weight": W, "iter.scale": ONE, "epoch.w": V}, None),
    "a module data_loader": ({"data_loader.embed.weight": W, "dataloader.codebook": ("int8", (8, 8))}, None),
    "a module optimizer": ({"optimizer.encoder.weight": W, "optimizer.scale": ONE}, None),
    "a module optimizer with a state": (
        {"optimizer.state.encoder.weight": W, "optimizer.state.sum.bias": V},
        None,
    ),
    "a module train_state": ({"train_state.encoder.weight": W}, None),
    "a module random_state": ({"random_state.w": W}, None),
    "a module in an app": ({"app.scheduler.w": W}, None),
    "weights in a value": ({"scheduler": {"net": array(np.ones((2, 2), np.float32)), "last_epoch": 1}}, None),
    "bytes below a scheduler": ({"scheduler.net": b"weights"}, None),
    # keys that nobody knows below an optimizer
    "an unknown state": ({"optim.state.w.unheard_of": W}, None),
    "an unknown part": ({"optim.memory.w": W}, None),
    "a tensor in a group": ({"optim.param_groups.0.prior": W}, None),
    "weights in an optimizer's value": ({"optimizer": {"net": array(np.ones((2, 2), np.float32))}}, None),
    # what trainers save
    "8-bit Adam": ({"optim.state.w.state1": ("uint8", (4, 4)), "optim.state.w.absmax1": V}, OPTIMIZER),
    "Adafactor of transformers": ({"optim.state.w.exp_avg_sq_row": V, "optim.state.w.RMS": ONE}, OPTIMIZER),
    "SOAP's lists": ({"optim.state.w.GG.0": W, "optim.state.w.Q.1": W}, OPTIMIZER),
    "Shampoo's keys": (
        {
            'optim.state.w.["block_0", "shampoo", "factor_matrices", 0]': W,
            'optim.state.w.["block_0", "momentum"]': W,
            'optim.state.w.["step"]': ONE,
        },
        OPTIMIZER,
    ),
    "Megatron's order of names": (
        {
            "optimizer.state.exp_avg.w": W,
            "optimizer.state.fp32_param.w": W,
            "optimizer.grad_scaler.scale": ONE,
        },
        OPTIMIZER,
    ),
    "Megatron's buckets": (
        {"chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": ("float32", (99,))},
        OPTIMIZER,
    ),
    "DeepSpeed's masters": (
        {
            "optimizer.single_partition_of_fp32_groups.0": V,
            "optimizer.loss_scaler": 1.0,
            "optimizer.overflow": False,
        },
        OPTIMIZER,
    ),
    "another name": (
        {"critic_opt.state.model.w.exp_avg": W, "critic_opt.param_groups": [{"lr": 0.1}]},
        OPTIMIZER,
    ),
    "numbers": ({"sgd.state.0.momentum_buffer": W, "sgd.param_groups": [{"params": [0]}]}, OPTIMIZER),
    "Adagrad": ({"ada.state.w.sum": W, "ada.state.w.step": ONE}, OPTIMIZER),
    "Composer": ({"state.optimizers.AdamW.state.w.exp_avg": W}, OPTIMIZER),
    "a parameter called ema": ({"optim.state.ema.w.exp_avg": W}, OPTIMIZER),
    "a parameter of a state": ({"optim.state.enc.state.w.exp_avg": W}, OPTIMIZER),
    "an optimizer as one value": (
        {"optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.9)}]}},
        OPTIMIZER,
    ),
    "a scheduler": (
        {"lr_scheduler.last_epoch": 3, "lr_scheduler.base_lrs": [0.1], "lr_scheduler._last_lr.0": ONE},
        SCHEDULER,
    ),
    "one's own scheduler": ({"lr_scheduler.warm": 0.1, "lr_scheduler.phase": "late"}, SCHEDULER),
    "generators": (
        {
            "rng_state/shard_0.0_0.0.cuda_rng_state": ("uint8", (16,)),
            "rng.a": BYTES,
            "random_states.torch_manual_seed.rank0": ("uint8", (2, 5056)),
            "rng.numpy": ("MT19937", array(np.ones(624, np.uint32)), 1, 0, 0.5),
        },
        RANDOM_STATE,
    ),
    "a data loader": (
        {
            "dataloader.dp_rank_0": b"pickled",
            "sampler.indices": ("int64", (100,)),
            "dl_state.generator": BYTES,
        },
        DATA_LOADER,
    ),
    "a loss scaler": ({"grad_scaler.scale": ONE, "grad_scaler.growth_tracker": 0}, LOSS_SCALER),
    "progress": (
        {"step": COUNT, "train_state.ntokens_seen": ONE, "loops": {"fit_loop": {"done": 3}}, "epoch": 1},
        PROGRESS_KIND,
    ),
    "notes": ({"args": {"lr": 0.1}, "hparams": "x"}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_kinds(case: str) -> None:
    content, expected = CASES[case]
    kinds = StoredKinds(manifest_of({**MODEL, **ADAM, **content}))
    found = {name: kinds.kind_of(name) for name in content}
    if case == "NeMo's EMA in Lightning":
        assert found == {
            "optimizer_states.0.ema.0": AVERAGE,
            "optimizer_states.0.opt.param_groups": OPTIMIZER,
        }
    else:
        assert found == dict.fromkeys(content, expected)
    assert {kinds.kind_of(name) for name in ADAM} == {OPTIMIZER}
    assert kinds.kind_of("a file.txt") is None


def test_a_trained_tensor_is_no_training_state() -> None:
    name = "scaler.scale"
    content = {name: ONE, "scaler.growth_factor": 2.0}
    assert StoredKinds(manifest_of(content)).kind_of(name) == LOSS_SCALER
    trained = StoredKinds(manifest_of({**content, f"optim.state.{name}.exp_avg": ONE}))
    assert trained.kind_of(name) is None


def _states(cls: type[torch.optim.Optimizer], **options: Any) -> set[str]:
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    try:
        optimizer = cls([parameter], lr=0.01, **options)  # type: ignore[call-arg]
    except TypeError:
        return set()
    parameter.grad = torch.randn(4, 4)
    if cls is torch.optim.SparseAdam:
        parameter.grad = parameter.grad.to_sparse()
    optimizer.step(*([lambda: (parameter**2).sum()] if cls is torch.optim.LBFGS else []))  # type: ignore[arg-type]
    return {key for state in optimizer.state_dict()["state"].values() for key in state}


def test_every_optimizer_of_torch_is_known() -> None:
    """The installed torch is asked; a new optimizer needs its row."""
    known = all_keys(STATES) | all_keys(AVERAGES)
    options: list[dict[str, Any]] = [
        {},
        {"momentum": 0.9, "centered": True},
        {"momentum": 0.9},
        {"amsgrad": True},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cls, more in itertools.product(vars(torch.optim).values(), options):
            if (
                isinstance(cls, type)
                and issubclass(cls, torch.optim.Optimizer)
                and cls is not torch.optim.Optimizer
            ):
                assert _states(cls, **more) <= known, cls
    assert all_keys(SCHEDULERS) >= {"last_epoch", "_step_count", "base_lrs", "_last_lr"}


def test_states_are_parsed_as_trainers_write_them() -> None:
    expected = {
        "state.0.exp_avg": ("", "0", "exp_avg"),
        "optim.state.0.exp_avg.rank1": ("optim", "0", "exp_avg"),
        "a.b.state.layers.0.w.step": ("a.b", "layers.0.w", "step"),
        "chained_0.optimizer.state.exp_avg.layers.w": ("chained_0.optimizer", "layers.w", "exp_avg"),
        "ep0.state.optimizers.AdamW.state.w.exp_avg": ("ep0.state.optimizers.AdamW", "w", "exp_avg"),
        "optimizer.state.common_step": ("optimizer", "", "common_step"),
    }
    for name, parts in expected.items():
        state = state_of(name)
        assert state is not None
        assert state[:3] == parts
    for name in ("state", "model.state.w", "restate.w.exp_avg", "optim.exp_avg"):
        assert state_of(name) is None
