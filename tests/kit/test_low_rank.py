"""Messages of low rank: the rank that keeps an energy, what is sent whole, how far the result is off, contracts."""

import math

import numpy as np
import pytest
import torch

from potluck.core.contract import check, largest_size, shapes_of, state_of
from potluck.core.message import Message
from potluck.core.rng import Rng
from potluck.core.values import excess, said_of
from potluck.engine.norms import parts_of
from potluck.errors import ConfigError, MessageError
from potluck.kit.low_rank import LowRank, decode, encode

EPS = torch.finfo(torch.float32).eps


def random(*shape):
    return torch.from_numpy(Rng(3).child(*shape).numpy().standard_normal(shape).astype(np.float32))


def with_singular_values(*values, rows=20, columns=30):
    draw = Rng(1).numpy()
    u, _ = np.linalg.qr(draw.standard_normal((rows, len(values))))
    v, _ = np.linalg.qr(draw.standard_normal((columns, len(values))))
    return torch.from_numpy(((u * values) @ v.T).astype(np.float32))


def rank_of(encoded, name="w"):
    return len(encoded[f"{name}:s"])


@pytest.mark.parametrize(
    ("energy", "rank"), [(0.1, 1), (0.64, 1), (0.65, 2), (13 / 14 - 1e-3, 2), (13 / 14 + 1e-3, 3)]
)
def test_the_least_rank_that_keeps_the_energy(energy, rank):
    """σ² are 9, 4 and 1: a share of 9/14, 13/14 and all of it."""
    assert rank_of(encode({"w": with_singular_values(3.0, 2.0, 1.0)}, energy)) == rank


@pytest.mark.parametrize("energy", [0.3, 0.6, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("shape", [(10, 512), (40, 60), (8, 4, 3, 3), (6, 50, 1, 1)])
def test_no_tensor_is_lost_and_the_error_is_within_what_is_left_out(shape, energy):
    """A strict test over prefixes shorter than the full rank gives a random 10×512 head rank 0 at 0.95: all zero.

    The bound: √(1 − e)·‖W‖ is left out, and the decomposition in float32 is off by a multiple of ε·‖W‖ that grows
    with the square root of the size at most.
    """
    w = random(*shape)
    found = decode(encode({"w": w}, energy), {"w": w})["w"]
    assert found.shape == w.shape
    rounding = 10 * math.sqrt(max(shape[0], w[0].numel())) * EPS
    assert float((found - w).norm() / w.norm()) <= math.sqrt(1 - energy) + rounding
    assert float(found.norm() / w.norm()) >= math.sqrt(energy) - rounding


def test_a_convolution_is_one_matrix_and_not_one_per_kernel():
    """Decomposing every 3×3 kernel would give singular values of shape 8×4×3, and a message longer than it."""
    channels, rest = random(8), random(4, 3, 3)
    w = channels.view(8, 1, 1, 1) * rest
    encoded = encode({"w": w}, 0.95)
    assert {name: tuple(value.shape) for name, value in encoded.items()} == {
        "w:u": (8, 1),
        "w:s": (1,),
        "w:v": (1, 36),
    }
    assert Message({"w": encoded}).scalars == 1 * (8 + 36 + 1) < w.numel()
    torch.testing.assert_close(decode(encoded, {"w": w})["w"], w, rtol=1e-4, atol=1e-5)


def test_a_tensor_is_sent_whole_where_its_factors_would_not_be_smaller():
    """r(m + n + 1) ≥ mn: at full rank always; 2 by 2 even at rank 1; and what has one dimension."""
    tensors = {"square": random(30, 30), "tiny": random(2, 2), "bias": random(9), "one": random()}
    encoded = encode(tensors, 1.0)
    assert encoded.keys() == tensors.keys()
    assert all(encoded[name] is value for name, value in tensors.items())
    # Rank 9 of a 20×20 matrix has 369 numbers, rank 10 has 410.
    for rank, whole in ((9, False), (10, True)):
        w = with_singular_values(*[1.0] * rank, rows=20, columns=20)
        assert ("w" in encode({"w": w}, 0.999)) == whole


def test_channels_last_and_double_precision_are_kept():
    w = random(8, 4, 3, 3).double().to(memory_format=torch.channels_last)
    encoded = encode({"w": w}, 0.5)
    assert all(value.dtype == torch.float64 for value in encoded.values())
    found = decode(encoded, {"w": w})["w"]
    u, s, v = np.linalg.svd(w.numpy().reshape(8, -1), full_matrices=False)
    rank = rank_of(encoded)
    np.testing.assert_allclose(found.reshape(8, -1), (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-12)


def test_zeros_and_extreme_values_and_what_is_not_finite():
    zeros = encode({"w": torch.zeros(20, 30)}, 0.95)
    assert rank_of(zeros) == 1
    assert not decode(zeros, {"w": torch.zeros(20, 30)})["w"].any()
    huge = {"w": torch.full((20, 30), 1e38)}  # its singular value, 2.4e39, is not a float32
    assert encode(huge, 0.95)["w"] is huge["w"]
    tiny = {"w": torch.full((20, 30), 1e-38)}
    torch.testing.assert_close(decode(encode(tiny, 0.95), tiny)["w"], tiny["w"], rtol=1e-4, atol=0)
    for value in (math.nan, math.inf):
        broken = {"w": random(20, 30), "b": random(20, 30)[:, :1] * random(30)}
        broken["w"][3, 4] = value
        encoded = encode(broken, 0.95)
        assert encoded["w"] is broken["w"]
        assert "b:u" in encoded


def test_the_energy_rises_and_stays():
    """e_t = T_start + (t + 1)/R·(T_end − T_start) with t from 0."""
    schedule = LowRank(rounds=10)
    assert [schedule.energy(number) for number in (1, 5, 10, 11)] == pytest.approx([0.953, 0.965, 0.98, 0.98])
    with pytest.raises(ConfigError, match="below start"):
        LowRank(start=0.9, end=0.5)
    with pytest.raises(ConfigError, match="rounds does nothing"):
        LowRank(start=0.9, end=0.9, rounds=7)


WHOLE = {"conv.weight": random(8, 1, 1, 1) * random(4, 3, 3), "bias": random(8)}
CONTRACT = {"small": state_of("small", "…", low_rank=True)}


def refusal(tensors, contract=CONTRACT):
    message = Message({"small": tensors})
    check(message, contract, {}, lambda part: shapes_of(WHOLE), "client 1")


def test_the_contract_takes_a_tensor_whole_or_in_factors():
    encoded = encode(WHOLE, 0.95)
    assert set(encoded) == {"conv.weight:u", "conv.weight:s", "conv.weight:v", "bias"}
    refusal(encoded)
    refusal(WHOLE)
    for one in (encoded, WHOLE):
        most = largest_size(CONTRACT, {}, lambda part: shapes_of(WHOLE))
        assert Message({"small": one}).nbytes <= most


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"conv.weight:s": None}, "factors of 'conv.weight'"),
        ({"conv.weight:v": None}, "factors of 'conv.weight'"),
        ({"conv.weight:u": torch.zeros(8, 2)}, "factors of 'conv.weight'"),
        ({"conv.weight:s": torch.zeros(())}, "factors of 'conv.weight'"),
        ({"conv.weight:x": torch.zeros(1)}, "factors of 'conv.weight'"),
        ({"conv.weight": WHOLE["conv.weight"]}, "whole and in factors"),
        ({"other:u": torch.zeros(8, 1)}, "belongs to no tensor"),
        ({"bias:s": torch.zeros(1)}, "factors of 'bias'"),
        ({"bias": None}, "'small/bias' is missing"),
        ({"bias": torch.zeros(9)}, "declared"),
        ({"conv.weight:s": torch.zeros(1).double()}, "has type"),
    ],
)
def test_the_contract_refuses_factors_that_do_not_fit(change, reason):
    tensors = {name: value for name, value in (encode(WHOLE, 0.95) | change).items() if value is not None}
    with pytest.raises(MessageError, match=reason):
        refusal(tensors)


