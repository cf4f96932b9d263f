"""Read and write torch.distributed.checkpoint folders (torch 2.1 to today).

`format.FORMAT`; for families that are DCP folders with more beside them: `reader.read_folder`,
`writer.arrange_folder`, `objects.adopt`. `metadata` and `chunk_table` read `.metadata`, `metadata_writer`
writes it, `items` knows what an item of a `.distcp` file is wrapped in.
"""
