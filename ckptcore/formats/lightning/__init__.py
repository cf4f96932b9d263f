"""Read and write checkpoints of Lightning and Fabric: folders of a sharded strategy, and the one file.

`format.FORMAT`. `tree` reads what a Trainer keeps, `optimizer_names` names what its optimizers number,
`writer` lays out the folders of a mesh. The sharded part is a DCP folder, the file one of torch.save.
"""
