import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, LlamaForCausalLM

import ckptcore

model = LlamaForCausalLM(AutoConfig.from_pretrained("config"))
how = sys.argv[1]
if how != "alone":
    dist.init_process_group("gloo")
    ranks = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        if how == "tp":
            column, row = ColwiseParallel(), RowwiseParallel()
            plan = {"self_attn.q_proj": column, "self_attn.k_proj": column, "self_attn.v_proj": column}
            plan |= {
                "self_attn.o_proj": row,
                "mlp.gate_proj": column,
                "mlp.up_proj": column,
                "mlp.down_proj": row,
            }
            parallelize_module(layer, ranks, plan)
        else:
            fully_shard(layer, mesh=ranks)
    if how == "fsdp":
        fully_shard(model, mesh=ranks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

weights, states = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": states, "step": 0}
manifest = ckptcore.open("runs/tiny/step-10")
ckptcore.load_into(manifest, state)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

for name, weight in model.named_parameters():
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    assert torch.equal(full, ckptcore.read(manifest, f"model.{name}")), name
tokens = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))
loss = model(input_ids=tokens, labels=tokens).loss
loss.backward()
optimizer.step()
if int(os.environ.get("RANK", 0)) == 0:
    print(f"{how}: resumed at step {state['step']}, loss {loss.item():.3f}")
if how != "alone":
    dist.barrier()  # so that no thread of gloo still has a tensor when Python ends
    dist.destroy_process_group()
