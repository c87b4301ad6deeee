"""The contrastive losses: the spec's numbers, plain loops over tuples, masks, gradients, pieces, bad input."""

import itertools
import math

import pytest
import torch
from torch import nn

from potluck.core.rng import Rng
from potluck.errors import ConfigError
from potluck.kit.contrastive import (
    Temperatures,
    gramian,
    information_bounds,
    muscle,
    pairwise,
    theorem1_value,
)
from potluck.kit.contrastive.tuples import COPIES
from potluck.testing.cpu_capture import _Recorder

E = torch.eye(2, dtype=torch.float64)
SWAPPED = E.flip(0)
TILTED = torch.tensor([[0.6, 0.8], [0.8, -0.6]], dtype=torch.float64)
TUPLE = 4 * COPIES  # bytes
SMALL = 8 * TUPLE


def close(value, wanted, tolerance=1e-6):
    torch.testing.assert_close(value, torch.as_tensor(wanted, dtype=value.dtype), rtol=0, atol=tolerance)


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=Rng(seed).generator(), dtype=dtype)


def batch(samples=4, peers=3, width=5, dtype=torch.float64):
    return random(samples, width, dtype=dtype), [
        random(samples, width, dtype=dtype, seed=m + 1) for m in range(peers)
    ]


def unit(matrix):
    return matrix / matrix.norm(dim=1, keepdim=True)


def plain_muscle(anchor, peers, tau=0.2, tau_prev=0.15, has=None):
    """Every anchor's loss by the formula, one tuple at a time, over the peers that have the anchor's sample."""
    anchor, peers = unit(anchor), [unit(peer) for peer in peers]
    has = has or [[True] * len(anchor) for _ in peers]
    losses = []
    for i, z in enumerate(anchor):
        own = [m for m in range(len(peers)) if has[m][i]]

        def exponent(j, own=own, z=z):
            rows = [peers[m][row] for m, row in zip(own, j, strict=True)]
            agreement = sum(float(a @ b) for a, b in itertools.combinations(rows, 2))
            return sum(float(z @ row) for row in rows) / tau - (1 / tau_prev - 1 / tau) * agreement

        rows = [[j for j in range(len(anchor)) if has[m][j]] for m in own]
        total = sum(math.exp(exponent(j)) for j in itertools.product(*rows))
        losses.append(math.log(total) - exponent([i] * len(own)))
    return losses


def info_nce(anchor, peer, tau=0.2):
    """Every anchor's cross-entropy with its own sample among the rows of one peer."""
    return nn.functional.cross_entropy(
        unit(anchor) @ unit(peer).T / tau, torch.arange(len(anchor)), reduction="none"
    )


def plain_gramian(anchor, peers, tau=0.2, has=None):
    anchor, peers = unit(anchor), [unit(peer) for peer in peers]
    has = has or [[True] * len(anchor) for _ in peers]
    losses = []
    for i, z in enumerate(anchor):
        own = [m for m in range(len(peers)) if has[m][i]]

        def exponent(j, own=own, z=z):
            vectors = torch.stack([z, *(peers[m][row] for m, row in zip(own, j, strict=True))])
            return -float(torch.linalg.det(vectors @ vectors.T).sqrt()) / tau

        rows = [[j for j in range(len(anchor)) if has[m][j]] for m in own]
        total = sum(math.exp(exponent(j)) for j in itertools.product(*rows))
        losses.append(math.log(total) - exponent([i] * len(own)))
    return losses


@pytest.mark.parametrize(
    ("peers", "tau_prev", "wanted"),
    [
        ([E], 0.15, 0.00671535),
        ([E, E], 0.15, 0.06896003),
        ([E, E], 0.2, 0.01343070),
        ([E, E, E], 0.15, 0.45135903),
        ([E, E, E], 0.2, 0.02014605),
        ([E, SWAPPED], 0.15, 3.40229337),
    ],
)
def test_the_numbers_of_the_spec(peers, tau_prev, wanted):
    close(muscle(E, peers, 0.2, tau_prev, reduction="none")[0], wanted)
    close(muscle(E, peers, 0.2, tau_prev), wanted)  # both anchors see the same


def test_two_tilted_peers():
    losses = muscle(E, [TILTED, SWAPPED], reduction="none")
    close(losses, [6.46082370, 12.01863849])
    close(muscle(E, [TILTED, SWAPPED]), (6.46082370 + 12.01863849) / 2)


@pytest.mark.parametrize(("peers", "samples"), [(1, 5), (2, 2), (3, 4)])
def test_equal_rows_leave_chance(peers, samples):
    same = torch.ones(samples, 3)
    close(muscle(same, [same] * peers), peers * math.log(samples), 1e-5)


