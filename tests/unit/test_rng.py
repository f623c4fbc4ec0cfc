"""The named streams and the noise source, against independent re-computation."""

import copy
import hashlib
import json
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fl_app import parallel
from fl_app.errors import PrivacyError
from fl_app.rng import NoiseSource, derive_seed, noise_source, stream


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reference_gaussian(key: bytes, size: int) -> list[float]:
    """Box-Muller in plain Python over the keystream made block by block with ECB."""
    pairs = (size + 1) // 2
    ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    stream_bytes = b"".join(ecb.update(n.to_bytes(16, "big")) for n in range(pairs))
    words = [
        int.from_bytes(stream_bytes[i : i + 8], "little") >> 11 for i in range(0, 16 * pairs, 8)
    ]
    radii = [math.sqrt(-2 * math.log((w + 1) / 2**53)) for w in words[:pairs]]
    angles = [2 * math.pi * w / 2**53 for w in words[pairs:]]
    cosines = [r * math.cos(a) for r, a in zip(radii, angles, strict=True)]
    return (cosines + [r * math.sin(a) for r, a in zip(radii, angles, strict=True)])[:size]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
def test_seeded_noise_equals_an_independent_box_muller_over_aes(size: int) -> None:
    key = hashlib.sha256(json.dumps(["noise", 5, "training", 2, 3]).encode()).digest()
    got = NoiseSource.seeded_from(5, "training", 2, 3).gaussian(size)
    np.testing.assert_allclose(got, reference_gaussian(key, size), rtol=1e-12, atol=1e-12)


def test_all_bits_zero_or_one_give_finite_samples() -> None:
    source = NoiseSource.seeded_from(0, "edge")
    for word in (0, 2**53 - 1):
        words = np.full(8, word, np.uint64)
        fake = type("Fake", (NoiseSource,), {"_words": lambda self, count, w=words: w[:count]})
        samples = fake(bytes(32), seeded=True).gaussian(8)
        assert np.isfinite(samples).all()
        assert np.abs(samples).max() <= math.sqrt(106 * math.log(2)) + 1e-9
    assert source.seeded


def test_successive_draws_and_blocks_do_not_repeat() -> None:
    source = NoiseSource.seeded_from(0, "blocks")
    values = np.concatenate([source.gaussian(100_001), source.gaussian(3), source.gaussian(3)])
    assert len(np.unique(values)) == len(values)


def test_seeded_sources_repeat_and_differ_by_every_argument() -> None:
    def first(*args: object) -> bytes:
        return NoiseSource.seeded_from(*args).gaussian(4).tobytes()  # type: ignore[arg-type]

    assert first(0, "a", 1, 2) == first(0, "a", 1, 2)
    variants = [
        (0, "a", 1, 2),
        (1, "a", 1, 2),
        (0, "b", 1, 2),
        (0, "a", 2, 1),
        (0, "a", 12),
        (0, "a"),
    ]
    assert len({first(*v) for v in variants}) == len(variants)


def test_os_sources_differ_although_everything_else_is_equal() -> None:
    a, b = (noise_source("training", 1, 1, seed=None) for _ in range(2))
    assert not a.seeded
    assert not np.any(a.gaussian(1000) == b.gaussian(1000))


def test_seed_zero_is_a_seed() -> None:
    assert noise_source("x", 1, seed=0).seeded


def test_noise_does_not_follow_the_stream_of_the_same_name() -> None:
    seed = derive_seed(3, "x", 1)
    assert derive_seed(3, "x", 1) == seed
    assert NoiseSource.seeded_from(3, "x", 1).gaussian(1)[0] != stream(3, "x", 1).normal()


def test_derived_seed_is_the_leading_63_bits_of_sha256() -> None:
    digest = hashlib.sha256(b'["seed", 7, "batches", 1, 2]').digest()
    assert derive_seed(7, "batches", 1, 2) == int.from_bytes(digest, "big") >> 193
    assert derive_seed(7, "batches", np.int64(1), np.int64(2)) == derive_seed(7, "batches", 1, 2)


def test_derived_seeds_tell_all_arguments_apart() -> None:
    seeds = {derive_seed(s, p, *n) for s in (0, 1) for p in "ab" for n in [(), (1,), (1, 2), (12,)]}
    assert len(seeds) == 16
    assert all(0 <= s < 2**63 for s in seeds)


def test_streams_repeat() -> None:
    assert np.array_equal(stream(1, "cohort", 2).random(9), stream(1, "cohort", 2).random(9))
    assert not np.array_equal(stream(1, "cohort", 2).random(9), stream(1, "cohort", 3).random(9))


