"""Texts of a pickle in columns: which of the known names does each of many spellings say?

Metadata of a large job spells every name once a rank. A hash of the bytes finds the known name for a
whole column, and the bytes are compared, so the hash need not be trusted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_QUICK = 1 << 16  # texts that are found by hash; more would cost more to sort than they save
_WORD = 8
_FACTORS = np.array([(0x9E3779B97F4A7C15 * (2 * k + 1)) & (1 << 64) - 1 for k in range(33)], np.uint64)
_TAILS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)


class Texts:
    """Distinct texts, numbered as they are met.

    values: the texts.
    """

    def __init__(self) -> None:
        self.values: list[str] = []
        self._ids: dict[bytes, int] = {}
        self._hashes, self._hashed = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._words = np.zeros((0, 0), np.uint64)
        self._lengths = np.zeros(0, np.int64)

    def add(self, raw: bytes) -> int:
        """The number of a text; raises `UnicodeDecodeError`."""
        at = self._ids.get(raw)
        if at is None:
            self.values.append(raw.decode("utf-8", "surrogatepass"))
            at = self._ids[raw] = len(self.values) - 1
        return at

    def find(self, data: bytes, words: npt.NDArray[np.uint64], begin: Ints, length: Ints) -> Ints:
        """int64 [n]: the numbers of the texts ``data[begin:begin + length]``, each up to 255 bytes.

        words: the eight bytes at each place of the data, little-endian.
        Raises `UnicodeDecodeError`.
        """
        if not len(begin):
            return np.zeros(0, np.int64)
        spelled = _spelled(words, begin, length)
        hashes = (spelled * _FACTORS[: spelled.shape[1]]).sum(axis=1, dtype=np.uint64)
        hashes += length.astype(np.uint64) * _FACTORS[32]
        found = self._look(spelled, hashes, length)
        rows = np.flatnonzero(found < 0)
        # Sorting anew is worth it for many; a few are looked up one by one.
        if len(self._hashes) >> 3 < len(rows) and len(self._hashes) < _QUICK:
            _, one = np.unique(hashes[rows], return_index=True)
            self._learn(data, begin, length, spelled, hashes, rows[one])
            found[rows] = self._look(spelled[rows], hashes[rows], length[rows])
        for row in np.flatnonzero(found < 0).tolist():
            at = int(begin[row])
            found[row] = self.add(data[at : at + int(length[row])])
        return found

    def _look(self, spelled: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64], length: Ints) -> Ints:
        """The numbers of those that are known by hash, -1 for the others."""
        if not len(self._hashes):
            return np.full(len(hashes), -1, np.int64)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        found = self._hashed[at]
        width = spelled.shape[1]
        known = np.zeros((len(found), width), np.uint64)
        known[:, : self._words.shape[1]] = self._words[at][:, :width]
        # Of equal lengths, so all words of a known text are among those that are compared.
        same = (self._lengths[at] == length) & (known == spelled).all(axis=1)
        return np.where(same, found, -1)

    def _learn(
        self,
        data: bytes,
        begin: Ints,
        length: Ints,
        spelled: npt.NDArray[np.uint64],
        hashes: npt.NDArray[np.uint64],
        rows: Ints,
    ) -> None:
        rows = rows[~np.isin(hashes[rows], self._hashes)][: _QUICK - len(self._hashes)]
        ids = np.array([self.add(data[int(begin[r]) : int(begin[r] + length[r])]) for r in rows], np.int64)
        both = np.concatenate([self._hashes, hashes[rows]])
        order = np.argsort(both)
        self._hashes, self._hashed = both[order], np.concatenate([self._hashed, ids])[order]
        self._lengths = np.concatenate([self._lengths, length[rows]])[order]
        self._words = np.concatenate(_padded(self._words, spelled[rows]))[order]


def _spelled(words: npt.NDArray[np.uint64], begin: Ints, length: Ints) -> npt.NDArray[np.uint64]:
    """uint64 [n, w]: the bytes of each text, filled up with zeros."""
    count = max(-(-int(length.max()) // _WORD), 1)
    out = np.empty((len(begin), count), np.uint64)
    for k in range(count):
        left = np.clip(length - _WORD * k, 0, _WORD)
        # A word behind a text's end is masked away; it need not lie inside the data.
        out[:, k] = words[np.where(left > 0, begin + _WORD * k, 0)] & _TAILS[left]
    return out


def _padded(*tables: npt.NDArray[np.uint64]) -> list[npt.NDArray[Any]]:
    width = max(t.shape[1] for t in tables)
    return [np.pad(t, ((0, 0), (0, width - t.shape[1]))) for t in tables]
