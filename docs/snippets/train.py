import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    tokens = torch.randint(0, 256, (4, 32))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

weights, states = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": states, "step": 10}, checkpoint_id="runs/tiny/step-10")
if dist.get_rank() == 0:
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained("config")
dist.barrier()  # so that no thread of gloo still has a tensor when Python ends
dist.destroy_process_group()
