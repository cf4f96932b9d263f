"""Read and write checkpoints of Lightning and Fabric: folders of a sharded strategy, and single files.

`format.FORMAT` is the format. The sharded part is a DCP folder; a single file is a torch.save file.
"""
