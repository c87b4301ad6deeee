"""Triton kernels of a convolution, its bias, ReLU and 2×2 max-pooling, forwards and backwards.

A pooled answer is the largest of four answers of the convolution. `choice` says which: 0 to 3 in the order of
reading, 4 where ReLU let nothing through, so that no gradient goes back. A value that is not a number wins, as in
torch. Convolutions are matrix products over unfolded patches that are never written. `PRECISION` is how tensor
cores multiply: `tf32`, or `tf32x3`, three products that are as exact as float32. No sum depends on the order in
which blocks run.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

DEAD = tl.constexpr(4)


@triton.jit
def _rounded(x, PRECISION: tl.constexpr):
    """Rounded to the ten bits that the tensor cores read; they would cut the others off."""
    if PRECISION == "tf32":
        return tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return x


@triton.jit
def _larger(best, choice, answer, number: tl.constexpr):
    wins = (answer > best) | (answer != answer)
    return tl.where(wins, answer, best), tl.where(wins, number, choice)


@triton.jit
def _let_through(best, choice):
    return tl.where(best < 0, 0.0, best), tl.where(best <= 0, DEAD, choice)


@triton.jit
def _taps(k, height, width, SIDE: tl.constexpr):
    """Where the inputs of the weights are, seen from the first pixel of a patch."""
    channel, rest = k // (SIDE * SIDE), k % (SIDE * SIDE)
    return channel * height * width + (rest // SIDE) * width + rest % SIDE


@triton.jit
def forward(
    x, weight, bias, y, choice, positions, height, width, pooled_height, pooled_width,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pooled answers of BLOCK_P positions, all samples one after the other, and BLOCK_O output channels.

    Four rows of the product in a row are the answers that one is chosen of.
    """
    taps: tl.constexpr = CHANNELS * SIDE * SIDE
    plane = pooled_height * pooled_width
    m = tl.program_id(0) * 4 * BLOCK_P + tl.arange(0, 4 * BLOCK_P)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    sample, place = (m // 4) // plane, (m // 4) % plane
    row = 2 * (place // pooled_width) + (m % 4) // 2
    column = 2 * (place % pooled_width) + m % 2
    first = sample * CHANNELS * height * width + row * width + column
    inside, known = m < 4 * positions, o < OUT
    total = tl.zeros((4 * BLOCK_P, BLOCK_O), tl.float32)
    for start in range(0, taps, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        own = tl.load(
            weight + o[None, :] * taps + k[:, None], mask=known[None, :] & (k < taps)[:, None], other=0.0
        )
        pixels = tl.load(
            x + first[:, None] + _taps(k, height, width, SIDE)[None, :],
            mask=inside[:, None] & (k < taps)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(
            _rounded(pixels, PRECISION), _rounded(own, PRECISION), total, input_precision=PRECISION
        )
    upper_left, upper_right, lower_left, lower_right = _of_four(total, BLOCK_P, BLOCK_O)
    best, chosen = upper_left, tl.zeros((BLOCK_P, BLOCK_O), tl.int32)
    best, chosen = _larger(best, chosen, upper_right, 1)
    best, chosen = _larger(best, chosen, lower_left, 2)
    best, chosen = _larger(best, chosen, lower_right, 3)
    best, chosen = _let_through(best + tl.load(bias + o, mask=known, other=0.0)[None, :], chosen)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    at = ((p // plane) * OUT * plane + p % plane)[:, None] + (o * plane)[None, :]
    written = (p < positions)[:, None] & known[None, :]
    tl.store(y + at, best, mask=written)
    tl.store(choice + at, chosen.to(tl.int8), mask=written)


@triton.jit
def _of_four(total, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """Rows 0, 1, 2 and 3 of every four."""
    square = tl.permute(tl.reshape(total, (BLOCK_P, 2, 2, BLOCK_O)), (0, 3, 1, 2))
    left, right = tl.split(square)
    upper_left, lower_left = tl.split(left)
    upper_right, lower_right = tl.split(right)
    return upper_left, upper_right, lower_left, lower_right


@triton.jit
def input_patches(
    gradient, choice, weight, patches, positions, plane,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_U: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the patches that the pooled answers come from; `overlapped` adds them up to those of the input.

    A patch has the pixels of all four answers, one row and column more than the convolution has. So a pooled
    gradient is read once, and is multiplied by the weights moved to where the chosen answer was.
    """
    wide: tl.constexpr = SIDE + 1
    taps: tl.constexpr = CHANNELS * SIDE * SIDE
    patch: tl.constexpr = CHANNELS * wide * wide
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    u = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    inside, real = p < positions, u < patch
    at = (p // plane) * OUT * plane + p % plane
    q = tl.arange(0, 4 * BLOCK_O)
    row = ((u // wide) % wide)[None, :] - ((q % 4) // 2)[:, None]
    column = (u % wide)[None, :] - (q % 2)[:, None]
    moved = (q // 4 * taps)[:, None] + (u // (wide * wide) * SIDE * SIDE)[None, :] + row * SIDE + column
    covered = (row >= 0) & (row < SIDE) & (column >= 0) & (column < SIDE) & real[None, :]
    number = tl.arange(0, 4)[None, None, :]
    total = tl.zeros((BLOCK_P, BLOCK_U), tl.float32)
    for start in range(0, OUT, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        read = inside[:, None] & (o < OUT)[None, :]
        here = at[:, None] + (o * plane)[None, :]
        chosen = tl.load(choice + here, mask=read, other=DEAD).to(tl.int32)
        steep = _rounded(tl.load(gradient + here, mask=read, other=0.0), PRECISION)
        apart = tl.where(chosen[:, :, None] == number, steep[:, :, None], 0.0)
        own = tl.load(
            weight + start * taps + moved, mask=covered & (start + q // 4 < OUT)[:, None], other=0.0
        )
        total = tl.dot(
            tl.reshape(apart, (BLOCK_P, 4 * BLOCK_O)), _rounded(own, PRECISION), total,
            input_precision=PRECISION,
        )  # fmt: skip
    tl.store(patches + p[:, None] * patch + u[None, :], total, mask=inside[:, None] & real[None, :])


@triton.jit
def overlapped(
    patches, gradient, count, height, width, pooled_height, pooled_width,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of every input: the sum over the patches of `input_patches` that it is part of."""
    wide: tl.constexpr = SIDE + 1
    patch: tl.constexpr = CHANNELS * wide * wide
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y, x, image = (e // width) % height, e % width, e // (width * height)
    first = (image // CHANNELS) * pooled_height * pooled_width * patch + (image % CHANNELS) * wide * wide
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range((wide + 1) // 2):
        row, above = y % 2 + 2 * i, y // 2 - i
        for j in tl.static_range((wide + 1) // 2):
            column, left = x % 2 + 2 * j, x // 2 - j
            there = (row < wide) & (above >= 0) & (above < pooled_height)
            there = there & (column < wide) & (left >= 0) & (left < pooled_width) & (e < count)
            at = (above * pooled_width + left) * patch + row * wide + column
            total += tl.load(patches + first + at, mask=there, other=0.0)
    tl.store(gradient + e, total, mask=e < count)


@triton.jit
def weight_gradients(
    x, gradient, choice, sums, positions, each, height, width, pooled_height, pooled_width,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_U: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of gradients and unfolded patches over `each` positions: one of many parts to be added up.

    Four rows of the patches in a row belong to the answers that one was chosen of; the gradients of the other three
    are zero. The sums of the gradients, for the bias, come last.
    """
    taps: tl.constexpr = CHANNELS * SIDE * SIDE
    plane = pooled_height * pooled_width
    part = tl.program_id(0)
    u = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    o = tl.program_id(2) * BLOCK_O + tl.arange(0, BLOCK_O)
    known, real = o < OUT, u < taps
    tap = _taps(u, height, width, SIDE)
    number = tl.arange(0, 4)[None, None, :]
    q = tl.arange(0, 4 * BLOCK_P)
    end = min(positions, (part + 1) * each)
    total = tl.zeros((BLOCK_O, BLOCK_U), tl.float32)
    of_bias = tl.zeros((BLOCK_O,), tl.float32)
    for start in range(part * each, (part + 1) * each, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = ((p // plane) * OUT * plane + p % plane)[None, :] + (o * plane)[:, None]
        read = (p < end)[None, :] & known[:, None]
        chosen = tl.load(choice + at, mask=read, other=DEAD).to(tl.int32)
        steep = tl.load(gradient + at, mask=read, other=0.0)
        of_bias += tl.sum(tl.where(chosen == DEAD, 0.0, steep), 1)
        steep = _rounded(steep, PRECISION)
        apart = tl.where(chosen[:, :, None] == number, steep[:, :, None], 0.0)
        m = start + q // 4
        place = m % plane
        row = 2 * (place // pooled_width) + (q % 4) // 2
        column = 2 * (place % pooled_width) + q % 2
        first = (m // plane) * CHANNELS * height * width + row * width + column
        pixels = tl.load(
            x + first[:, None] + tap[None, :], mask=(m < end)[:, None] & real[None, :], other=0.0
        )
        total = tl.dot(
            tl.reshape(apart, (BLOCK_O, 4 * BLOCK_P)), _rounded(pixels, PRECISION), total,
            input_precision=PRECISION,
        )  # fmt: skip
    own = sums + part * OUT * (taps + 1)
    tl.store(own + o[:, None] * taps + u[None, :], total, mask=known[:, None] & real[None, :])
    if tl.program_id(1) == 0:
        tl.store(own + OUT * taps + o, of_bias, mask=known)


@triton.jit
def first_weight_gradients(
    x, gradient, choice, sums, positions, each, height, width, pooled_height, pooled_width,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_U: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of gradients and patches over `each` positions: one of many parts that `folded` adds up.

    For layers of few input channels, whose gradients take more memory than their patches. A patch has the pixels of
    all four answers, one row and column more than the convolution has. A row of the product is an output channel
    and one of the four choices, so every pixel is read once. The sums of the gradients, for the bias, come last.
    """
    patch: tl.constexpr = CHANNELS * (SIDE + 1) * (SIDE + 1)
    part = tl.program_id(0)
    o, u = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_U)
    known, real = o < OUT, u < patch
    number = tl.arange(0, 4)[None, :, None]
    plane = pooled_height * pooled_width
    tap = _taps(u, height, width, SIDE + 1)
    total = tl.zeros((4 * BLOCK_O, BLOCK_U), tl.float32)
    of_bias = tl.zeros((BLOCK_O,), tl.float32)
    for start in range(0, each, BLOCK_P):
        p = part * each + start + tl.arange(0, BLOCK_P)
        inside = (p < positions) & (p < (part + 1) * each)
        sample, place = p // plane, p % plane
        at = (sample * OUT * plane + place)[None, :] + (o * plane)[:, None]
        read = inside[None, :] & known[:, None]
        chosen = tl.load(choice + at, mask=read, other=DEAD).to(tl.int32)
        steep = tl.load(gradient + at, mask=read, other=0.0)
        of_bias += tl.sum(tl.where(chosen == DEAD, 0.0, steep), 1)
        steep = _rounded(steep, PRECISION)
        apart = tl.where(chosen[:, None, :] == number, steep[:, None, :], 0.0)
        corner = 2 * (place // pooled_width) * width + 2 * (place % pooled_width)
        pixels = tl.load(
            x + (sample * CHANNELS * height * width + corner)[:, None] + tap[None, :],
            mask=inside[:, None] & real[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(
            tl.reshape(apart, (4 * BLOCK_O, BLOCK_P)),
            _rounded(pixels, PRECISION),
            total,
            input_precision=PRECISION,
        )
    own = sums + part * OUT * (4 * patch + 1)
    r = tl.arange(0, 4 * BLOCK_O)
    tl.store(own + r[:, None] * patch + u[None, :], total, mask=(r < 4 * OUT)[:, None] & real[None, :])
    tl.store(own + 4 * OUT * patch + o, of_bias, mask=known)


@triton.jit
def folded(
    sums, gradient, parts,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, SIDE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights, then of the bias, from the parts of `first_weight_gradients`."""
    taps: tl.constexpr = CHANNELS * SIDE * SIDE
    patch: tl.constexpr = CHANNELS * (SIDE + 1) * (SIDE + 1)
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    weights, inside = e < OUT * taps, e < OUT * (taps + 1)
    o, k = e // taps, e % taps
    channel, row, column = k // (SIDE * SIDE), (k // SIDE) % SIDE, k % SIDE
    total = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    for start in range(0, parts, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        own = sums + (n * OUT * (4 * patch + 1))[:, None]
        there = (n < parts)[:, None] & inside[None, :]
        for number in tl.static_range(4):
            pixel = channel * (SIDE + 1) * (SIDE + 1) + (row + number // 2) * (SIDE + 1) + column + number % 2
            at = (4 * o + number) * patch + pixel
            total += tl.load(own + at[None, :], mask=there & weights[None, :], other=0.0)
        of_bias = 4 * OUT * patch + e - OUT * taps
        total += tl.load(own + of_bias[None, :], mask=there & (e >= OUT * taps)[None, :], other=0.0)
    tl.store(gradient + e, tl.sum(total, 0), mask=inside)
