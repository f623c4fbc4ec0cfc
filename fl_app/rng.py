"""Randomness: repeatable streams for everything but noise, a cryptographic generator for noise.

Data, initialization, cohort and batch streams derive from the run's seed by name (`stream`), so
that a simulation repeats. Noise comes from `NoiseSource`, whose key the operating system draws
afresh for every client and round.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from functools import partial
from typing import NoReturn, Self, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from fl_app import parallel
from fl_app.errors import PrivacyError
from fl_app.integer_noise import IntegerTable
from fl_app.stages import DoubleVector, IndexVector

_Vector = TypeVar("_Vector", DoubleVector, IndexVector)

_ZEROS = memoryview(bytes(8 * parallel.BLOCK))
_STEP = 2.0**-53


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """Returns a seed in [0, 2**63) that depends on every argument and on their order.

    Args:
        seed: the run's seed.
        purpose: what it is for, e.g. ``batches``; other purposes give unrelated seeds.
        numbers: e.g. round and client.
    """
    digest = _digest("seed", seed, purpose, numbers)
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Returns the generator of `derive_seed`, for everything that is drawn but never for noise."""
    return np.random.default_rng(derive_seed(seed, purpose, *numbers))


class NoiseSource:
    """Samples of noise from an AES-256-CTR keystream; one object per client and round.

    Two uniforms of 53 bits make two normals by the transform of Box and Muller (1958,
    doi:10.1214/aoms/1177706645). The first uniform lies in (0, 1], so no sample is infinite; no
    sample exceeds sqrt(106 ln 2) = 8.58, which cuts off a probability below 2**-53 per pair.

    A Laplace sample is the inverse of its distribution function at one uniform of 54 bits: a sign,
    and 53 bits that are exact in float64 and never 0. None exceeds 53 ln 2 = 36.7, which cuts off a
    probability of 2**-53. Integer noise comes from tables (`fl_app.integer_noise`).

    Guarantee:
        With an OS source, samples cannot be told from independent ones (rounded to float64)
        by anybody who lacks the key, as long as AES-256 is a pseudorandom function; no two sources
        share a key, nor does a forked child go on with its parent's. Not covered: attacks on the
        floating-point form of continuous noise (Mironov 2012, doi:10.1145/2382196.2382264),
        timing, and a virtual machine resumed twice from one snapshot.

    Attributes:
        seeded: True if the samples follow from a seed: repeatable and NOT PRIVATE.

    Objects cannot be pickled or copied, and one object is not for two threads: for a long vector
    each thread gets its own stretch of the keystream, so the noise is the same for any number.
    """

    __slots__ = ("_context", "_key", "_pid", "_position", "_scratch", "seeded")

    def __init__(self, key: bytes, *, seeded: bool) -> None:
        """Prefer `from_os` or `seeded_from`; `key` has 32 bytes and is used for nothing else."""
        self.seeded = seeded
        self._start(key)

    @classmethod
    def from_os(cls) -> Self:
        """Returns a source with a fresh key of the operating system; there is no weaker fallback.

        Raises:
            PrivacyError: the operating system has no cryptographic generator.
        """
        return cls(_os_key(), seeded=False)

    @classmethod
    def seeded_from(cls, seed: int, purpose: str, *numbers: int) -> Self:
        """Returns the source that these arguments determine: repeatable and NOT PRIVATE."""
        return cls(_digest("noise", seed, purpose, numbers), seeded=True)

    def gaussian(self, size: int) -> DoubleVector:
        """Returns `size` new standard normal samples.

        Raises:
            PrivacyError: a seeded source in a forked process, where its samples would repeat.
        """
        return self._drawn(np.empty(size), self._fill)

    def laplace(self, size: int) -> DoubleVector:
        """Returns `size` new Laplace samples of mean 0 and scale 1 (std sqrt(2)).

        Raises:
            PrivacyError: a seeded source in a forked process, where its samples would repeat.
        """
        return self._drawn(np.empty(size), self._fill_laplace)

    def uniform(self, size: int) -> DoubleVector:
        """Returns `size` new multiples of 2**-53, uniform in [0, 1).

        Raises:
            PrivacyError: a seeded source in a forked process, where its samples would repeat.
        """
        return self._drawn(np.empty(size), self._fill_uniform)

    def integers(self, law: IntegerTable, size: int) -> IndexVector:
        """Returns `size` new samples of an integer law, exact up to `law`'s own precision.

        Raises:
            PrivacyError: a seeded source in a forked process, where its samples would repeat.
        """
        return self._drawn(np.empty(size, np.int64), partial(self._fill_integers, law=law))

    def add_gaussian(self, vector_P: DoubleVector, std: float) -> None:
        """Adds independent normal noise of `std` to `vector_P` in place, block by block.

        A `std` of 0 adds nothing and draws nothing.

        Raises:
            PrivacyError: `vector_P` is not float64, `std` negative or not finite; or as `gaussian`.
        """
        self._add(vector_P, std, type(self).gaussian)

    def add_laplace(self, vector_P: DoubleVector, scale: float) -> None:
        """Adds independent Laplace noise of `scale` (std sqrt(2) `scale`), as `add_gaussian`."""
        self._add(vector_P, scale, type(self).laplace)

    def _add(
        self, vector_P: DoubleVector, scale: float, draw: Callable[[Self, int], DoubleVector]
    ) -> None:
        if vector_P.dtype != np.float64:
            raise PrivacyError(f"vector_P.dtype={vector_P.dtype}: noise is added in float64")
        if not (math.isfinite(scale) and scale >= 0):
            raise PrivacyError(f"noise scale={scale}: must be finite and >= 0; set 0 for no noise")
        if scale == 0:
            return
        self._check_process()
        shares = parallel.shares(vector_P.size)
        # A whole block takes as many words as it has elements, under both laws.
        sources = [self._set_apart(share.stop - share.start) for share in shares[:-1]] + [self]

        def add(job: tuple[Self, slice]) -> None:
            source, share = job
            for start in range(share.start, share.stop, parallel.BLOCK):
                part = vector_P[start : min(start + parallel.BLOCK, share.stop)]
                noise = draw(source, part.size)
                noise *= scale
                part += noise

        parallel.in_threads(add, list(zip(sources, shares, strict=True)))

    def _drawn(self, result: _Vector, fill: Callable[[_Vector], None]) -> _Vector:
        """Returns `result`, overwritten by `fill` block by block."""
        self._check_process()
        with parallel.one_torch_thread():
            for start in range(0, result.size, parallel.BLOCK):
                fill(result[start : start + parallel.BLOCK])
        return result

    def _start(self, key: bytes, position: int = 0) -> None:
        """Begins at word `position` of the only keystream that `key` makes, from counter zero."""
        counter = (position // 2).to_bytes(16, "big")
        self._context: CipherContext = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
        self._context.update(bytes(8 * (position % 2)))
        self._key, self._position, self._pid = key, position, os.getpid()
        self._scratch = np.empty(0, np.uint64)

    def _set_apart(self, num_words: int) -> Self:
        """Returns a source of the next `num_words` words only; this one goes on behind them."""
        source = type(self)(self._key, seeded=self.seeded)
        source._start(self._key, self._position)
        self._start(self._key, self._position + num_words)
        return source

    def _check_process(self) -> None:
        if self._pid == os.getpid():
            return
        if self.seeded:
            raise PrivacyError(
                "noise source: a seeded source cannot be used in a forked process, where its noise "
                "would repeat; make one there"
            )
        self._start(_os_key())

    def _fill(self, out: DoubleVector) -> None:
        """Overwrites `out` (one block at most) with normals; of an odd pair one is lost."""
        pairs = (out.size + 1) // 2
        # Signed words become float64 several times as fast as unsigned ones.
        uniforms: DoubleVector = self._words(2 * pairs).view(np.int64).astype(np.float64)
        radius, angle = uniforms[:pairs], uniforms[pairs:]
        radius *= _STEP
        radius += _STEP
        angle *= _STEP * 2 * math.pi
        _apply(torch.log, radius, radius)
        radius *= -2.0
        np.sqrt(radius, out=radius)
        _apply(torch.cos, angle, out[:pairs])
        out[:pairs] *= radius
        rest = out.size - pairs
        _apply(torch.sin, angle[:rest], out[pairs:])
        out[pairs:] *= radius[:rest]

    def _fill_uniform(self, out: DoubleVector) -> None:
        """Overwrites `out` (one block at most)."""
        np.multiply(self._words(out.size), _STEP, out=out)

    def _fill_laplace(self, out: DoubleVector) -> None:
        """Overwrites `out` (one block at most): bit 0 is the sign, bits 11 to 63 the uniform."""
        words = self._raw_words(out.size)
        flips = ~words << np.uint64(63)  # the logarithm is negative; bit 0 says what stays so
        np.right_shift(words, np.uint64(11), out=words)
        np.copyto(out, words.view(np.int64))
        out *= _STEP
        out += _STEP
        _apply(torch.log, out, out)
        out.view(np.uint64)[:] ^= flips

    def _fill_integers(self, out: IndexVector, law: IntegerTable) -> None:
        """Overwrites `out` (one block at most): the low bits pick a column, the rest compare."""
        words = self._raw_words(out.size)
        columns = (words & np.uint64((1 << law.index_bits) - 1)).astype(np.int64)
        np.right_shift(words, np.uint64(law.index_bits), out=words)
        high = law.high.take(columns)
        own = words < high
        undecided = np.flatnonzero(words == high)
        if undecided.size:
            own[undecided] = self._raw_words(undecided.size) < law.low[columns[undecided]]
        np.copyto(out, columns)
        np.copyto(out, law.alias.take(columns), where=~own)
        out -= law.largest

    def _words(self, count: int) -> np.typing.NDArray[np.uint64]:
        """Returns the next `count` keystream words as numbers in [0, 2**53)."""
        words = self._raw_words(count)
        np.right_shift(words, np.uint64(11), out=words)
        return words

    def _raw_words(self, count: int) -> np.typing.NDArray[np.uint64]:
        """Returns the next `count` keystream words of 64 bits."""
        if self._scratch.size < count:
            self._scratch = np.empty(count, np.uint64)
        words = self._scratch[:count]
        self._context.update_into(_ZEROS[: 8 * count], words.view(np.uint8).data)
        self._position += count
        return words

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses pickling and copying: two processes must not share a keystream."""
        raise PrivacyError("noise source: cannot be pickled or copied; make one where it is used")


def noise_source(purpose: str, *numbers: int, seed: int | None) -> NoiseSource:
    """Returns a source of noise: from the operating system if `seed` is None, else NOT PRIVATE.

    Args:
        purpose: what it is for; together with `numbers` it tells seeded sources apart.
        numbers: e.g. round and client.
        seed: None, or the run's seed under ``run.seeded_noise=true``.
    """
    if seed is None:
        return NoiseSource.from_os()
    return NoiseSource.seeded_from(seed, purpose, *numbers)


def _apply(function: Callable[..., torch.Tensor], values: DoubleVector, out: DoubleVector) -> None:
    """Writes `function` of `values` to `out`.

    Without AVX-512 NumPy takes these functions one number at a time, torch several at once.
    """
    function(torch.from_numpy(values), out=torch.from_numpy(out))


def _digest(domain: str, seed: int, purpose: str, numbers: tuple[int, ...]) -> bytes:
    text = json.dumps([domain, int(seed), purpose, *(int(n) for n in numbers)])
    return hashlib.sha256(text.encode()).digest()


def _os_key() -> bytes:
    try:
        return os.urandom(32)
    except NotImplementedError as error:
        raise PrivacyError("noise source: the operating system has no random generator") from error
