"""List the keys under which optimizers, schedulers and the like save their state, with sources.

What a resumed training needs, and a model does not, is known by these keys alone. A key that is missing here
costs a user one more name at ``retire``; a key too many could cost weights. Sources are the projects' own
files, at their releases of November 2026.
"""

from __future__ import annotations

from typing import NamedTuple


class Keys(NamedTuple):
    """Keys of one or several classes.

    Attributes:
        of: The classes.
        source: Where they are defined.
        telling: Keys that no module uses for its parameters: one of them proves the class.
        ambiguous: Its other keys, which modules may use, too.
    """

    of: str
    source: str
    telling: tuple[str, ...]
    ambiguous: tuple[str, ...] = ()


def _row(of: str, source: str, telling: str, ambiguous: str = "") -> Keys:
    return Keys(of, source, tuple(telling.split()), tuple(ambiguous.split()))


# Per parameter: ``state.<parameter>.<key>``.
STATES = (
    _row(
        "Adam, AdamW, NAdam, RAdam, Adamax, SparseAdam",
        "torch/optim",
        "exp_avg exp_avg_sq max_exp_avg_sq exp_inf mu_product",
        "step",
    ),
    _row("SGD, RMSprop, Muon", "torch/optim", "momentum_buffer square_avg grad_avg"),
    _row("Adagrad, Adadelta, Rprop, ASGD", "torch/optim", "acc_delta", "sum prev step_size eta mu"),
    _row("Adafactor", "torch/optim/_adafactor.py", "row_var col_var", "variance"),
    _row(
        "LBFGS",
        "torch/optim/lbfgs.py",
        "old_dirs old_stps H_diag prev_flat_grad prev_loss func_evals n_iter",
        "d t ro al",
    ),
    _row("Adafactor", "transformers/optimization.py", "exp_avg_sq_row exp_avg_sq_col", "RMS"),
    _row("CAME", "yangluo7/CAME came.py", "exp_avg_res_row exp_avg_res_col"),
    _row(
        "8-bit and paged optimizers",
        "bitsandbytes/optim/optimizer.py",
        "state1 state2 qmap1 qmap2 max1 max2 new_max1 new_max2 absmax1 absmax2 gnorm_vec unorm_vec",
    ),
    _row("SOAP", "nikhilvyas/SOAP soap.py", "GG", "Q"),
    _row(
        "DistributedShampoo",
        "facebookresearch/optimizers distributed_shampoo",
        "factor_matrices inv_factor_matrices factor_matrices_eigenvectors corrected_eigenvalues "
        "filtered_grad",
        "momentum",
    ),
    _row("AdEMAMix", "apple/ml-ademamix", "exp_avg_fast exp_avg_slow"),
    _row("Adan", "sail-sg/Adan adan.py", "exp_avg_diff neg_pre_grad pre_grad"),
    _row("AdaBelief", "juntang-zhuang/Adabelief-Optimizer", "exp_avg_var max_exp_avg_var"),
    _row("Sophia", "Liuhong99/Sophia sophia.py", "", "hessian"),
    _row("Prodigy, D-Adaptation", "konstmish/prodigy, facebookresearch/dadaptation", "", "s p0"),
    _row("Muon", "MoonshotAI/Moonlight", "moment1 moment2"),
    _row("1-bit Adam, 1-bit LAMB", "deepspeed/runtime/fp16/onebit", "worker_error server_error"),
    _row("FusedAdam", "transformer_engine/pytorch/optimizers", "master_param"),
    _row("DistributedOptimizer", "megatron/core/optimizer", "fp32_param", "param common_step"),
    _row("masters that are stored beside the moments", "deepspeed, OLMo-core", "fp32", "main"),
)
# Per parameter, too, but averages of the weights, or what averages are computed from.
AVERAGES = (
    _row("ASGD", "torch/optim/asgd.py", "ax"),
    _row("schedule-free optimizers", "facebookresearch/schedule_free", "z"),
    _row(
        "Lookahead",
        "timm/optim/lookahead.py, torch_optimizer",
        "lookahead_slow_buff slow_buffer slow_params slow_param slow_state slow_weights cached_params",
    ),
    _row("SWA", "torchcontrib/optim/swa.py", "swa_buffer swa_state"),
)
# Beside ``state`` and ``param_groups``: whole subtrees of moments and float32 masters.
BUFFERS = (
    _row("DistributedOptimizer", "megatron/core/optimizer/distrib_optimizer.py", "distributed param_state"),
    _row(
        "Float16OptimizerWithFloat16Params",
        "megatron/core/optimizer/optimizer.py",
        "fp32_from_fp16_params fp32_params",
    ),
    _row("FP16_Optimizer", "apex/fp16_utils", "fp32_from_fp16"),
    _row(
        "ZeRO, BF16_Optimizer, FP16_Optimizer",
        "deepspeed/runtime",
        "fp32_groups fp32_groups_flat single_partition_of_fp32_groups local_sub_partitions_of_fp32_groups",
    ),
)
# Beside them: values of one element.
COUNTERS = (
    _row("MixedPrecisionOptimizer", "megatron/core/optimizer", "grad_scaler param_state_sharding_type"),
    _row(
        "ZeRO, BF16_Optimizer, FP16_Optimizer",
        "deepspeed/runtime",
        "clip_grad loss_scaler dynamic_loss_scale overflow zero_stage partition_count group_paddings "
        "param_slice_mappings param_alignment_paddings cur_scale cur_iter last_overflow_iter scale_factor "
        "scale_window ds_version ds_config",
    ),
    _row("FP16_Optimizer", "apex/fp16_utils", "first_closure_call_this_step"),
)
# Dicts of one optimizer inside another.
INNER = frozenset(
    {
        "base_optimizer",
        "base_optimizer_state",
        "groups",
        "opt",
        "optim",
        "optimizer",
        "optimizer_state_dict",
        "optimizers",
        "state_dict",
    }
)
SCHEDULERS = (
    _row(
        "torch.optim.lr_scheduler",
        "torch/optim/lr_scheduler.py",
        "last_epoch _step_count base_lrs _last_lr",
        "best min_lrs max_lrs gamma factor eta_min T_cur T_i num_bad_epochs cooldown_counter",
    ),
    _row(
        "OptimizerParamScheduler",
        "megatron/core/optimizer_param_scheduler.py",
        "lr_decay_style lr_warmup_steps lr_decay_steps wd_incr_style",
        "max_lr min_lr start_wd end_wd num_steps",
    ),
)
LOSS_SCALERS = (
    _row(
        "GradScaler",
        "torch/amp/grad_scaler.py",
        "growth_factor backoff_factor growth_interval _growth_tracker",
        "scale _scale",
    ),
    _row(
        "DynamicGradScaler",
        "megatron/core/optimizer/grad_scaler.py",
        "growth_tracker hysteresis_tracker",
        "scale",
    ),
    _row(
        "LossScaler",
        "deepspeed/runtime/fp16/loss_scaler.py, apex",
        "cur_scale loss_scale unskipped",
        "last_overflow_iter scale_factor",
    ),
)
# Of arrays; the others are plain values.
RANDOM_STATES = (
    _row(
        "accelerate",
        "accelerate/checkpointing.py",
        "numpy_random_seed torch_manual_seed torch_cuda_manual_seed torch_xpu_manual_seed",
    ),
    _row(
        "Megatron",
        "megatron/training/checkpointing.py",
        "np_rng_state torch_rng_state cuda_rng_state rng_tracker_states",
    ),
    _row("Trainer, verl, Composer", "transformers/trainer.py and others", "", "numpy cpu cuda torch"),
)
DATA_LOADERS = (
    _row(
        "StatefulDataLoader",
        "torchdata/stateful_dataloader",
        "generator _sampler_iter_state sampler_iter_state base_seed",
        "indices permutation perm",
    ),
)
PROGRESS = (
    _row(
        "Megatron, torchtitan",
        "megatron/training/checkpointing.py, torchtitan/train.py",
        "num_floating_point_operations_so_far ntokens_seen checkpoint_version",
    ),
)

KINDS_OF_KEYS = {
    "optimizer, per parameter": STATES,
    "optimizer, buffers": BUFFERS,
    "optimizer, values of one element": COUNTERS,
    "average": AVERAGES,
    "scheduler": SCHEDULERS,
    "loss scaler": LOSS_SCALERS,
    "random state": RANDOM_STATES,
    "data loader": DATA_LOADERS,
    "progress": PROGRESS,
}


def telling(rows: tuple[Keys, ...]) -> frozenset[str]:
    """Return the keys that prove a class of a table."""
    return frozenset(key for row in rows for key in row.telling)


def all_keys(rows: tuple[Keys, ...]) -> frozenset[str]:
    """Return all keys of a table."""
    return frozenset(key for row in rows for key in (*row.telling, *row.ambiguous))
