from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from potluck.core.rng import Rng
from potluck.data import (
    AugmentConfig,
    DataConfig,
    Preparation,
    cutout,
    from_arrays,
    horizontal_flip,
    load,
    prepare,
    random_crop,
    random_erasing,
)
from potluck.errors import DataError

SAMPLES, CHANNELS, HEIGHT, WIDTH = 40, 3, 10, 12


@pytest.fixture
def batch() -> Tensor:
    return torch.rand(SAMPLES, CHANNELS, HEIGHT, WIDTH, generator=Rng(9).generator()) + 0.1


def generator() -> torch.Generator:
    return Rng(5).generator()


def test_flip_is_the_loop_over_samples(batch: Tensor) -> None:
    draws = torch.rand(SAMPLES, 1, 1, 1, generator=generator()).flatten()
    for probability in (0.0, 0.3, 1.0):
        expected = batch.clone()
        for i in range(SAMPLES):
            if draws[i] < probability:
                expected[i] = torch.stack([batch[i, :, :, WIDTH - 1 - j] for j in range(WIDTH)], dim=-1)
        assert torch.equal(horizontal_flip(batch, generator(), probability), expected)


@pytest.mark.parametrize("pad", [0, 1, 4, HEIGHT + 3, 60])
def test_crop_is_the_loop_over_samples(batch: Tensor, pad: int) -> None:
    top, left = torch.randint(2 * pad + 1, (2, SAMPLES, 1), generator=generator()).squeeze(-1).tolist()
    expected = torch.zeros_like(batch)
    for i in range(SAMPLES):
        for row in range(HEIGHT):
            for column in range(WIDTH):
                y, x = row + top[i] - pad, column + left[i] - pad
                if 0 <= y < HEIGHT and 0 <= x < WIDTH:
                    expected[i, :, row, column] = batch[i, :, y, x]
    result = random_crop(batch, generator(), pad)
    assert torch.equal(result, expected)
    assert result.is_contiguous()


