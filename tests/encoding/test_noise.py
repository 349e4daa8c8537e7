"""The noise of a sample: fixed for ever, its key's alone, and by the definition normal."""

import hashlib
from math import pi

import numpy as np
import pytest
import torch

from wdsprep.encoding.models.noise import noise_keys, normal

NAMES = [f"{number:09d}" for number in range(300)]
SHAPE = (4, 32, 32)


def digest(numbers: torch.Tensor) -> str:
    return hashlib.sha256(numbers.numpy().astype("<f4").tobytes()).hexdigest()


def test_noise_is_frozen():
    keys = noise_keys(42, ["000000000", "000000001", "é/x"])
    assert keys.tolist() == KEYS
    assert digest(normal(keys, SHAPE)) == NORMALS
    assert digest(normal(keys, (16, 64, 64))) == MORE_NORMALS


KEYS = [2645044476665743159, 4788667095853961767, -4254620113752024521]
NORMALS = "96ab042a802b21c32b92f0707bd3892e87748c6a7d1a4d7ad6e6b5f24ce43094"
MORE_NORMALS = "23ee461321f96328405b665113dfb103b00e747c7445ede4e78d549334b66409"


def mixed(bits: np.ndarray) -> np.ndarray:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits


def by_numpy(keys: torch.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """The same definition, written with unsigned integers and numpy's log, cos and sin."""
    pairs = int(np.prod(shape)) // 2
    counters = mixed(np.arange(1, pairs + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    bits = mixed(keys.numpy().view(np.uint64)[:, None] + counters)
    radius = np.sqrt(-2 * np.log(((bits >> np.uint64(32)).astype(float) + 0.5) / 2**32))
    angle = ((bits % np.uint64(1 << 30)).astype(float) + 0.5) / 2**30 * pi / 2
    signs = [1.0 - 2 * (bits >> np.uint64(bit) & np.uint64(1)).astype(float) for bit in (31, 30)]
    both = signs[0] * radius * np.cos(angle), signs[1] * radius * np.sin(angle)
    return np.stack(both, -1).reshape(len(keys), *shape)


def test_noise_is_box_and_mullers_to_the_last_bit_of_float32():
    keys = noise_keys(7, NAMES)
    wanted = by_numpy(keys, SHAPE)
    found = normal(keys, SHAPE).numpy()
    np.testing.assert_allclose(found, wanted, rtol=6.0e-8, atol=1e-12)  # half a bit
    assert (found == wanted.astype(np.float32)).mean() > 0.99999


def key_of_bits(bits: int) -> int:
    """The key whose first pair of normals is made of these bits."""
    for shift, factor in ((31, 1), (27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        bits = bits * pow(factor, -1, 1 << 64) % (1 << 64)
        bits ^= bits >> shift ^ bits >> 2 * shift
    first = mixed(np.array([1], np.uint64) * np.uint64(0x9E3779B97F4A7C15)).item()
    return int(np.uint64((bits - first) % (1 << 64)).view(np.int64))


@pytest.mark.parametrize("high", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0xB504F333, 0xB504F334])
@pytest.mark.parametrize("low", [0, 0x3FFFFFFF, 0x20000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_ends_of_every_range_are_finite_and_right(high: int, low: int):
    found = normal(torch.tensor([key_of_bits(high << 32 | low)]), (2,))
    radius = np.sqrt(-2 * np.log((high + 0.5) / 2**32))
    angle = (low % 2**30 + 0.5) / 2**30 * pi / 2
    wanted = [radius * np.cos(angle), radius * np.sin(angle)]
    wanted = [-size if low >> bit & 1 else size for size, bit in zip(wanted, (31, 30), strict=True)]
    np.testing.assert_allclose(found[0].numpy(), wanted, rtol=6.0e-8, atol=1e-12)


def test_noise_of_a_key_is_the_same_in_every_batch():
    together = normal(noise_keys(1, NAMES), (3, 5, 7))
    order = [5, 299, 0, 5]
    assert torch.equal(normal(noise_keys(1, [NAMES[i] for i in order]), (3, 5, 7)), together[order])
    many = normal(noise_keys(1, 9 * NAMES), (3, 5, 7))  # computed in several blocks of rows
    assert torch.equal(many, together.repeat(9, 1, 1, 1))
    keys = noise_keys(1, NAMES[:3])
    long = normal(keys, (200_000,))  # and in several of a row
    np.testing.assert_allclose(long.numpy(), by_numpy(keys, (200_000,)), rtol=6.0e-8, atol=1e-12)


def test_noise_is_the_same_with_any_number_of_threads():
    keys, before = noise_keys(1, NAMES), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found.append(normal(keys, SHAPE))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_seed_and_key_both_count_and_are_told_apart():
    pairs = [(0, "1"), (0, "2"), (1, "1"), (1, "11"), (11, "1"), (1, ":1"), (-1, "1")]
    assert len({noise_keys(seed, [key]).item() for seed, key in pairs}) == len(pairs)


def test_a_key_of_any_bytes_has_noise():
    """As tars of other programs may name their members."""
    keys = ["a\udcff", "a\udcfe", "a"]
    assert len(set(noise_keys(0, keys).tolist())) == 3
