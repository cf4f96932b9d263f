"""Damage the files of a checkpoint folder: remove, cut, swap or add them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from damaging import (
    ITEM,
    MALFORMED,
    PATH,
    Folder,
    NotApplicable,
    Place,
    Table,
    layout,
    patch,
    payload_at,
    records,
    rewrite,
    with_payload,
)

TABLE = Table()
NOT_THERE = frozenset({"not-complete", "unknown-format", "missing-rank", "missing-file"})
TORN = MALFORMED | {"truncated-file", "length-mismatch"} | ITEM

# ------------------------------------------------------------------------------ metadata files


@TABLE(NOT_THERE)
def metadata_missing(folder: Folder) -> None:
    for meta in folder.metas:
        meta.unlink()


@TABLE("not-complete", needs="global")
def metadata_tmp_only(folder: Folder) -> None:
    folder.meta.rename(folder.path / ".metadata.tmp")


@TABLE(NOT_THERE, "hole", "stray-file", needs="rank-local")
def one_rank_s_metadata_missing(folder: Folder) -> None:
    folder.metas[-1].unlink()


@TABLE(MALFORMED, NOT_THERE)
def metadata_empty(folder: Folder) -> None:
    folder.meta.write_bytes(b"")


@TABLE(MALFORMED)
def metadata_half(folder: Folder) -> None:
    data = folder.meta.read_bytes()
    folder.meta.write_bytes(data[: len(data) // 2])


@TABLE(MALFORMED)
def metadata_one_byte_short(folder: Folder) -> None:
    folder.meta.write_bytes(folder.meta.read_bytes()[:-1])


@TABLE(MALFORMED, harmless=True)
def metadata_with_a_tail(folder: Folder) -> None:
    folder.meta.write_bytes(folder.meta.read_bytes() + b"\x00" * 100)


@TABLE(MALFORMED)
def metadata_zeroed(folder: Folder) -> None:
    folder.meta.write_bytes(b"\x00" * folder.meta.stat().st_size)


@TABLE(MALFORMED)
def metadata_is_text(folder: Folder) -> None:
    folder.meta.write_text("{}\n" * 100)


@TABLE(MALFORMED, NOT_THERE, "source-unreadable")
def metadata_is_a_folder(folder: Folder) -> None:
    folder.meta.unlink()
    folder.meta.mkdir()


@TABLE(MALFORMED, NOT_THERE, PATH, "source-unreadable")
def metadata_is_a_pipe(folder: Folder) -> None:
    folder.meta.unlink()
    os.mkfifo(folder.meta)


@TABLE(MALFORMED, NOT_THERE, PATH, "source-unreadable")
def metadata_never_ends(folder: Folder) -> None:
    folder.meta.unlink()
    folder.meta.symlink_to("/dev/zero")


# ---------------------------------------------------------------------------------- data files


@TABLE("missing-file")
def biggest_file_missing(folder: Folder) -> None:
    folder.files()[0].unlink()


@TABLE("missing-file", needs="files")
def smallest_file_missing(folder: Folder) -> None:
    folder.files()[-1].unlink()


@TABLE("missing-file", "not-complete")
def all_files_missing(folder: Folder) -> None:
    for file in folder.path.glob("*.distcp"):
        file.unlink()


@TABLE("truncated-file")
def file_emptied(folder: Folder) -> None:
    folder.files()[0].write_bytes(b"")


@TABLE("truncated-file", "malformed-item")
def file_one_byte_short(folder: Folder) -> None:
    file = folder.files()[0]
    os.truncate(file, file.stat().st_size - 1)


@TABLE("truncated-file", "malformed-item")
def file_half(folder: Folder) -> None:
    file = folder.files()[-1]
    os.truncate(file, file.stat().st_size // 2)


@TABLE("oversized-file", "malformed-item", harmless=True)
def file_one_byte_long(folder: Folder) -> None:
    file = folder.files()[0]
    file.write_bytes(file.read_bytes() + b"\x00")


@TABLE("oversized-file", "malformed-item", harmless=True)
def file_with_a_tail(folder: Folder) -> None:
    file = folder.files()[0]
    file.write_bytes(file.read_bytes() + b"\xff" * 5000)


@TABLE(TORN)
def file_one_byte_shifted(folder: Folder) -> None:
    file = folder.files()[0]
    file.write_bytes(b"P" + file.read_bytes()[:-1])


@TABLE("missing-file", "source-unreadable", PATH)
def file_is_a_folder(folder: Folder) -> None:
    file = folder.files()[0]
    file.unlink()
    file.mkdir()


@TABLE("missing-file", "source-unreadable", "truncated-file", PATH)
def file_is_a_pipe(folder: Folder) -> None:
    file = folder.files()[0]
    file.unlink()
    os.mkfifo(file)


@TABLE("missing-file", "source-unreadable", "truncated-file", PATH)
def file_never_ends(folder: Folder) -> None:
    file = folder.files()[0]
    file.unlink()
    file.symlink_to("/dev/zero")


@TABLE("missing-file", "source-unreadable", PATH)
def file_links_to_itself(folder: Folder) -> None:
    file = folder.files()[0]
    file.unlink()
    file.symlink_to(file.name)


@TABLE(PATH)
def file_links_outside(folder: Folder) -> None:
    file = folder.files()[0]
    outside = folder.sentinel.with_name("outside.bin")
    shutil.move(file, outside)
    file.symlink_to(outside)


@TABLE(TORN, needs="files")
def files_swapped(folder: Folder) -> None:
    one, two = swappable(folder)
    (a, b) = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)


def swappable(folder: Folder) -> tuple[Path, Path]:
    """Two files with different content, of equal layout where there are such."""
    files = [f for f in folder.files() if f.stat().st_size]
    pairs = [(a, b) for i, a in enumerate(files) for b in files[i + 1 :] if a.read_bytes() != b.read_bytes()]
    if not pairs:
        raise NotApplicable("all files are equal")
    return min(pairs, key=lambda p: layout(folder, p[0]) != layout(folder, p[1]))


@TABLE(TORN, "oversized-file")
def file_of_another_checkpoint(folder: Folder) -> None:
    file = folder.files()[0]
    data = file.read_bytes()
    for other in folder.others:
        for foreign in sorted(other.glob("*.distcp"), key=lambda f: f.stat().st_size):
            if foreign.stat().st_size > 1000 and foreign.read_bytes() != data:
                shutil.copyfile(foreign, file)
                return
    raise NotApplicable("there is no other checkpoint")


@TABLE(TORN, "oversized-file")
def file_of_another_world_size(folder: Folder) -> None:
    """What one rank wrote of the same tensors when it was alone."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {}
    for place in folder.tensors()[:6]:
        meta = folder.load(place.metadata).state_dict_metadata[place.key.fqn]
        state[place.key.fqn] = torch.zeros(tuple(meta.size), dtype=meta.properties.dtype)
    alone = folder.sentinel.with_name("alone")
    dcp.save(state, checkpoint_id=alone, no_dist=True)
    file = folder.files()[0]
    if (alone / "__0_0.distcp").read_bytes() == file.read_bytes():
        raise NotApplicable("one rank wrote it")
    shutil.copyfile(alone / "__0_0.distcp", file)


@TABLE(needs="plain")
def file_of_another_step(folder: Folder) -> None:
    """Another save of the same model: the same layout, other values, right checksums."""

    def trained(place: Place, data: bytes) -> bytes | None:
        if not place.tensor or place.file != target:
            return None
        record = records(data)["data/0"]
        values = bytearray(data[record.data : record.data + record.size])
        values[::7] = bytes(v ^ 1 for v in values[::7])
        return with_payload(data, bytes(values))

    target = folder.tensors("zip")[0].file
    rewrite(folder, trained)


@TABLE(ITEM)
def zeroed_range(folder: Folder) -> None:
    place = folder.tensors()[0]
    start, length = payload_at(folder, place)
    data = place.file.read_bytes()[start : start + length]
    dirty = next((i for i, byte in enumerate(data) if byte), None)
    if dirty is None:
        raise NotApplicable("the biggest tensor is all zero")
    patch(place.file, start + dirty, b"\x00" * min(64, length - dirty))


@TABLE(ITEM)
def lost_page(folder: Folder) -> None:
    """A page that never reached the disk: zeros over headers and data alike."""
    file = folder.files()[0]
    patch(file, 0, b"\x00" * min(4096, file.stat().st_size))
