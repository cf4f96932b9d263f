"""The scenarios of PyTorch's own tests of `torch.distributed.checkpoint`; without torch, for the docs' table.

What a scenario does is a function of the same name in ``tests/jobs/dcp_*_scenarios.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scenario:
    """One row.

    Attributes:
        name: Of the scenario, and of its function.
        topic: Of the module that has the function.
        upstream: PyTorch's tests with this behaviour, below test/distributed/checkpoint, without ``test_``.
        ranks: Of the gloo job.
        what: What torch saves, and what is filled from it.
        short: Whether `make test` runs it.
    """

    name: str
    topic: str
    upstream: str
    ranks: int
    what: str
    short: bool = False


T, M, V, S, H = "tensor", "model", "value", "saver", "hf"
RESHARD, FILES, API = (
    "dtensor_resharding",
    "file_system_checkpoint, file_system_checkpoint_cpu",
    "save_load_api",
)
DSD = "fsdp/fsdp_dsd, state_dict"
SCENARIOS = (
    Scenario("one_axis", T, RESHARD, 4, "DTensors on one mesh axis: every placement into every other"),
    Scenario("two_axes", T, RESHARD, 4, "the same on two axes"),
    Scenario("one_axis_into_two", T, RESHARD, 4, "from a mesh of one axis to one of two", True),
    Scenario("two_axes_into_one", T, RESHARD, 4, "from a mesh of two axes to one of one"),
    Scenario("empty_shards", T, RESHARD, 4, "fewer rows than ranks, no elements at all, scalars"),
    Scenario(
        "strided_shards", T, f"{RESHARD}, fsdp_tp_checkpoint_conversion", 4, "`_StridedShard`, both ways"
    ),
    Scenario("part_of_the_ranks", T, RESHARD, 4, "meshes of half of the ranks, into others and into all"),
    Scenario(
        "sharded_tensor_plans",
        T,
        FILES,
        2,
        "ShardedTensors of rows, columns, tiles and of one rank, plain tensors, DTensors: each into each",
        True,
    ),
    Scenario("dtypes", T, FILES, 2, "random bits of 21 dtypes: float8, complex and unsigned ones among them"),
    Scenario("casts", T, "planner", 2, "float32 into bfloat16, float16 and float64"),
    Scenario(
        "strides", T, FILES, 2, "transposed, sliced, expanded, channels-last tensors, views of one storage"
    ),
    Scenario(
        "own_protocol",
        T,
        f"{RESHARD}, dtensor_checkpoint",
        4,
        "tensors that list their own chunks (`_Checkpointable`), and DTensors of `LocalShardsWrapper`",
    ),
    Scenario("meta_device", T, "tp_checkpoint", 2, "into tensors on the meta device"),
    Scenario(
        "fsdp1_models", M, "fsdp_model_state, fsdp_optim_state", 4, "FSDP1 with and without a mesh, and FSDP2"
    ),
    Scenario("fsdp1_empty_ranks", M, "fsdp_model_state", 4, "FSDP1 where a rank has no shard of a tensor"),
    Scenario(
        "fsdp1_optimizer",
        M,
        "fsdp_optim_state",
        2,
        "optimizer of FSDP1, beside `load_sharded_optimizer_state_dict`",
    ),
    Scenario("hsdp", M, "hsdp_checkpoint", 4, "HSDP of FSDP1 and FSDP2, into HSDP and FSDP"),
    Scenario("hsdp_from_fsdp", M, "hsdp_checkpoint", 4, "FSDP into HSDP"),
    Scenario(
        "fsdp_and_tp",
        M,
        f"fsdp_tp_checkpoint_conversion, tp_checkpoint, {DSD}",
        4,
        "FSDP1, FSDP2, tensor parallelism and both together, into each other",
    ),
    Scenario("end_to_end", M, "e2e/e2e_save_and_load", 4, "FSDP2 over tensor parallelism into FSDP2", True),
    Scenario(
        "every_mesh",
        M,
        f"e2e/e2e_save_and_load, {DSD}",
        4,
        "plain, DDP, FSDP1, FSDP2, HSDP (both), tensor parallelism, FSDP2 over it: each into each",
    ),
    Scenario("every_mesh_flat", M, DSD, 4, "the same with `flatten_optimizer_state_dict`"),
    Scenario(
        "tp_on_meta", M, "tp_checkpoint", 2, "a tensor-parallel model made on the meta device, and assigned"
    ),
    Scenario(
        "fine_tuning",
        M,
        "e2e/fine_tuning",
        4,
        "the model part alone into a frozen body; then what is trained, saved and loaded",
    ),
    Scenario("pipeline", M, "e2e/pipeline", 4, "two FSDP2 stages into one model, and back"),
    Scenario("experts", M, "e2e/fsdp_ep", 4, "experts of other names on each half of the ranks"),
    Scenario(
        "optimizers",
        M,
        "optimizer_stateless, state_dict",
        4,
        "SGD, Adam (amsgrad), Adagrad, RMSprop, NAdam, Adamax; two groups",
    ),
    Scenario(
        "frozen_parameters",
        M,
        "optimizer_frozen_state, optimizer_flattened_missing_state, state_dict",
        4,
        "an optimizer with parameters that have no gradient, and no state",
    ),
    Scenario("full_state", M, f"{DSD}", 4, "gathered states, on all ranks or one; broadcast from the first"),
    Scenario("tied_weights", M, "state_dict", 3, "one parameter under two names"),
    Scenario("extra_state", M, "state_dict", 2, "`get_extra_state` of values and of tensors, BatchNorm"),
    Scenario(
        "nested", V, "nested_dict, traverse", 2, "dicts and lists in each other, odd keys, empty ones", True
    ),
    Scenario("tuples", V, "nested_dict", 2, "tuples with tensors, which torch saves as one object"),
    Scenario("plain_values", V, f"{FILES}", 2, "numbers, texts, bytes, sets, arrays, dtypes, random states"),
    Scenario(
        "stateful_objects", V, "e2e/e2e_save_and_load", 2, "`Stateful` objects, modules, scheduler, scaler"
    ),
    Scenario("lists_of_objects", V, "list_stateful", 2, "several models and optimizers, in dicts and lists"),
    Scenario("other_order", V, "e2e/e2e_save_and_load", 3, "keys in another order on each rank"),
    Scenario("own_keys", V, f"e2e/pipeline, {API}", 3, "tensors and values that one rank alone has"),
    Scenario(
        "partial_loads",
        V,
        "e2e/e2e_save_and_load, planner",
        2,
        "a smaller state; a greater one (`allow_partial_load`, `strict=False`)",
    ),
    Scenario("refusals", V, "planner, checkpoint", 2, "missing names, other shapes: both refuse", True),
    Scenario(
        "save_planners", V, "planner, dedup_tensors", 3, "every flag of `DefaultSavePlanner`, cached plans"
    ),
    Scenario(
        "unflattened_dicts", V, "planner", 2, "`flatten_state_dict=False`: a dict with tensors is one object"
    ),
    Scenario("own_planners", V, "planner", 2, "planners of a program: another prefix, half precision"),
    Scenario("writer_options", S, FILES, 3, "files per rank or per item, threads, safetensors items"),
    Scenario("extensions", S, FILES, 2, "zstd; an unknown transformation is refused"),
    Scenario("fsspec", S, "fsspec", 2, "`FsspecWriter` and `FsspecReader`"),
    Scenario(
        "overwritten", S, "e2e/e2e_save_and_load, fsspec", 2, "a save over an older one; one that is refused"
    ),
    Scenario("one_process", S, "e2e/e2e_save_and_load", 2, "`no_dist=True` by one rank, into all"),
    Scenario("process_groups", S, f"checkpoint, {API}", 4, "each half of the ranks saves for itself"),
    Scenario(
        "without_collectives", S, "e2e/e2e_save_and_load", 2, "`use_collectives=False`: metadata of each rank"
    ),
    Scenario("async_threads", S, "e2e/e2e_save_and_load", 2, "`async_save`, while training goes on", True),
    Scenario(
        "async_staging", S, "state_dict_stager, e2e/e2e_save_and_load", 2, "stagers, cached ones included"
    ),
    Scenario("async_processes", S, "async_process_executor", 2, "`async_save` by a process beside each rank"),
    Scenario(
        "torch_save_files",
        S,
        "format_utils",
        2,
        "`torch_save_to_dcp`, `dcp_to_torch_save`, one file into DTensors",
    ),
    Scenario(
        "older_metadata",
        S,
        "compatibility",
        2,
        "`.metadata` without the fields that came after 2.0, 2.3, 2.6",
    ),
    Scenario("older_names", S, "compatibility", 2, "names of torch 2.3: dicts and lists as one object"),
    Scenario(
        "hf_one_rank", H, "hf_storage, hf_safetensor_e2e", 2, "whole tensors, one file or several, threads"
    ),
    Scenario("hf_shards", H, "hf_safetensor_e2e", 4, "shards of every rank, `fqn_to_index_mapping`", True),
    Scenario("hf_consolidated", H, "hf_safetensor_e2e", 4, "shards that the writer joins"),
    Scenario("hf_consolidated_later", H, "consolidate_hf_safetensors", 4, "shards that torch's tools join"),
    Scenario(
        "hf_placements", H, "hf_safetensor_e2e", 4, "every placement, between meshes of one and two axes"
    ),
    Scenario("hf_empty_shards", H, "hf_safetensor_e2e", 4, "fewer rows than ranks"),
    Scenario(
        "hf_fp8_blocks",
        H,
        "quantized_hf_storage",
        2,
        "float8 blocks, beside `QuantizedHuggingFaceStorageReader`",
    ),
    Scenario("hf_mxfp4", H, "quantized_hf_storage", 2, "MXFP4 blocks, beside the reader's arithmetic"),
)
TOPICS = {
    T: "tensors",
    M: "models and optimizers",
    V: "names and values",
    S: "ways to save",
    H: "Hugging Face folders",
}

# PyTorch's tests below test/distributed/checkpoint, or a part of them, that have no scenario, and why.
NOT_RUN = (
    ("e2e/e2e_save_and_load (NCCL only)", "needs a GPU: a process group without a CPU backend"),
    (
        "e2e/e2e_save_and_load (`torch.compile`)",
        "saves the same names and tensors: a checkpoint does not tell",
    ),
    (
        "e2e/e2e_save_and_load, state_dict_stager (pinned memory)",
        "needs a GPU; the same stagers run without pinning in `async_staging`",
    ),
    ("state_dict (several devices, CPU offload of parameters)", "needs GPUs"),
    ("fsdp/fsdp_dsd (CPU offload policy)", "needs GPUs; gathered states on CPU are in `full_state`"),
    (
        "checkpoint (failing storage)",
        "tests torch's own errors with storage that fails on purpose; nothing is saved",
    ),
    ("pg_transport, utils, state_dict_utils, shared_and_pinned_memory", "no checkpoint in storage"),
    ("_experimental/barriers, _experimental/staging, _experimental/types", "no checkpoint in storage"),
    (
        "_experimental/builder, _experimental/checkpointer, _experimental/checkpoint_process",
        "files `checkpoint_RANK.pt`, as of the two below",
    ),
    (
        "_experimental/checkpoint_reader, _experimental/checkpoint_writer",
        "files `checkpoint_RANK.pt`, whose names could as well be steps: ckptcore reads each file alone",
    ),
    ("checkpointer (`_Checkpointer`)", "raises TypeError at every save in torch 2.13"),
    (
        "e2e/e2e_save_and_load (`save({})`)",
        "no tensor and no value: `validate` says `no-tensors`, since an empty `.metadata` proves nothing",
    ),
    ("optimizer, grad_dtype, optimizer_partial_state", "test how torch makes state, before any save"),
    (
        "metadata_warning, restricted_metadata_unpickler, cooperative_planner, cuobj_rdma_storage",
        "test what torch 2.13 does not have",
    ),
    (
        "pg_aware_planner, async_executor, list_stored_state_dict",
        "test what torch 2.13 does not have any more",
    ),
)
# PyTorch's files below test/distributed/checkpoint, without ``test_`` and ``.py``, as found in its repository
# in November 2026. Each has a scenario or a row in `NOT_RUN`.
UPSTREAM = (
    "_experimental/barriers",
    "_experimental/builder",
    "_experimental/checkpoint_process",
    "_experimental/checkpoint_reader",
    "_experimental/checkpoint_writer",
    "_experimental/checkpointer",
    "_experimental/staging",
    "_experimental/types",
    "async_executor",
    "async_process_executor",
    "checkpoint",
    "compatibility",
    "consolidate_hf_safetensors",
    "cooperative_planner",
    "cuobj_rdma_storage",
    "dedup_tensors",
    "dtensor_checkpoint",
    "dtensor_resharding",
    "e2e/e2e_save_and_load",
    "e2e/fine_tuning",
    "e2e/fsdp_ep",
    "e2e/pipeline",
    "file_system_checkpoint",
    "file_system_checkpoint_cpu",
    "format_utils",
    "fsdp/fsdp_dsd",
    "fsdp_model_state",
    "fsdp_optim_state",
    "fsdp_tp_checkpoint_conversion",
    "fsspec",
    "grad_dtype",
    "hf_safetensor_e2e",
    "hf_storage",
    "hsdp_checkpoint",
    "list_stored_state_dict",
    "metadata_warning",
    "nested_dict",
    "optimizer",
    "optimizer_flattened_missing_state",
    "optimizer_frozen_state",
    "optimizer_partial_state",
    "optimizer_stateless",
    "pg_aware_planner",
    "pg_transport",
    "planner",
    "quantized_hf_storage",
    "restricted_metadata_unpickler",
    "save_load_api",
    "shared_and_pinned_memory",
    "state_dict",
    "state_dict_stager",
    "state_dict_utils",
    "tp_checkpoint",
    "traverse",
    "utils",
)
# Where torch 2.13 itself has no result to compare with, and what is compared instead.
TORCH_FAILS = (
    ("fsdp1_empty_ranks", "`dcp.load` raises: it takes the save for one of torch 2.3", "what was saved"),
    ("writer_options", "`SerializationFormat.SAFETENSORS` has no loader in torch", "what was saved"),
    ("without_collectives", "`dcp.load` finds only chunks of this rank's own metadata", "what was saved"),
    ("hf_mxfp4", "the reader leaves columns as they were", "its `_dequantize_tensor_mxfp4`"),
)
# Saves that are loaded like torch loads them, but are not the same when ckptcore writes them again.
NOT_REWRITTEN = (
    ("tuples", "the tensors of a tuple get names of their own: torch's loader looks for the tuple"),
    ("unflattened_dicts", "a dict with tensors becomes its leaves, as torch writes it by default"),
    ("plain_values", "a frozenset becomes a set and a path its text, so that `weights_only` opens the file"),
    ("hf_fp8_blocks, hf_mxfp4", "written in float32, or as stored (`--keep-quantized`)"),
)