def test_one_peer_is_info_nce():
    close(pairwise(E, [E]), math.log(1 + math.exp(-5)))
    anchor, peers = batch(peers=1)
    close(muscle(anchor, peers, reduction="none"), info_nce(anchor, peers[0]))


def test_without_gamma_it_is_the_pairwise_loss():
    anchor, peers = batch(8)
    separate = [info_nce(anchor, peer) for peer in peers]
    close(muscle(anchor, peers, 0.2, 0.2, reduction="none"), sum(separate), 1e-12)
    close(pairwise(anchor, peers, reduction="none"), sum(separate), 1e-12)
    assert abs(float(muscle(anchor, peers) - pairwise(anchor, peers))) > 0.1


@pytest.mark.parametrize("loss", [muscle, gramian])
def test_the_order_of_peers_does_not_matter(loss):
    anchor, peers = batch(6)
    close(loss(anchor, [peers[2], peers[0], peers[1]]), float(loss(anchor, peers)), 1e-12)


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_muscle_is_the_plain_loop(peers):
    anchor, others = batch(4, peers)
    close(muscle(anchor, others, reduction="none"), plain_muscle(anchor, others), 1e-10)


@pytest.mark.parametrize("memory", [2**28, SMALL])
def test_a_missing_row_is_no_positive_and_no_negative(memory):
    anchor, peers = batch(5)
    has = [[True] * 5, [True, False, True, False, True], [False, False, True, True, True]]
    masks = [None, torch.tensor(has[1]), torch.tensor(has[2], dtype=torch.float32)]
    for peer, mask in zip(peers, has, strict=True):
        peer[~torch.tensor(mask)] = 1e3  # whatever stands there
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])
    losses = muscle(anchor, peers, weight=weight, present=masks, reduction="none", memory=memory)
    plain = plain_muscle(anchor, peers, has=has)
    close(losses, [*plain[:3], 0.0, plain[4]], 1e-10)
    mean = muscle(anchor, peers, weight=weight, present=masks, memory=memory)
    close(mean, (plain[0] + 2 * plain[1] + plain[2] + plain[4]) / 5, 1e-10)
    pairs = sum(
        pairwise(anchor, [p], present=[m], reduction="none") for p, m in zip(peers, masks, strict=True)
    )
    close(pairwise(anchor, peers, present=masks, reduction="none"), pairs, 1e-10)


def test_an_anchor_without_any_peer_does_not_count():
    anchor, peers = batch(4, 2)
    anchor.requires_grad_()
    nobody = torch.tensor([True, True, False, True])
    value = muscle(anchor, peers, present=[nobody, nobody])
    value.backward()
    kept = [0, 1, 3]
    alone = muscle(anchor.detach()[kept], [peer[kept] for peer in peers])
    close(value.detach(), float(alone), 1e-12)
    assert anchor.grad.abs().sum(1).gt(0).tolist() == [True, True, False, True]


@pytest.mark.parametrize("loss", [muscle, pairwise, gramian])
def test_where_nothing_is_shared_there_is_no_loss_and_no_gradient(loss):
    anchor, peers = batch(3, 2)
    anchor.requires_grad_()
    value = loss(anchor, peers, present=[torch.zeros(3)] * 2, weight=torch.zeros(3))
    value.backward()
    assert float(value.detach()) == 0
    assert not anchor.grad.any()


@pytest.mark.parametrize("memory", [2**28, SMALL])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_right_and_reach_the_anchor_alone(memory, masked):
    anchor, peers = batch(3, 3, 4)
    options = {"memory": memory}
    if masked:
        present = [None, torch.tensor([True, False, True]), torch.tensor([False, True, True])]
        options |= {"present": present, "weight": torch.tensor([1.0, 0.5, 2.0])}
    anchor.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: muscle(z, peers, **options), anchor)
    assert torch.autograd.gradcheck(lambda z: gramian(z, peers, **options), anchor)
    anchor.grad = None
    for peer in peers:
        peer.requires_grad_()
    muscle(anchor, peers, **options).backward()
    assert anchor.grad.abs().sum() > 0
    assert [peer.grad for peer in peers] == [None] * 3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", [muscle, gramian])
def test_pieces_give_what_the_whole_gives(loss, masked):
    anchor, peers = batch(5, 4)
    masks = [torch.tensor([row != place for row in range(5)]) for place in range(4)] if masked else None
    found = []
    for memory in (2**30, 20 * 5**4 * TUPLE, 4 * 5**4 * TUPLE, 5**4 * TUPLE - 1, SMALL, 1):
        own = anchor.clone().requires_grad_()
        value = loss(own, peers, memory=memory, present=masks)
        value.backward()
        found.append((value.detach(), own.grad))
    for value, gradient in found[1:]:
        torch.testing.assert_close(value, found[0][0])
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


