"""Read and write torch.distributed.checkpoint folders (torch 2.1 to today).

`format.FORMAT` is the format. Families whose checkpoints contain a DCP folder use `reader.read_folder`,
`writer.arrange_folder` and `objects.adopt`. `metadata` reads `.metadata`, and `metadata_writer`
writes it.
"""
