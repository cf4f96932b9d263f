"""Damage to `.metadata` as a file: attacks, absurd contents, flipped bits, cuts."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path

from attacks import Evil, attack_payloads, crafted_metadata
from damaging import MALFORMED, Damage, Folder, Table, flip

TABLE = Table()


def _replace(folder: Folder, data: bytes) -> None:
    folder.meta.write_bytes(data)


def _attack(folder: Folder, name: str) -> None:
    folder.meta.write_bytes(attack_payloads(folder.sentinel)[name])


for _name in attack_payloads(Path()):
    TABLE.add(Damage(f"attack-metadata-{_name}", partial(_attack, name=_name), MALFORMED))
for _name, _data in crafted_metadata().items():
    TABLE.add(Damage(f"absurd-metadata-{_name}", partial(_replace, data=_data), MALFORMED))


@TABLE("unsafe", MALFORMED)
def attack_inside_good_metadata(folder: Folder) -> None:
    meta = folder.load()
    meta.planner_data = {**(meta.planner_data or {}), "hook": Evil(folder.sentinel)}
    folder.meta.write_bytes(pickle.dumps(meta, protocol=4))


@TABLE("unsafe", MALFORMED)
def attack_after_good_metadata(folder: Folder) -> None:
    """The call comes first and is thrown away: POP."""
    good = folder.meta.read_bytes()
    body = attack_payloads(folder.sentinel)["os.system"]
    assert good[:2] == body[:2] == b"\x80\x04"
    folder.meta.write_bytes(body[:-1] + b"0" + good[2:])


# --------------------------------------------------------------------------------- flipped bits


def _flip_at(folder: Folder, part: int, parts: int) -> None:
    size = folder.meta.stat().st_size
    flip(folder.meta, (size - 1) * part // parts, bit=part % 8)


FLIPS = 24
for _part in range(FLIPS):
    TABLE.add(Damage(f"flip-metadata-{_part}", partial(_flip_at, part=_part, parts=FLIPS), harmless=True))
for _name, _share in (("quarter", 4), ("most", 1)):
    TABLE.add(
        Damage(
            f"metadata-cut-after-a-{_name}",
            lambda folder, share=_share: folder.meta.write_bytes(
                folder.meta.read_bytes()[: (folder.meta.stat().st_size - 20) // share]
            ),
            MALFORMED,
        )
    )