def test_a_wide_border_takes_no_memory(batch: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server names the augmentation at a site: the border must not be larger than the images."""
    made: list[int] = []
    pad = prepare.F.pad
    monkeypatch.setattr(prepare.F, "pad", lambda *given: made.append(pad(*given).numel()) or pad(*given))
    random_crop(batch, generator(), 1024)
    assert made[0] <= 9 * batch.numel()


@pytest.mark.parametrize("scale", [(0.04, 0.2), (0.5, 1.0)])
def test_erasing_is_the_loop_over_samples(batch: Tensor, scale: tuple[float, float]) -> None:
    draws = torch.rand(5, SAMPLES, generator=generator()).T.tolist()
    expected = batch.clone()
    for i, (area, aspect, down, right, chance) in enumerate(draws):
        pixels = HEIGHT * WIDTH * (scale[0] + area * (scale[1] - scale[0]))
        ratio = math.exp(math.log(0.5) + aspect * math.log(4))
        tall = min(round(math.sqrt(pixels * ratio)), HEIGHT)
        wide = min(round(math.sqrt(pixels / ratio)), WIDTH)
        top, left = math.floor(down * (HEIGHT - tall + 1)), math.floor(right * (WIDTH - wide + 1))
        if chance < 0.5:
            expected[i, :, top : top + tall, left : left + wide] = 0
    result = random_erasing(batch, generator(), 0.5, scale, (0.5, 2.0))
    assert torch.equal(result, expected)
    assert 0 < (result == batch).flatten(1).all(dim=1).sum() < SAMPLES


@pytest.mark.parametrize("size", [1, 5, 16])
def test_cutout_is_the_loop_over_samples(batch: Tensor, size: int) -> None:
    numbers = generator()
    rows = torch.randint(HEIGHT, (SAMPLES,), generator=numbers).tolist()
    columns = torch.randint(WIDTH, (SAMPLES,), generator=numbers).tolist()
    expected = batch.clone()
    for i in range(SAMPLES):
        top, left = rows[i] - size // 2, columns[i] - size // 2
        expected[i, :, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
    assert torch.equal(cutout(batch, generator(), size), expected)


def test_operations_leave_their_input_alone(batch: Tensor) -> None:
    before = batch.clone()
    for operation in (horizontal_flip, random_crop, random_erasing, cutout):
        operation(batch, generator())
    assert torch.equal(batch, before)


def test_preparation_scales_and_normalises_bytes() -> None:
    raw = torch.tensor([[[[0, 51]], [[255, 102]]]], dtype=torch.uint8)
    prepared = Preparation((0.2, 0.4), (0.5, 0.2)).prepare(raw)
    assert prepared.dtype == torch.float32
    torch.testing.assert_close(prepared, torch.tensor([[[[-0.4, 0.0]], [[3.0, 0.0]]]]))


def test_floats_are_not_scaled_and_other_samples_pass_through() -> None:
    images = torch.full((2, 1, 4, 4), 3.0)
    assert torch.equal(Preparation().prepare(images), images)
    tokens, vectors = torch.arange(6).view(2, 3), torch.rand(2, 3, generator=generator())
    preparation = Preparation((0.5,), (0.5,), AugmentConfig.of(["flip"]))
    assert preparation.prepare(tokens, generator()) is tokens
    assert preparation.prepare(vectors, generator()) is vectors


def test_without_a_generator_nothing_is_augmented(batch: Tensor) -> None:
    plain, augmented = (
        Preparation((0.5,) * 3, (0.5,) * 3, AugmentConfig.of(value))
        for value in ([], ["crop", "flip", "cutout"])
    )
    assert torch.equal(plain.prepare(batch), augmented.prepare(batch))
    assert not torch.equal(plain.prepare(batch), augmented.prepare(batch, generator()))
    assert torch.equal(augmented.prepare(batch, generator()), augmented.prepare(batch, generator()))


def test_the_place_of_normalize_decides_the_padding() -> None:
    white = torch.full((64, 1, 8, 8), 255, dtype=torch.uint8)
    lowest = {}
    for name, operations in {
        "after": ["crop"],
        "marked": ["normalize", "crop"],
        "before": ["crop", "normalize"],
    }.items():
        prepared = Preparation((0.5,), (0.25,), AugmentConfig.of(operations)).prepare(white, generator())
        assert prepared.max() == 2
        lowest[name] = prepared.min().item()
    assert lowest == {"after": 0, "marked": 0, "before": -2}


def test_operations_run_in_the_order_given(batch: Tensor) -> None:
    numbers = generator()
    expected = cutout(horizontal_flip(random_crop(batch, numbers, 2), numbers), numbers, 3)
    preparation = Preparation(augment=AugmentConfig.of([{"crop": 2}, "flip", {"cutout": {"size": 3}}]))
    assert torch.equal(preparation.prepare(batch, generator()), expected)


def test_presets_are_those_of_the_papers() -> None:
    kinds = {
        name: [operation.kind for operation in AugmentConfig.of(name).operations]
        for name in ("fedmrl", "fedin", "fedre")
    }
    assert kinds == {
        "fedmrl": ["normalize", "flip", "erasing", "crop"],
        "fedin": ["crop", "flip", "normalize", "cutout"],
        "fedre": [],
    }


@pytest.mark.parametrize(
    "value",
    [
        "fedmrl",
        [],
        ["flip", {"crop": 3}, {"erasing": {"scale": [0.1, 0.2]}}, "normalize", {"cutout": {"size": 8}}],
    ],
)
def test_augmentation_is_written_as_it_is_read(value: Any) -> None:
    config = DataConfig(augment=value)
    written = config.model_dump(mode="json")
    assert DataConfig(**written) == config
    if isinstance(value, str):
        assert written["augment"] == value


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("fedmlr", "did you mean 'fedmrl'"),
        (["flp"], "did you mean 'flip'"),
        ([{"crop": -1}], "greater than or equal to 0"),
        ([{"crop": {"padding": 1}}], "Extra inputs"),
        ([{"crop": 1, "flip": 1}], "is not an augmentation"),
        ([{"erasing": {"scale": [0.3, 0.2]}}], "low, high"),
        ([{"normalize": 1}], "Extra inputs"),
        (["normalize", "normalize"], "twice"),
        (3, "name of a preset or a list"),
    ],
)
def test_bad_augmentations_are_refused(value: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence) as caught:
        DataConfig(augment=value)
    assert caught.value.error_count() == 1


def test_normalisation_is_the_data_sets_own_or_the_given_one() -> None:
    own = load("digits")
    assert DataConfig().load().mean == own.mean
    assert DataConfig(normalize=False).load().mean == ()
    given = DataConfig(normalize={"mean": 0.5, "std": [0.25]}).load()
    assert (given.mean, given.std) == ((0.5,), (0.25,))
    assert DataConfig(augment="fedre").load().std == (0.5,)
    assert DataConfig(augment="fedmrl").load().std == own.std
    with pytest.raises(DataError, match="has 1 channels, but normalize gives 3"):
        DataConfig(normalize={"mean": [0.1, 0.2, 0.3], "std": 1.0}).load()
    with pytest.raises(DataError, match="positive"):
        DataConfig(normalize={"mean": 0.1, "std": 0.0}).load()


def test_digits_are_standard_after_preparation() -> None:
    dataset = load("digits")
    prepared = DataConfig().preparation(dataset).prepare(dataset.x)
    assert abs(prepared.mean().item()) < 1e-3
    assert abs(prepared.std().item() - 1) < 1e-3


def test_vectors_cannot_be_augmented() -> None:
    vectors = from_arrays(torch.zeros(4, 3), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(DataError, match="no images to augment"):
        DataConfig(augment=["flip"]).preparation(vectors)


PRESETS = ["fedmrl", "fedin", "fedre"]


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_is_read_back_to_the_host(preset: str) -> None:
    preparation = Preparation((0.5,) * 3, (0.5,) * 3, AugmentConfig.of(preset))
    with FakeTensorMode():  # tensors without values: reading one, or a shape that depends on one, is an error
        raw = torch.zeros(SAMPLES, CHANNELS, HEIGHT, WIDTH, dtype=torch.uint8)
        assert preparation.prepare(raw, generator()).shape == raw.shape


@pytest.mark.cuda
@pytest.mark.parametrize("preset", PRESETS)
def test_a_captured_preparation_replays_with_new_numbers(preset: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    raw = (torch.rand(64, 3, 32, 32, generator=generator()) * 255).byte().cuda()
    preparation = Preparation((0.5,) * 3, (0.5,) * 3, AugmentConfig.of(preset))
    numbers = Rng(5).generator("cuda")
    expected = [preparation.prepare(raw, numbers) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(numbers)
    with torch.cuda.graph(graph):
        captured = preparation.prepare(raw, numbers)
    Rng(5).reseed(numbers)
    for batch in expected:
        graph.replay()
        torch.testing.assert_close(captured, batch)