@pytest.mark.parametrize("clone", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_source_cannot_be_pickled_or_copied(clone: object) -> None:
    with pytest.raises(PrivacyError, match="pickled or copied"):
        clone(NoiseSource.from_os())  # type: ignore[operator]


def in_fork(source: NoiseSource) -> bytes:
    """Returns what a forked child draws from `source`, or the name of the error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, source.gaussian(8).tobytes())
        except PrivacyError:
            os.write(write, b"PrivacyError")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result


def test_s12_forked_workers_do_not_share_noise() -> None:
    source = NoiseSource.from_os()
    source.gaussian(8)
    draws = [np.frombuffer(in_fork(source)) for _ in range(2)] + [source.gaussian(8)]
    assert len(np.unique(np.concatenate(draws))) == 24


def test_a_seeded_source_refuses_to_go_on_in_a_fork() -> None:
    assert in_fork(NoiseSource.seeded_from(0, "x")) == b"PrivacyError"


def test_added_noise_is_the_drawn_noise_times_std() -> None:
    vector = np.arange(100_000, dtype=np.float64)
    NoiseSource.seeded_from(0, "x").add_gaussian(vector, 2.5)
    source = NoiseSource.seeded_from(0, "x")
    parts = [source.gaussian(n) for n in (32768, 32768, 32768, 1696)]
    np.testing.assert_allclose(vector - np.arange(100_000), 2.5 * np.concatenate(parts), atol=1e-9)


def keystream(key: bytes, num_words: int) -> bytes:
    ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return b"".join(ecb.update(n.to_bytes(16, "big")) for n in range(-(-num_words // 2)))


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_threads_use_every_word_of_one_keystream_once(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded words of all threads, as a multiset, are the first words that AES makes."""
    key, size, drawn = bytes(range(32)), 3 * 32768 + 17, []
    genuine = NoiseSource._raw_words

    def recorded(self: NoiseSource, count: int) -> np.ndarray:
        words = genuine(self, count)
        drawn.append(words.copy())
        return words

    monkeypatch.setattr(NoiseSource, "_raw_words", recorded)
    source = NoiseSource(key, seeded=True)
    source.uniform(3)  # an odd number: later draws begin in the middle of a cipher block
    with torch_threads(num_threads):
        source.add_gaussian(np.zeros(size), 1.0)
        source.add_laplace(np.zeros(size), 1.0)
    source.gaussian(2)
    # Three, the normals (of an odd size: one word more), the Laplace samples and two.
    num_words = 3 + (size + 1) + size + 2
    words = np.concatenate(drawn)
    expected = np.frombuffer(keystream(key, num_words), "<u8")[:num_words]
    np.testing.assert_array_equal(np.sort(words), np.sort(expected))
    assert len(np.unique(words)) == num_words


@pytest.mark.parametrize("law", ["add_gaussian", "add_laplace"])
@pytest.mark.parametrize("size", [0, 5, 32768, 32769, 100_001])
def test_seeded_noise_is_the_same_for_any_number_of_threads(law: str, size: int) -> None:
    found = []
    for num_threads in (1, 2, 3, 8):
        source, vector = NoiseSource.seeded_from(0, "threads"), np.zeros(size)
        with torch_threads(num_threads):
            getattr(source, law)(vector, 2.5)
            found.append((vector.tobytes(), source.gaussian(3).tobytes()))
            assert torch.get_num_threads() == num_threads
    assert len(set(found)) == 1


def test_threads_of_an_os_source_share_no_noise() -> None:
    vector = np.zeros(200_000)
    with torch_threads(4):
        source = NoiseSource.from_os()
        source.add_gaussian(vector, 1.0)
        values = np.concatenate([vector, source.gaussian(1000)])
    assert len(np.unique(values)) == len(values)


def test_torch_starts_no_threads_within_a_thread() -> None:
    found = []
    with torch_threads(3):
        parallel.in_threads(lambda item: found.append(torch.get_num_threads()), [0, 1, 2])
    assert found == [1, 1, 1]


def test_an_error_in_one_thread_is_raised_and_leaves_torchs_threads_as_they_were() -> None:
    def fail(item: int) -> None:
        if item == 2:
            raise PrivacyError("two")

    with torch_threads(3):
        with pytest.raises(PrivacyError, match="two"):
            parallel.in_threads(fail, [0, 1, 2])
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 1, 32768, 32769, 200_000])
@pytest.mark.parametrize("most", [1 << 12, parallel._PART, 1 << 16])
def test_parts_cover_a_vector_once(size: int, num_threads: int, most: int) -> None:
    counts = np.zeros(size)
    lengths: list[int] = []

    def count(part: slice) -> None:
        counts[part] += 1
        lengths.append(part.stop - part.start)

    with torch_threads(num_threads):
        parallel.each_part(size, count, most)
        assert len(parallel.shares(size)) <= num_threads
    np.testing.assert_array_equal(counts, np.ones(size))
    assert max(lengths, default=0) <= most


def test_no_radius_is_the_root_of_a_negative_number() -> None:
    """Uniforms next to 1, whose logarithm must not round to above 0."""
    for start in range(0, 200_000, 16_384):
        words = np.uint64(2**53 - 1 - start) - np.arange(16_384, dtype=np.uint64)
        fake = type("Fake", (NoiseSource,), {"_words": lambda self, n, w=words: np.resize(w, n)})
        assert np.isfinite(fake(bytes(32), seeded=True).gaussian(2 * words.size)).all()


def test_std_zero_adds_nothing() -> None:
    vector = np.array([1.0, -0.0])
    NoiseSource.from_os().add_gaussian(vector, 0.0)
    assert vector.tobytes() == np.array([1.0, -0.0]).tobytes()


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_impossible_std_is_refused(std: float) -> None:
    with pytest.raises(PrivacyError, match="noise scale"):
        NoiseSource.from_os().add_gaussian(np.zeros(3), std)


def test_noise_is_not_added_in_float32() -> None:
    with pytest.raises(PrivacyError, match="float64"):
        NoiseSource.from_os().add_gaussian(np.zeros(3, np.float32), 1.0)  # type: ignore[arg-type]


def test_a_missing_os_generator_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(size: int) -> bytes:
        raise NotImplementedError

    monkeypatch.setattr(os, "urandom", missing)
    with pytest.raises(PrivacyError, match="no random generator"):
        NoiseSource.from_os()
