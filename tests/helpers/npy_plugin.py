"""A package that adds a format of its own: a folder of `.npy` files, one per tensor, named like it.

`PLUGIN` is the smallest complete example, to which CONTRIBUTING.md points.
"""

PLUGIN = '''
"""A folder of `<name>.npy` files."""
import ast, math
from ckptcore.errors import MalformedCheckpoint
from ckptcore.formats import Builder, Evidence, Format, Item, Reader, TensorSpec, View

DTYPES = {"<f4": "float32", "<i8": "int64"}

def detect(source):
    names = [p for p in source.listing if p.endswith(".npy")]
    return Evidence("npy_folder", (f"found {names[0]}",)) if source.name is None and names else None

def read(source):
    builder = Builder()
    for path, size in source.listing.items():
        if not path.endswith(".npy"):
            continue
        head = source.store.read(path, 0, min(size, 128))
        if head[:8] != b"\\x93NUMPY\\x01\\x00" or len(head) < 10:
            raise MalformedCheckpoint(f"{path} is no .npy file", file=path)
        start = 10 + int.from_bytes(head[8:10], "little")
        if start > size:
            raise MalformedCheckpoint(f"{path} is cut", file=path)
        form = ast.literal_eval(source.store.read(path, 10, start - 10).decode().strip())
        source.explain(path, 0, start)
        spec = TensorSpec(path.removesuffix(".npy"), DTYPES[form["descr"]], form["shape"])
        if size != start + spec.nbytes:
            raise MalformedCheckpoint(f"{path} has {size} bytes, {start + spec.nbytes} are needed", file=path)
        item = builder.item(Item(builder.file(path, size), start, spec.nbytes))
        builder.chunk(builder.tensor(spec), (0,) * len(spec.shape), spec.shape, item, View())
    return builder.build("npy_folder", source.store.url, {})

FORMAT = Format("npy_folder", "a folder of .npy files", "`*.npy`", detect, Reader(read))
NOT_A_FORMAT = 3
'''
