"""Arithmetic on flat vectors as long as a large model: block by block, in several threads.

A block stays in a core's cache while several operations go over it, and no temporary is as long as
the model. NumPy and the cipher work without Python's lock, so threads of one process suffice.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from fl_app.stages import DoubleVector

_Item = TypeVar("_Item")

BLOCK = 1 << 15
"""Shares of a vector are whole blocks of so many elements, whatever the number of threads."""
_PART = 1 << 14
"""Elements that `each_part` hands out at a time: 128 KiB in float64."""


def shares(size: int) -> list[slice]:
    """Returns consecutive ranges that cover `size` elements, at most one for each torch thread.

    Each begins at a multiple of `BLOCK`; the only one of no elements is that of an empty vector.
    """
    num_blocks = -(-size // BLOCK)
    step = max(1, -(-num_blocks // torch.get_num_threads())) * BLOCK
    return [slice(start, min(start + step, size)) for start in range(0, max(size, 1), step)]


def in_threads(work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Calls `work` with every item, each in a thread of its own if there are several.

    Raises:
        Exception: whatever the first call that failed has raised, once all have ended.
    """
    if len(items) == 1:
        work(items[0])
        return
    # The threads begin with this one's setting: torch must not start more from within each.
    with one_torch_thread(), ThreadPoolExecutor(len(items)) as pool:
        for _ in pool.map(work, items):
            pass


def each_part(size: int, work: Callable[[slice], None], part: int = _PART) -> None:
    """Calls `work` with ranges of at most `part` elements that cover `size` of them, in threads.

    By default they fit a core's cache.

    `work` must change nothing but those elements. Its result may depend on the range, which is the
    same for any number of threads, but not on the order of calls.
    """

    def go_through(share: slice) -> None:
        for start in range(share.start, share.stop, part):
            work(slice(start, min(start + part, share.stop)))

    in_threads(go_through, shares(size))


def divide(vector_P: DoubleVector, divisor: float) -> None:
    """Divides `vector_P` in place."""

    def work(part: slice) -> None:
        vector_P[part] /= divisor

    each_part(vector_P.size, work)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch's operations within start no threads."""
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@functools.cache
def keep_freed_memory() -> None:
    """This process no longer hands memory back to the system that its next step asks for again.

    Fetching and clearing it took a quarter of the time of a step whose tensors have some 10 MB.
    Blocks above 32 MiB still come and go. Done where the C library has glibc's ``mallopt``; the
    numbers are those of its ``malloc.h``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**25)
