"""What torchtitan's own models make of random weights: their names, and their logits, on the CPU.

python torchtitan_logits_job.py ASKED ANSWER

ASKED is a file of torch with a list of questions: ``config``, as the hub has it; ``ids``; ``zero``, ends of
names whose tensors are 0; ``folder``, of DCP, which the model loads in place of random weights. ANSWER will
hold a list of ``state`` and ``logits``, and of ``left``, names in the folder that the model has not.
torchtitan compiles its
attention for GPUs: the same function of torch, not compiled, replaces it; and it multiplies by experts with a
kernel of GPUs in bfloat16, which a loop in float32 replaces. A module that defines kernels and runs none
(mcore_job.py) replaces Triton, where it is not installed. What norms add to a variance is what the config
says.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from mcore_job import stand_in_for_triton
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

T = torch.Tensor
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def stand_in(attend: Callable[..., Any] = flex_attention) -> None:
    """attend: a replacement for the compiled attention."""
    stand_in_for_triton()
    from torchtitan.models.common import attention

    attention._compiled_create_block_mask = create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
    library: Any = torch
    library.Tensor.bfloat16 = library.Tensor.float
    library._grouped_mm = _by_expert


def masked_attention(q: T, k: T, v: T, *, block_mask: Any, **options: Any) -> tuple[T, None]:
    """A replacement for torch's flexible attention, which has no gradient on CPUs."""
    assert options["score_mod"] is None, options
    length = q.shape[2]
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, length, length, device="cpu")
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=options["scale"], enable_gqa=options["enable_gqa"]
    )
    return out, None


def _by_expert(rows: T, weights: T, *, offs: T) -> T:
    """A replacement for torch._grouped_mm: each expert's rows by its own weight."""
    ends = [0, *offs.tolist()]
    parts = [rows[a:b] @ weights[e] for e, (a, b) in enumerate(itertools.pairwise(ends))]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])


def built(config: dict[str, Any]) -> Any:
    from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm

    kind, dim, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    wide = config.get("qk_rope_head_dim") or config.get("head_dim") or dim // heads
    rope = (ComplexRoPE if kind in ("llama", "deepseek_v3") else CosSinRoPE).Config(
        dim=wide, max_seq_len=64, theta=config["rope_parameters"]["rope_theta"]
    )
    layers = {"n_layers": config["num_hidden_layers"], "dim": dim, "attn_backend": "flex", "rope": rope}
    grouped = {"n_heads": heads, "n_kv_heads": config["num_key_value_heads"], "fuse_qkv": True}
    head = {"head_dim": config.get("head_dim")}
    dense = {"hidden_dim": config["intermediate_size"]}
    experts = {
        "num_experts": next((config[n] for n in EXPERTS if config.get(n)), None),
        "moe_hidden_dim": config.get("moe_intermediate_size"),
        "moe_comm_backend": "standard",
    }
    plain = {
        "vocab_size": config["vocab_size"],
        "dim": dim,
        "tok_embeddings": Embedding.Config(num_embeddings=config["vocab_size"], embedding_dim=dim),
        "norm": RMSNorm.Config(normalized_shape=dim),
        "lm_head": Linear.Config(in_features=dim, out_features=config["vocab_size"]),
        "enable_weight_tying": config["tie_word_embeddings"],
    }
    if kind == "llama":
        made = llama3._build_llama3_layers(**layers, **grouped, **dense)
        return llama3.Llama3Model.Config(**plain, layers=made).build()
    if kind == "qwen3":
        made = qwen3._build_qwen3_layers(**layers, **grouped, **head, **dense)
        return qwen3.Qwen3Model.Config(**plain, layers=made).build()
    if kind == "qwen3_moe":
        top = {"top_k": config["num_experts_per_tok"]}
        made = qwen3._build_qwen3_moe_layers(**layers, **grouped, **head, **experts, **top)
        return qwen3.Qwen3Model.Config(**plain, layers=made).build()
    if kind == "gpt_oss":
        top = {"num_experts": experts["num_experts"], "top_k": config["num_experts_per_tok"]}
        more = {"load_balance_coeff": 1e-3, "moe_comm_backend": "standard", "fuse_qkv": True}
        made = gpt_oss._build_gptoss_layers(**layers, **dense, **top, **more)
        return gpt_oss.GptOssModel.Config(**plain, layers=made).build()
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = {k: config[k] for k in sizes}
    made = deepseek_v3._build_dsv3_layers(
        **layers,
        **latent,
        **experts,
        n_heads=heads,
        n_dense_layers=config["first_k_dense_replace"],
        mscale=1.0,
        non_blocking_capacity_factor=None,
        dense_hidden_dim=config["intermediate_size"],
        num_shared_experts=config["n_shared_experts"],
        router_top_k=config["num_experts_per_tok"],
        router_score_func="sigmoid",
        router_route_norm=config["norm_topk_prob"],
        router_route_scale=config["routed_scaling_factor"],
    )
    return deepseek_v3.DeepSeekV3Model.Config(**plain, layers=made).build()


def with_norms_of(config: dict[str, Any], model: Any) -> Any:
    """The model, whose norms add to a variance what the config says."""
    for name, module in model.named_modules():
        if hasattr(module, "eps"):  # latent norms of the hub's DeepSeek have 1e-6, whatever the config says
            module.eps = 1e-6 if name.endswith(("q_norm", "kv_norm")) else config["rms_norm_eps"]
    return model


@torch.no_grad()
def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    config, ids = asked["config"], asked["ids"]
    model = with_norms_of(config, built(config).float().eval())
    left: list[str] = []
    if "folder" in asked:
        given = dict(model.state_dict())
        stored = dcp.FileSystemReader(asked["folder"]).read_metadata().state_dict_metadata
        dcp.load(given, checkpoint_id=asked["folder"], no_dist=True)  # it raises for a name that is not there
        left = sorted(stored.keys() - given.keys())
    else:
        given = {n: _random(n, t) for n, t in model.state_dict().items()}
        given |= {n: torch.zeros_like(t) for n, t in given.items() if n.endswith(asked["zero"])}
    model.load_state_dict(given)
    positions = torch.arange(ids.shape[1])[None].expand_as(ids).contiguous()
    logits = model(ids, positions, model.get_attention_masks(positions))
    return {"state": given, "logits": logits.float(), "left": left}


def _random(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Values of a trained model's size, so that every tensor counts in the logits."""
    if not tensor.is_floating_point():
        return tensor.clone()
    values = torch.randn(tensor.shape)
    return 1 + values / 8 if "norm" in name else values / 4


def main() -> None:
    """Writes the answers."""
    stand_in()
    torch.save([_answer(asked) for asked in torch.load(sys.argv[1], weights_only=True)], sys.argv[2])


if __name__ == "__main__":
    main()