class Peak(_Recorder):
    """The largest tensor any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        sizes = [value.numel() for value in self.operations[-1][3] if isinstance(value, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return result


@pytest.mark.parametrize(("loss", "vectors"), [(muscle, 1), (gramian, 5)])
@pytest.mark.parametrize("tuples", [6**4, 6**3])
def test_no_tensor_is_larger_than_the_memory_allows(loss, vectors, tuples):
    """The Gramian has as many numbers for a tuple as there are vectors."""
    anchor, peers = batch(6, 4, dtype=torch.float32)
    anchor.requires_grad_()
    with Peak("the loss") as recorder:  # which also refuses what cannot be captured
        loss(anchor, peers, memory=tuples * vectors * TUPLE).backward()
    assert recorder.largest <= tuples


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("loss", [muscle, gramian])
@pytest.mark.parametrize("memory", [2**28, 4 * 6**3 * TUPLE])
def test_a_captured_loss_follows_its_inputs(loss, memory):
    anchor, peers = batch(6, 3, dtype=torch.float32)
    anchor, peers = anchor.cuda().requires_grad_(), [peer.cuda() for peer in peers]
    masks = [None, torch.ones(6, device="cuda"), None]

    def step():
        value = loss(anchor, peers, present=masks, memory=memory)
        return value.detach(), torch.autograd.grad(value, anchor)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        value, gradient = step()
    with torch.no_grad():
        anchor.copy_(random(6, 5, seed=7))
        masks[1][2:4] = 0
    graph.replay()
    for captured, eager in zip((value, gradient), step(), strict=True):
        torch.testing.assert_close(captured, eager)


@pytest.mark.parametrize("loss", [muscle, pairwise, gramian])
def test_it_is_float32_under_autocast(loss):
    anchor, peers = batch(6, 2, 64, dtype=torch.float32)
    exact = loss(anchor, peers)
    with torch.autocast("cpu", torch.bfloat16):
        close(loss(anchor, peers), float(exact), 1e-7)
    low = loss(anchor.bfloat16(), [peer.bfloat16() for peer in peers])
    assert low.dtype == torch.float32
    close(low, float(loss(anchor.bfloat16().float(), [peer.bfloat16().float() for peer in peers])), 1e-7)


def test_temperatures_per_pair():
    anchor, peers = batch(4, 2)
    tau = torch.tensor([[1.0, 0.3, 0.5], [0.3, 1.0, 0.4], [0.5, 0.4, 1.0]], dtype=torch.float64)
    tau_prev = torch.tensor([[1.0, 0.25], [0.25, 1.0]], dtype=torch.float64)
    z, (a, b) = unit(anchor), (unit(peer) for peer in peers)
    scores = (z @ a.T / 0.3)[:, :, None] + (z @ b.T / 0.5)[:, None, :] - (1 / 0.25 - 1 / 0.4) * (a @ b.T)
    wanted = [float(scores[i].logsumexp((0, 1)) - scores[i, i, i]) for i in range(4)]
    close(muscle(anchor, peers, tau, tau_prev, reduction="none"), wanted, 1e-10)


@pytest.mark.parametrize("options", [{}, {"peers": 3, "per_pair": True}])
def test_learned_temperatures_start_as_given_and_keep_gamma_positive(options):
    anchor, peers = batch(dtype=torch.float32)
    temperatures = Temperatures(**options)
    close(muscle(anchor, peers, *temperatures()), float(muscle(anchor, peers)), 1e-5)
    muscle(anchor, peers, *temperatures(), memory=SMALL).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in temperatures.parameters())
    torch.optim.SGD(temperatures.parameters(), lr=2.0).step()  # γ itself would be negative after such a step
    tau, tau_prev = temperatures()
    assert bool((tau_prev > 0).all())
    assert bool((tau_prev < (tau[1:, 1:] if tau.ndim else tau)).all())


@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize("memory", [2**28, SMALL])
def test_gramian_over_tuples_is_the_plain_loop(peers, memory):
    anchor, others = batch(4, peers)
    close(gramian(anchor, others, memory=memory, reduction="none"), plain_gramian(anchor, others), 1e-8)
    has = [[True, True, False, True], [False, True, True, True], [True] * 4][:peers]
    masks = [torch.tensor(mask) for mask in has]
    losses = gramian(anchor, others, present=masks, memory=memory, reduction="none")
    close(
        losses,
        [x if any(h[i] for h in has) else 0.0 for i, x in enumerate(plain_gramian(anchor, others, has=has))],
        1e-8,
    )


def test_gramian_by_sample_is_the_mean_of_both_directions():
    anchor, peers = batch(4, 2)
    has = torch.tensor([True, True, False, True])
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0])

    def exponent(i, k, own):
        rows = torch.stack([unit(anchor)[i], *(unit(peers[m])[k] for m in own)])
        return -torch.linalg.det(rows @ rows.T).sqrt() / 0.2

    wanted = [0.0]
    for i in (1, 2, 3):
        own = [0, 1] if has[i] else [1]
        tuples = [k for k in range(4) if has[k] or own == [1]]
        samples = torch.stack([exponent(i, k, own) for k in tuples]).logsumexp(0)
        anchors = torch.stack([exponent(k, i, own) for k in (1, 2, 3)]).logsumexp(0)
        wanted.append(float(samples + anchors) / 2 - float(exponent(i, i, own)))
    losses = gramian(anchor, peers, negatives="anchor", weight=weight, present=[has, None], reduction="none")
    close(losses, wanted, 1e-8)


@pytest.mark.parametrize("negatives", ["tuples", "anchor"])
def test_gramian_of_identical_models_has_a_finite_gradient(negatives):
    anchor = random(4, 6).requires_grad_()
    gramian(anchor, [anchor.detach()] * 3, negatives=negatives).backward()
    assert bool(anchor.grad.isfinite().all())


@pytest.mark.parametrize(("samples", "wanted"), [(2, 0.52), (8, 1.24), (16, 1.43)])
def test_theorem1_value_is_no_bound_for_a_constant_anchor(samples, wanted):
    axes = torch.eye(samples + 1, dtype=torch.float64)
    rows, constant = axes[:samples], axes[samples:].expand(samples, -1)
    peers = [rows, -rows]
    close(theorem1_value(muscle(constant, peers), constant, peers), wanted, 5e-3)
    assert bool((information_bounds(constant, peers).abs() < 1e-6).all())


@pytest.mark.parametrize(("count", "wanted"), [(2, 4.7931), (3, 5.6837)])
def test_theorem1_value_is_no_bound_for_identical_models(count, wanted):
    rows = torch.eye(16)  # they share log 16 = 2.77
    peers = [rows] * count
    close(theorem1_value(muscle(rows, peers), rows, peers), wanted, 1e-4)
    assert bool((information_bounds(rows, peers) <= math.log(16)).all())


def test_the_bound_of_each_peer_counts_the_rows_both_have():
    anchor, peers = batch(5, 2)
    has, weight = torch.tensor([True, True, False, True, True]), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    loss = pairwise(anchor, peers[:1], present=[has], weight=weight)
    other = pairwise(anchor, peers[1:], weight=weight)
    bounds = information_bounds(anchor, peers, present=[has, None], weight=weight)
    close(bounds, [math.log(4) - float(loss), math.log(5) - float(other)])
    value = theorem1_value(loss, anchor, peers[:1], present=[has], weight=weight)
    close(value, float(bounds[0]))


def test_unnormalised_rows():
    anchor, peers = batch(4, 2)
    close(muscle(3 * anchor, peers), float(muscle(anchor, peers)), 1e-12)
    raw = pairwise(anchor, peers[:1], normalize=False)
    logits = anchor @ peers[0].T / 0.2
    close(raw, float(nn.functional.cross_entropy(logits, torch.arange(4))), 1e-10)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda z: muscle(z, []), "the list of peers is empty"),
        (lambda z: muscle(z, [z, z[:, :2]]), r"peer 1 has shape \(4, 2\) and the anchor \(4, 3\): bring all"),
        (lambda z: muscle(z, [z[:3]]), "peer 0 represents 3 samples and the anchor 4"),
        (lambda z: muscle(z[:1], [z[:1]]), "a batch of 1 has no negatives"),
        (lambda z: muscle(z[0], [z]), r"the anchor has shape \(3,\)"),
        (lambda z: muscle(z, [z], 0.15, 0.2), "tau_prev is 0.2 and tau 0.15"),
        (lambda z: muscle(z, [z], 0.0), "tau is 0.0, expected a positive temperature"),
        (lambda z: pairwise(z, [z], -1.0), "tau is -1.0, expected a positive temperature"),
        (
            lambda z: muscle(z, [z], torch.ones(3, 3)),
            r"tau has shape \(3, 3\), expected a scalar or \(2, 2\)",
        ),
        (lambda z: muscle(z, [z, z], present=[None]), "there are 1 masks for 2 peers"),
        (lambda z: muscle(z, [z], weight=torch.ones(3)), r"weight has shape \(3,\), expected \(4,\)"),
        (lambda z: muscle(z, [z], reduction="sum"), "reduction is 'sum'"),
        (lambda z: gramian(z, [z], negatives="all"), "negatives is 'all'"),
        (lambda z: Temperatures(tau=0.2, tau_prev=0.2), "tau_prev < tau"),
        (lambda z: Temperatures(per_pair=True), "number of peers"),
    ],
)
def test_bad_input_is_one_sentence(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call(random(4, 3))
