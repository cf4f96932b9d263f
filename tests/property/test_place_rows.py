"""Places in `.metadata` that are filled into the rows of another tensor are as those written one by one."""

from __future__ import annotations

import pickletools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore.formats.dcp.metadata_writer import StoredTensor, metadata_pickle

# Around each number from which on the opcodes are longer.
BORDERS = [0, 255, 256, 65535, 65536, *(1 << bits for bits in (31, 32, 39, 40, 47, 48, 55, 61))]
numbers = st.sampled_from([n + d for n in BORDERS for d in (-1, 0, 1) if n + d >= 0])


@st.composite
def stored(draw: st.DrawFn) -> list[StoredTensor]:
    """Tensors of a few cuts and files, whose items begin at numbers of any length."""
    cuts = []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(1, 5))
        chunks = tuple(((n,), (1,)) for n in range(count))
        paths = tuple(f"__{draw(st.integers(0, 2))}_0.distcp" for _ in range(count))
        places = [np.array([(draw(numbers), draw(numbers)) for _ in range(count)]) for _ in range(2)]
        cuts.append((chunks, paths, places))
    found = []
    for n in range(draw(st.integers(1, 8))):
        chunks, paths, places = draw(st.sampled_from(cuts))
        place = draw(st.sampled_from(places)).copy()
        place[:, 0] += draw(st.sampled_from((0, 0, 1, 300)))
        place[-1, 1] += draw(st.sampled_from((0, 0, 1)))
        found.append(StoredTensor(f"t.{n}", "float32", (len(chunks),), chunks, paths, place))
    return found


@settings(deadline=None)
@given(stored())
def test_rows_filled(tensors: list[StoredTensor]) -> None:
    data = metadata_pickle(tensors, {}, None)
    # No two tensors share these columns: then each row is written by itself.
    apart = [replace(t, chunks=(*t.chunks,), paths=(*t.paths,)) for t in tensors]
    assert data == metadata_pickle(apart, {}, None)
    written = [n for op, n, _ in pickletools.genops(data) if op.name.startswith(("BININT", "LONG1"))]
    places = [n for t in tensors for place in t.places.tolist() for n in place]
    assert [n for n in written if n in set(places)][-1:] == places[-1:]
