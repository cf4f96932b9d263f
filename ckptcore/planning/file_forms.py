"""Keep what files with the same tensors share, when these are cut alike: the files of the ranks of a mesh.

1. Tensors of a file with one box, one shape and equal chunks are one *class*: which chunks they need is found
   for one of them. A file of a large model has thousands of tensors, and tens of classes.
2. Files with the same tensors in the same classes have one *form*. They differ in the boxes of the classes.
3. Files of one form whose classes need as many chunks have one *spread*: the row of columns that each read is
   taken from, and the order of their items, which is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ckptcore.core.file_layout import FileLayout
from ckptcore.core.manifest import Ints
from ckptcore.utils.ordering import ascends

_FORMS = 64  # files of a rank, and of the ranks of a tensor-parallel group: then all come once more
_SPREADS = 4  # of each form: of uneven cuts, ranks at the end need fewer chunks
_LARGEST = 1 << 17  # reads of a spread that is kept: others are as large as the columns made of them
_MOST = 1 << 20  # tensors and reads of everything that is kept, 40 bytes each: beyond, the oldest forms go


@dataclass(frozen=True)
class FileForm:
    """Tensors of a file, and their classes.

    Attributes:
        tensors: Positions of the tensors, int64 [n].
        group: Class of each tensor, int64 [n].
        first_of_group: The first tensor of each class, as a position in ``tensors``, int64 [classes].
        spreads: The last spreads, by the number of chunks that each class needs.
    """

    tensors: Ints
    group: Ints
    first_of_group: Ints
    spreads: dict[bytes, Spread] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Count the tensors and the reads of what is kept."""
        return len(self.tensors) + sum(len(spread.place) for spread in self.spreads.values())

    def spread(self, counts: Ints, first: Ints) -> Spread:
        """Return where each read of a file comes from.

        Args:
            counts: Number of the chunks that a tensor of each class needs, int64 [classes].
            first: First row of each tensor's chunks, int64 [n]; the same for all files of a form.
        """
        key = counts.tobytes()
        spread = self.spreads.get(key)
        if spread is None:
            spread = Spread.of(counts, self.group, first)
            if len(spread.place) <= _LARGEST:
                if len(self.spreads) >= _SPREADS:
                    del self.spreads[next(iter(self.spreads))]
                self.spreads[key] = spread
        return spread


@dataclass(frozen=True)
class Spread:
    """The reads of a file, tensor by tensor.

    Attributes:
        begin: First chunk row of each read's tensor, int64 [m].
        place: Row of each read in the rows of all classes, one after the other, int64 [m].
        first: int64 [n + 1]; the reads of tensor t are rows first[t]:first[t + 1].
        items: Order of the items that the reads use.
        places: Order of the items in their files.
    """

    begin: Ints
    place: Ints
    first: Ints
    items: SortOrder = field(default_factory=lambda: SortOrder())
    places: SortOrder = field(default_factory=lambda: SortOrder())

    @classmethod
    def of(cls, counts: Ints, group: Ints, first: Ints) -> Spread:
        """Return the spread of tensors whose classes need so many chunks."""
        tensor_counts = counts[group]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(tensor_counts)])
        within = np.arange(int(ends[-1])) - np.repeat(ends[:-1], tensor_counts)
        begin = np.cumsum(counts) - counts
        return cls(np.repeat(first, tensor_counts), np.repeat(begin[group], tensor_counts) + within, ends)


class SortOrder:
    """The order of the last column that was sorted: it mostly sorts that of the next file alike, too."""

    def __init__(self) -> None:
        self._order: Ints | None = None
        self._inverse: Ints | None = None

    def sort(self, column: Ints) -> Ints:
        """Return the order that sorts a column, as a stable sort does."""
        order = self._order
        if order is None or len(order) != len(column) or not ascends(column[order]):
            self._inverse = None
            order = self._order = np.argsort(column, kind="stable")
        return order

    def number(self, used: Ints) -> tuple[Ints, Ints]:
        """Return the numbers in use, ascending, and for each use the position of its number."""
        order = self.sort(used)
        numbers = used[order]
        if not ascends(numbers):  # some more than once
            numbers, inverse = np.unique(used, return_inverse=True)
            return numbers.astype(np.int64), inverse.reshape(-1).astype(np.int64)
        if self._inverse is None:
            self._inverse = np.empty(len(order), np.int64)
            self._inverse[order] = np.arange(len(order))
        return numbers, self._inverse


class Forms:
    """The forms of the last files."""

    def __init__(self, alike: Callable[[Ints], Ints]) -> None:
        """Start without files.

        Args:
            alike: int64 [n], positions of tensors -> int64 [n], a number for each that is equal for tensors
                of one shape with equal chunks.
        """
        self._alike = alike
        self._forms_by_tensors: dict[tuple[int, ...], list[FileForm]] = {}

    def of(self, layout: FileLayout) -> FileForm:
        """Return the form of a file."""
        forms = self._forms_by_tensors.pop(layout.tensors, [])
        self._forms_by_tensors[layout.tensors] = forms  # the last one
        while len(self._forms_by_tensors) > _FORMS or (len(self._forms_by_tensors) > 1 and self.rows > _MOST):
            del self._forms_by_tensors[next(iter(self._forms_by_tensors))]
        # Boxes are shared between tensors of one shape, and distinguished as objects.
        ids = np.fromiter(map(id, layout.boxes), np.int64, len(layout.boxes))
        for form in forms:
            if not len(ids) or np.array_equal(ids[form.first_of_group][form.group], ids):
                return form
        form = self._make_form(layout.tensors, ids)
        forms.insert(0, form)
        del forms[_SPREADS:]
        return form

    @property
    def rows(self) -> int:
        """Count the tensors and the reads of all forms that are kept."""
        return sum(form.rows for forms in self._forms_by_tensors.values() for form in forms)

    def _make_form(self, positions: tuple[int, ...], ids: Ints) -> FileForm:
        tensors = np.array(positions, np.int64)
        alike = self._alike(tensors)
        if len(ids):
            _, box = np.unique(ids, return_inverse=True)
            alike = alike + (int(alike.max(initial=0)) + 1) * box.reshape(-1)
        _, first_of_group, group = np.unique(alike, return_index=True, return_inverse=True)
        return FileForm(tensors, group.reshape(-1).astype(np.int64), first_of_group.astype(np.int64))
