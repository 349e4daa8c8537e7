"""The noise that samples a latent from its distribution: one fixed stream of normals for each key.

A generator's noise depends on the batch, the device and the version of torch, so a retry or another
GPU would change the data. Here a number is a pure function of (seed, key, element), the same bits
everywhere and for ever:

1. blake2b turns seed and key into 64 bits;
2. splitmix64's finaliser turns these and the number of a pair of elements into 64 bits more;
3. Box and Muller's method makes a pair of normals of them, in float64, rounded to float32.

Steps 2 and 3 use wrapping integers and what IEEE 754 defines to the last bit: +, -, *, / and sqrt.
Library logarithms and sines differ between devices, so both are polynomials here. Do not compile
this module, nor let two operations melt into one (addcmul, a fused multiply-add), nor divide by a
Python number (CUDA multiplies by its reciprocal). The golden digest in the tests must never change.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import factorial, prod

import torch

_SIGN = 1 << 63
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_LN2 = 0.6931471805599453
_STEP = 1.4629180792671596e-9  # pi / 2 over 2**30: of the angle within its quarter
_PAIRS_AT_ONCE = {"cpu": 1 << 15}  # what stays in a core's cache; elsewhere what fills a device
_PAIRS_ELSEWHERE = 1 << 22

# Taylor series in x ** 2, highest power first; on their ranges all are exact to 1e-13.
_ATANH = tuple(2 / n for n in (15, 13, 11, 9, 7, 5, 3, 1))  # 2 atanh(x) / x
_SIN = tuple((-1) ** (n // 2) / factorial(n) for n in (13, 11, 9, 7, 5, 3, 1))  # sin(x) / x
_COS = tuple((-1) ** (n // 2) / factorial(n) for n in (14, 12, 10, 8, 6, 4, 2, 0))  # cos(x)


def noise_keys(seed: int, keys: Sequence[str]) -> torch.Tensor:
    """Return 64 bits for each key under this seed, as int64."""
    digests = (
        blake2b(f"{seed}:{key}".encode(errors="surrogateescape"), digest_size=8).digest()
        for key in keys
    )
    numbers = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    return torch.tensor(numbers, dtype=torch.int64)


def mirrored_noise_key(key: str) -> str:
    """Return the key that decides the noise of a mirror image's latents."""
    return f"{key}:flipped"


def normal(keys: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return standard normals, float32 (len(keys), *shape), on the device of the keys.

    Each row depends on its key alone.
    """
    count = prod(shape)
    pairs = (count + 1) // 2
    out = torch.empty((len(keys), pairs, 2), dtype=torch.float32, device=keys.device)
    counters = _mix(torch.arange(1, pairs + 1, device=keys.device) * _signed(0x9E3779B97F4A7C15))
    wide = _PAIRS_AT_ONCE.get(keys.device.type, _PAIRS_ELSEWHERE)
    rows, columns = max(1, wide // max(1, pairs)), min(max(1, pairs), wide)
    for top in range(0, len(keys), rows):
        for left in range(0, pairs, columns):
            some = counters[left : left + columns] + keys[top : top + rows, None]
            _box_muller(_mix(some), out[top : top + rows, left : left + columns])
    return out.flatten(1)[:, :count].reshape(len(keys), *shape).contiguous()


def _signed(number: int) -> int:
    return number - (1 << 64) if number & _SIGN else number


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix 64 bits in place with splitmix64's finaliser.

    `>>` copies the sign, so each shift is masked.
    """
    bits ^= (bits >> 30) & ((1 << 34) - 1)
    bits *= _signed(0xBF58476D1CE4E5B9)
    bits ^= (bits >> 27) & ((1 << 37) - 1)
    bits *= _signed(0x94D049BB133111EB)
    bits ^= (bits >> 31) & ((1 << 33) - 1)
    return bits


def _box_muller(bits: torch.Tensor, out: torch.Tensor) -> None:
    """Turn each number of 64 bits into two normals, and write these to `out`.

    The high 32 bits make the radius, the low 30 the angle in a quarter, two more the signs.
    With the angle taken from the middle of the quarter, pi / 4 + x, cosine and sine are (cos x
    - sin x) / sqrt(2) and (cos x + sin x) / sqrt(2), and the sqrt(2) cancels the one in the
    radius, sqrt(-2 ln u).
    """
    radius = _minus_log((bits >> 32) & 0xFFFFFFFF).sqrt_()
    angle = (bits & 0x3FFFFFFF).double()
    angle -= (1 << 29) - 0.5
    angle *= _STEP
    square = angle * angle
    sine = _polynomial(square, _SIN).mul_(angle)
    cosine = _polynomial(square, _COS)
    out[..., 0] = _with_sign((cosine - sine).mul_(radius), bits << 32)
    out[..., 1] = _with_sign(cosine.add_(sine).mul_(radius), bits << 33)


def _minus_log(number: torch.Tensor) -> torch.Tensor:
    """Return -ln u of u = (2 number + 1) / 2 ** 33, which is never 0 nor 1.

    u = m * 2 ** k with m in [sqrt(1/2), sqrt(2)), and ln m = 2 atanh((m - 1) / (m + 1)).
    """
    bits = number.mul_(2).add_(1).double().view(torch.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    bits -= exponent << 52
    mantissa = bits.view(torch.float64)
    ratio = (mantissa - 1) / (mantissa + 1)
    log = _polynomial(ratio * ratio, _ATANH).mul_(ratio)
    return exponent.sub_(33).double().mul_(-_LN2).sub_(log)


def _polynomial(x: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
    value = x * factors[0]
    for factor in factors[1:-1]:
        value += factor
        value *= x
    value += factors[-1]
    return value


def _with_sign(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return values, with the sign flipped where the highest of the bits is set.

    `bits` is overwritten.
    """
    bits &= _signed(_SIGN)
    bits ^= value.view(torch.int64)
    return bits.view(torch.float64)
