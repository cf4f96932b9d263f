"""Map tensors from one world of names to another, by rules that are data, without reading a tensor.

A *world* is a way to name and lay out a model's tensors: ``megatron``, ``torchtitan``, ``olmo_core``,
``hf-hub`` (what `save_pretrained` writes). A map holds rules between two worlds for one architecture.

- `layout`: the grammar of layouts, ``(kv_heads (q + k + v) head_dim) h``, and the sizes of axes.
- `tensor_name`: the grammar of names, ``decoder.layers.{layer}.mlp.linear_fc1.weight``.
- `sizes`: arithmetic on a model's numbers.
- `declaration`: the TOML files, validated when they are loaded (pydantic: imported by those who map).
- `index_space`: boxes of stored chunks, split, cut, permuted and merged in columns.
- `tensor_groups`: the tensors that each rule takes, in groups that are handled at once.
- `matching`: the names and shapes that a map makes, and what does not fit.
- `conversion`: the manifest after a map.
- `hyperparameters`: a model's numbers and terms, from configs. `rope_scaling`: how these scale rotary
  embeddings.
- `hub_config`: the fields of a config.json. `agreement`: what the configs of one model say to each other.
"""
