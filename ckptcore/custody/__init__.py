"""Decide what may be deleted or replaced: each content of it is proven elsewhere now, or named by a user.

holdings        what a checkpoint holds, by content ids, from stored sums or by reading
obligations     what must not go, because what held it was deleted in favour of a copy
gate            may this destination be replaced?
set_aside       move what goes out of sight first, so that it can be restored
distinct        are two checkpoints different files, and not one under two names?
"""
