"""Which trainers' own code has resumed from what ckptcore wrote; without torch, for the docs' table."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_training import CASES


@dataclass(frozen=True)
class Resumed:
    """One row.

    Attributes:
        output: The format that ckptcore wrote.
        by: Whose code loads it, with the release.
        saved: On which ranks the source was saved.
        on: For which ranks it was written and on which it was loaded.
        compared: What is compared after the load, bit for bit.
        needs: What a machine must have beside `make test`; empty for nothing.
        test: File and function below tests/.
    """

    output: str
    by: str
    saved: str
    on: str
    compared: str
    test: str
    needs: str = ""


STATE = "weights, optimizer state"
STEPS = f"{STATE}, losses of the next 2 steps"
LIGHTNING, OLMO, OLMO_3, TITAN, DEEPSPEED, VERL = (
    f"`CKPTCORE_{n}_PYTHON`"
    for n in ("LIGHTNING", "OLMO_CORE", "OLMO_CORE_3", "TORCHTITAN", "DEEPSPEED", "VERL")
)
RANK_FILES = "formats/torch_ranks/test_rank_resume.py::test_a_job_of_another_size_resumes_from_rank_files"
HUB = "a model of the hub"
FIRST = "losses of the first 3 steps of SGD beside transformers'"
FIRST_TEST = "integration/exports/test_first_steps.py::test_the_first_steps_are_those_of_transformers"
ROWS = (
    Resumed(
        "dcp",
        "torch 2.13: FSDP2, HSDP, tensor and pipeline parallelism",
        "fsdp=4, fsdp=2 tp=2, dp_replicate=2 fsdp=2",
        "fsdp 1 to 4 and 8, fsdp=2 tp=2, dp_replicate=2 fsdp=2, pp=2 fsdp=2 tp=2",
        f"{STEPS} (not with pp, nor for the keys of torchtitan)",
        "formats/dcp/test_dcp_mesh.py::test_jobs_of_every_mesh_resume",
        "soak",
    ),
    Resumed(
        "dcp",
        "torch 2.13: decoders with the names of Hugging Face and torchtitan",
        "fsdp=3 tp=2, fsdp=5, pp=2 tp=2",
        "fsdp 1 to 4 and 8, fsdp=2 tp=2, dp_replicate=2 fsdp=2, fsdp=2 tp=2 pp=2",
        f"{STEPS}; chunks and files of the job's own save",
        "formats/dcp/test_decoders_mesh.py::test_jobs_resume",
        "soak (one mesh by default)",
    ),
    Resumed(
        "dcp",
        "torch 2.13 and torchdata 0.11: FSDP2 with a scheduler and a StatefulDataLoader for each rank",
        "fsdp=4",
        "fsdp=4, fsdp=1, fsdp=2 tp=2, dp_replicate=2 fsdp=2, pp=2 fsdp=2, pp=2 fsdp=4",
        f"{STEPS}; scheduler; loaders where the mesh has as many data-parallel ranks",
        "formats/dcp/test_stateful_resume.py::test_a_job_with_scheduler_and_loader_resumes",
        f"soak, {TITAN}",
    ),
    Resumed(
        "accelerate",
        "Accelerate 1.15: `load_state` under FSDP2",
        "2",
        "fsdp 1, 2, 3 and 4",
        f"{STEPS}; scheduler, random states",
        "formats/accelerate/test_accelerate_resume.py::test_load_state_resumes_on_another_world",
        "soak",
    ),
    Resumed(
        "dcp",
        "torch 2.13: its recipe for DCP",
        "2",
        "3 ranks, 1 process",
        STATE,
        "conformance/test_recipes.py::test_what_we_write_loads_on_another_world",
    ),
    Resumed(
        "dcp",
        "transformers 5: a model under FSDP2 and tensor parallelism",
        "a Hugging Face folder",
        "fsdp=2 tp=2, fsdp=3",
        "weights, loss",
        "formats/huggingface/test_hf_mesh.py::test_a_model_is_loaded_on_a_mesh",
    ),
    Resumed(
        "dcp",
        "transformers 5: models (dense, mixture of experts) under FSDP2 and tensor parallelism",
        HUB,
        "fsdp=2, fsdp=4, fsdp=2 tp=2",
        FIRST,
        FIRST_TEST,
        "soak",
    ),
    Resumed(
        "dcp",
        "torchtitan 0.3.0: its models (dense, mixture of experts), FSDP and `initial_load_path`",
        HUB,
        "fsdp=2, fsdp=4",
        FIRST,
        FIRST_TEST,
        f"soak, {TITAN}",
    ),
    Resumed(
        "olmo_core",
        "OLMo-core 3.0.0: its models (dense), FSDP, TP and `load_model_and_optim_state`",
        HUB,
        "fsdp=2, fsdp=4, fsdp=2 tp=2",
        FIRST,
        FIRST_TEST,
        f"soak, {OLMO_3}",
    ),
    Resumed(
        "dcp",
        "torch 2.13: FSDP2, `set_state_dict`",
        "ZeRO-2 and ZeRO-3 on 2 and 4 ranks",
        "fsdp=2, fsdp=3, fsdp=4",
        "masters, moments, losses of the next 3 steps",
        "formats/deepspeed/test_resume.py::test_fsdp2_resumes_with_the_masters_and_moments",
        "soak (one mesh by default)",
    ),
    Resumed(
        "torch_ranks",
        "torch 2.13: FSDP2, as verl loads its files",
        "one file",
        "fsdp=1, fsdp=3",
        f"{STATE}, extra state",
        "formats/torch_ranks/test_rank_files.py::test_torch_loads_every_ranks_file",
    ),
    Resumed(
        "torch_ranks; dcp",
        "verl 0.9.1: its `FSDPCheckpointManager`, FSDP2; torch 2.13: FSDP2",
        "fsdp=4, ddp=2 fsdp=2",
        "fsdp 1, 2 and 3, ddp=2 fsdp=2, ddp=2 fsdp=1; dcp: fsdp=3",
        f"{STEPS}; scheduler",
        RANK_FILES,
        f"soak, {VERL}",
    ),
    Resumed(
        "torch_ranks",
        "verl 0.9.1: its `FSDPCheckpointManager`, FSDP1 with and without `use_orig_params`",
        "fsdp=4",
        "fsdp=2, fsdp=3",
        "weights, losses of the next 2 steps of a new optimizer; scheduler",
        RANK_FILES,
        f"soak, {VERL}",
    ),
    Resumed(
        "torch_ranks; dcp",
        "torch 2.13: FSDP1 with and without `use_orig_params`, sharded state dicts, the optimizer's by name",
        "fsdp=4",
        "fsdp=2, fsdp=3; dcp: fsdp 2 and 3",
        f"{STEPS}; scheduler",
        RANK_FILES,
        "soak",
    ),
    Resumed(
        "lightning (folder)",
        "Lightning 2.6: Trainer and Fabric, FSDP and ModelParallel strategies",
        "2",
        "fsdp=1, 3 and 4, dp_replicate=2 fsdp=2, on 1, 2 and 4 ranks",
        f"{STATE} at the start, and after 2 more steps beside a run from the original",
        "formats/lightning/test_lightning_training.py::test_a_run_of_another_size_resumes_from_the_written_folder",
        LIGHTNING,
    ),
    Resumed(
        "lightning (file)",
        "Lightning 2.6: Trainer and Fabric, FSDP and ModelParallel strategies",
        "2",
        "2 ranks",
        f"{STATE}, step",
        "formats/lightning/test_lightning_training.py::test_a_run_resumes_from_the_written_file",
        LIGHTNING,
    ),
    Resumed(
        "lightning (file)",
        "Lightning 2.6: `Trainer.fit(ckpt_path=...)`",
        "2",
        "1 process",
        f"{STATE}, step",
        "formats/lightning/test_lightning_owner.py::test_a_trainer_resumes_from_the_written_file",
        LIGHTNING,
    ),
    Resumed(
        "lightning (file)",
        "Lightning 2.6: its two guides to distributed checkpoints",
        "4",
        "2 processes",
        "weights",
        "formats/lightning/test_lightning_guide.py::test_the_trainers_guide",
        LIGHTNING,
    ),
    Resumed(
        "olmo_v01",
        "OLMo-core 0.1.0: `load_model_and_optim_state` under FSDP",
        "2 (four kinds of OLMo saves)",
        "1 and 3 ranks",
        STATE,
        "formats/olmo/test_olmo_loader.py::test_restored_by_its_own_loader",
        OLMO,
    ),
    Resumed(
        "olmo_v01",
        "OLMo-core 0.1.0: `load_model_and_optim_state` under FSDP",
        "2",
        "fsdp=2, 3 and 4, fsdp=2 tp=2, on 1 and 3 ranks",
        STATE,
        "formats/olmo/test_olmo_loader.py::test_a_mesh_restored_at_another_size",
        OLMO,
    ),
    Resumed(
        "olmo_core",
        "OLMo-core 3.0.0: `Checkpointer`, into DTensors",
        "2 (a sample of 3.0)",
        "1 and 3 ranks; fsdp=4 and fsdp=2 tp=2 on 1 and 3 ranks",
        STATE,
        "formats/olmo/test_olmo_loader.py::test_steps_of_a_mesh_restored_by_olmo_core_3",
        OLMO_3,
    ),
    Resumed(
        "olmo_core",
        "OLMo-core 1.9.0 and 2.6.0: `Checkpointer`, into DTensors",
        "2 (a sample of 3.0)",
        "fsdp=4, on 1 and 3 ranks",
        STATE,
        "formats/olmo/test_olmo_loader.py::test_steps_of_a_mesh_restored_by_earlier_releases",
        "`CKPTCORE_OLMO_CORE_1_PYTHON`, `CKPTCORE_OLMO_CORE_2_PYTHON`",
    ),
    Resumed(
        "olmo_core",
        "OLMo-core 3.0.0: its model and AdamW under its FSDP, `load_model_and_optim_state`",
        "2 (a sample of 3.0)",
        "fsdp=4, on 1 and 3 ranks",
        STEPS,
        "formats/olmo/test_olmo_loader.py::test_olmo_cores_own_model_trains_on",
        f"soak, {OLMO_3}",
    ),
    Resumed(
        "torch_dist",
        "Megatron-Core 0.19.2: GPTModel (dense, tied embeddings, MoE, latent attention)",
        "tp=2 pp=2, ep=2 pp=2 (samples of 0.19.2)",
        "tp 1 and 2, pp=2 tp=1 and 2; on tp 1 and 2, pp=2 even, uneven and virtual",
        "weights; losses of the next 2 steps of SGD without pp",
        "formats/megatron/test_megatron_resume.py::test_megatrons_own_model_resumes",
        "soak, megatron-core (pip, or $CKPTCORE_MCORE)",
    ),
    Resumed(
        "torch_dist",
        "Megatron-Core 0.15.3 and 0.19.2: GPTModel (mixtures of experts, latent attention)",
        HUB,
        "ep=2; on ep=2 and 1 rank",
        "weights; logits beside transformers'; losses of the next 3 steps of SGD",
        "formats/megatron/test_megatron_resume.py::test_ranks_of_experts_begin_from_the_hub",
        "soak, megatron-core (pip, or $CKPTCORE_MCORE)",
    ),
    *(
        Resumed(
            "torch_dist",
            case.text,
            case.saved.text,
            "; ".join(ranks.text for ranks in case.on),
            "weights, masters, moments, losses of the next 3 steps beside its resume from its own checkpoint",
            "formats/megatron/test_megatron_training.py::test_a_release_trains_on",
            "soak, megatron-core (pip, or $CKPTCORE_MCORE)",
        )
        for case in CASES.values()
    ),
    Resumed(
        "torch_dist",
        "Megatron-Core, the installed release: `dist_checkpointing.load`",
        "samples of 0.19.2, and of 0.12.3 (tp=2 dp=2)",
        "tp 1 to 5, pp 1 to 3, on tp 1 to 4 x pp 1 and 2",
        "weights, Adam's state, common state",
        "formats/megatron/test_mcore_mesh.py::test_megatron_loads_it",
        "megatron-core",
    ),
    Resumed(
        "deepspeed_universal, deepspeed_universal_zero3",
        "DeepSpeed 0.19.8: `engine.load_checkpoint` with `load_universal`",
        "ZeRO 1 to 3 on 2 ranks",
        "4 ranks",
        "masters, moments, options of groups, losses of the next 5 steps beside its own universal folder",
        "formats/deepspeed/test_universal_in_deepspeed.py"
        "::test_other_world_size_as_by_deepspeeds_own_converter",
        f"soak, {DEEPSPEED}",
    ),
    Resumed(
        "deepspeed_universal, deepspeed_universal_zero3",
        "DeepSpeed 0.19.8: the same, at another stage, or from FSDP2 of torch",
        "ZeRO-2, ZeRO-3 and fsdp=2",
        "2 ranks",
        "masters and moments",
        "formats/deepspeed/test_universal_in_deepspeed.py::test_other_stage",
        f"soak, {DEEPSPEED}",
    ),
    Resumed(
        "torch_dist, zarr",
        "Megatron-Core, the installed release: `dist_checkpointing.load`",
        "samples of 0.12.3 and 0.19.2",
        "1 and 2 ranks",
        "tensors, objects, common state",
        "formats/megatron/test_mcore_write.py::test_megatron_loads_it",
        "megatron-core",
    ),
)
# What no test here has resumed, and why.
MISSING = (
    ("Megatron-LM's `pretrain_gpt.py`, NeMo, Megatron-Bridge", "their training loops need CUDA"),
    ("torchtitan's trainer", "the names and the layout of its saves are resumed by torch alone"),
    (
        "OLMo-core's trainer",
        "its loaders, model and optimizer are run; its loop, with data loader and scheduler, is not",
    ),
    ("verl's trainer", "its checkpoint manager is run; its workers need CUDA"),
    (
        "The optimizer of verl under FSDP1, and FSDP1's local state dicts",
        "their flat runs name neither parameters nor shapes: refused, with the option that leaves them out",
    ),
    (
        "Hugging Face Trainer, Accelerate with FSDP1",
        "their folders are read and not written; `reshard --to dcp` is what they get",
    ),
    (
        "GPTModel of Megatron-Core 0.11, 0.13, 0.14, 0.17 and 0.18",
        "their `dist_checkpointing.load` is run, without the model",
    ),
    (
        "Megatron-Core's `fully_sharded_bucket_space`",
        (
            "no release that has it saves it: 0.12.3 and 0.14.0 fail by "
            "`assert offset == sh_ten.local_chunk_offset_in_global()`, on 2 ranks with dp=2 and with tp=2"
        ),
    ),
    (
        "Megatron-Core's optimizers on `torch.optim.AdamW`",
        (
            "no release tried loads its own checkpoint with it: a fresh `DistributedOptimizer.state_dict` "
            "fails (`assert len(steps) == 1`), behind a step `load_state_dict` does (`KeyError: 'step'` in "
            "`_set_main_param_and_optimizer_states`). Apex's FusedAdam needs CUDA: jobs compute it in torch"
        ),
    ),
    ("DeepSpeed's engine, from rank files or on model-parallel ranks", "universal folders alone are written"),
    ("torch before 2.13, Lightning before 2.6", "are not installed in any job; formats of theirs are read"),
    ("more than 8 ranks", "jobs run on CPU; larger meshes are compared by placement, not by training"),
)