def test_the_contract_bounds_the_rank_and_factors_must_be_declared():
    """The largest rank with 45·r < 288 is 6."""
    rank = {size: torch.zeros(*shape) for size, shape in (("u", (8, 7)), ("s", (7,)), ("v", (7, 36)))}
    tensors = {f"conv.weight:{name}": value for name, value in rank.items()} | {"bias": WHOLE["bias"]}
    with pytest.raises(MessageError, match="of one rank from 1 to 6"):
        refusal(tensors)
    with pytest.raises(MessageError, match="is not part of"):
        refusal(encode(WHOLE, 0.95), {"small": state_of("small", "…")})


def test_norms_are_those_of_the_tensor_whether_it_comes_whole_or_in_factors():
    """Singular values have the norm of their tensor, so the form of a message gets nobody around them."""
    whole = {"w": with_singular_values(3.0, 2.0)}
    forms = [encode(whole, 0.5), encode(whole, 0.999), whole]
    parts = [part for form in forms for part in parts_of(Message({"small": form}), CONTRACT)]
    assert {(part.name, part.form, part.size) for part in parts} == {("small/w", ("small/w", 20, 30), 600)}
    assert [part.tensors for part in parts] == [("small/w:s",), ("small/w:s",), ("small/w",)]


def test_factors_outside_their_ranges_are_found():
    encoded = encode(WHOLE, 0.95)
    assert float(excess(Message({"small": encoded}), CONTRACT, {})) == 0
    for name, value in (("u", 1.1), ("v", -1.1), ("s", -0.1)):
        wrong = encoded | {f"conv.weight:{name}": torch.full_like(encoded[f"conv.weight:{name}"], value)}
        assert float(excess(Message({"small": wrong}), CONTRACT, {})) > 0
    said = "factors u and v from -1 to 1, and s from 0 on, whose product is no longer than s"
    assert said_of(CONTRACT["small"], {}) == said


def test_the_product_of_factors_is_not_longer_than_its_singular_values():
    """Norms are compared by singular values: no vectors of another length, or all the same, may hide it."""
    encoded = encode({"w": with_singular_values(3.0, 2.0) * 1e18}, 0.99)
    assert float(excess(Message({"small": encoded}), CONTRACT, {})) == 0
    u, v = encoded["w:u"], encoded["w:v"]
    for wrong in (
        {"w:u": torch.ones_like(u)},
        {"w:v": torch.ones_like(v)},
        {"w:u": u[:, :1].expand_as(u), "w:v": v[:1].expand_as(v)},
    ):
        assert float(excess(Message({"small": encoded | wrong}), CONTRACT, {})) > 0


def test_a_tensor_of_zeros_and_one_of_full_rank_stay_within():
    for value in (torch.zeros(20, 30), with_singular_values(3.0, 2.0), torch.ones(20, 30)):
        for energy in (0.95, 1.0):
            sent = Message({"small": encode({"w": value}, energy)})
            assert not excess(sent, CONTRACT, {}) or float(excess(sent, CONTRACT, {})) == 0
