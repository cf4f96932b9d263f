"""Read and write checkpoints of Lightning and Fabric: folders of a sharded strategy, and single files.

`format.FORMAT` is the format. `tree` reads the values of a Trainer, `writer` lays out the folder of a mesh.
The sharded part is a DCP folder; a single file is a torch.save file.
"""
