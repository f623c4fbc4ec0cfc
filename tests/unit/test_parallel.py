"""The memory that a process keeps; work on long vectors in parts is tested in test_rng.py."""

from __future__ import annotations

import ctypes

import pytest

from fl_app import parallel


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
