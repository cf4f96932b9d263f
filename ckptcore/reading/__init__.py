"""Read boxes of stored tensors into buffers, verified on the way.

Depends on manifests (`ckptcore.core`), envelopes and codecs (`ckptcore.encodings`), and stores; on no format
and no plan. In DCP's terms, a `payload.StoredChunk` is an entry of ``storage_data`` with its
``ChunkStorageMetadata``.

- `payload.resolve` finds a chunk's bytes inside its item; `gather` and `interleave` copy a box of them into
  a tile. `decoded_items` decodes compressed items within a budget.
- `chunk_reader.ChunkReader` reads boxes from a table of chunks, and compares copies; `box_reader.BoxReader`
  does so for one tensor of a manifest, stored or computed; `state_dict` into torch tensors.
- `checksums.Records` tracks which stored records are verified. `rereading` repeats work on bytes that
  came altered. `casting` changes dtypes. `equality` compares
  bits.
"""
