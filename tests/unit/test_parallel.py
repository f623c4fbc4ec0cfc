"""Work on long vectors in parts, and the memory that a process keeps."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fl_app import parallel


@pytest.mark.parametrize("size", [0, 1, parallel.BLOCK - 1, 3 * parallel.BLOCK + 5])
@pytest.mark.parametrize("part", [1 << 12, 1 << 16])
def test_parts_cover_every_element_once_and_are_no_longer_than_asked(size: int, part: int) -> None:
    seen = np.zeros(size)
    lengths: list[int] = []

    def count(where: slice) -> None:
        seen[where] += 1
        lengths.append(where.stop - where.start)

    parallel.each_part(size, count, part)
    assert (seen == 1).all()
    assert max(lengths, default=0) <= part


class _Library:
    """A C library; with `mallopt` if it is glibc."""

    def __init__(self, *, glibc: bool) -> None:
        self.options: dict[int, int] = {}
        if glibc:
            self.mallopt = self.options.__setitem__


@pytest.mark.parametrize("glibc", [True, False])
def test_memory_is_kept_where_the_c_library_can(
    glibc: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library(glibc=glibc)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    parallel.keep_freed_memory.__wrapped__()
    assert library.options == ({-1: 2**31 - 1, -3: 2**25} if glibc else {})
