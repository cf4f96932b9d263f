"""Parse a training step, or a pipeline stage, from the name of a file or folder.

A module of its own: readers, the catalog's rows and sweeps must agree on it, and no other package is below
all of them.
"""

from __future__ import annotations

import re

# Trainers write step-300, step300-unsharded, iter_0000300, global_step_300, checkpoint-300, 300, and
# Lightning epoch=1-step=300.ckpt, and Composer ep0-ba300-rank0.pt.
_WORD = re.compile(
    r"(?:^|[^a-z])(?:global_?)?(?:step|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)", re.IGNORECASE
)
_COMPOSER = re.compile(r"^ep\d+-ba(\d+)(?:[-.]|$)")
_EPOCH = re.compile(r"^epoch[-_=]?(\d+)(?:[-_.].*)?$")
# A suffix or a variant may follow, as in 300.pt and 300-bf16; 1_Pooling is a module of sentence-transformers.
_PLAIN = re.compile(r"^[-_=]?(\d+)(?:[-.].*)?$")
_STAGE = re.compile(r"pp(?:[-_]?(?:rank|stage))?[-_]?(\d{1,6})")
_MOST = 1 << 62  # a name can have more digits than a database column


def step_of(name: str) -> int | None:
    """Return the step in a file's or folder's name, or None.

    >>> [step_of(n) for n in ("step-300", "iter_0000300", "epoch=1-step=300.ckpt", "300", "model")]
    [300, 300, 300, 300, None]
    >>> step_of("ep0-ba300-rank0.pt"), step_of("24_legacy"), step_of("300-bf16")
    (300, None, 300)
    """
    patterns = (_COMPOSER, _EPOCH, _PLAIN)
    match = _WORD.search(name) or next((m for pattern in patterns if (m := pattern.match(name))), None)
    # The length first: converting a long text of digits takes quadratic time.
    if not match or len(match[1]) > 19 or int(match[1]) > _MOST:
        return None
    return int(match[1])


def says_step(name: str) -> bool:
    """Report whether a name has a word for a step beside its number: one of several saves in a folder.

    >>> says_step("last-step=300.ckpt"), says_step("model-00001-of-00002.safetensors")
    (True, False)
    """
    word = _WORD.search(name) or _COMPOSER.match(name)
    return word is not None and step_of(name) is not None


def stage_of(folder: str) -> int | None:
    """Return the number of the pipeline stage that a folder is named after, or None.

    >>> [stage_of(name) for name in ("pp0", "pp_rank_3", "pp-1", "stage1", "app0")]
    [0, 3, 1, None, None]
    """
    match = _STAGE.fullmatch(folder)
    return int(match[1]) if match else None
