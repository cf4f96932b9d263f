"""Read the model-parallel files of Meta's Llama: ``consolidated.NN.pth`` of all ranks, and params.json.

`format.FORMAT` is the format. `reader` joins the ranks' files by the rules of `cuts`. One such file alone is
a full state dict (`ckptcore.formats.torch_save`).
"""
