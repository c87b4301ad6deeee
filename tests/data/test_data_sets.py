from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from potluck.core.dataset import Dataset
from potluck.core.rng import Rng
from potluck.data import DataConfig, from_arrays, from_datasets, load, names, parquet, register, registry
from potluck.data.images import _embedded_digits
from potluck.data.words import count_vocabulary, encode, strip_headers, words
from potluck.errors import DataError

SHELF = Path(os.environ.get("POTLUCK_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(autouse=True)
def _closed_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, no shelf, no cache but the test's own."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("POTLUCK_DATA", raising=False)


def picture(seed: int, size: int, channels: int = 3) -> np.ndarray:
    shape = (size, size, 3) if channels == 3 else (size, size)
    return Rng(seed).numpy().integers(0, 256, shape, dtype=np.uint8)


def compress(pixels: np.ndarray, kind: str) -> bytes:
    stream = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


def write(
    path: Path, columns: dict[str, Sequence[Any]], class_names: dict[str, Sequence[str]] | None = None
) -> Path:
    """A Parquet file as the hub has it; bytes become image structs."""
    data = {
        name: [{"bytes": v, "path": None} for v in values] if isinstance(values[0], bytes) else list(values)
        for name, values in columns.items()
    }
    table = pa.table(data)
    if class_names:
        features = {
            name: {"names": list(values), "_type": "ClassLabel"} for name, values in class_names.items()
        }
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def write_images(
    folder: Path, size: int, channels: int, splits: dict[str, int], kind: str = "PNG"
) -> np.ndarray:
    """`splits` gives the number of images in each file; returns all pixels in that order."""
    pixels = []
    for file, rows in splits.items():
        mine = [picture(len(pixels) + i, size, channels) for i in range(rows)]
        content = [compress(image, kind) for image in mine]
        write(folder / f"{file}.parquet", {"image": content, "label": [i % 10 for i in range(rows)]})
        pixels.extend(mine)
    stacked = np.stack(pixels)
    return stacked[:, None] if channels == 1 else stacked.transpose(0, 3, 1, 2)


def test_digits_are_embedded() -> None:
    dataset = load("digits")
    assert tuple(dataset.x.shape) == (1797, 1, 8, 8)
    assert dataset.x.dtype == torch.float32
    assert (dataset.x.min(), dataset.x.max()) == (0, 1)
    assert dataset.train_rows == len(dataset) == 1797
    assert dataset.task.classes == 10


@pytest.mark.parametrize("layout", ["svhn", "svhn/cropped_digits", "svhn/data", "cropped_digits", "."])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_svhn_in_every_layout(tmp_path: Path, layout: str, kind: str) -> None:
    files = {"train-00000-of-00002": 3, "train-00001-of-00002": 2, "test-00000-of-00001": 2}
    pixels = write_images(tmp_path / layout, 32, 3, files, kind)
    write_images(tmp_path / layout, 32, 3, {"extra-00000-of-00001": 1})
    dataset = load("svhn", tmp_path)
    assert dataset.x.dtype == torch.uint8
    np.testing.assert_array_equal(dataset.x.numpy(), pixels)
    assert dataset.y.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert dataset.train_rows == 5
    assert load("svhn", tmp_path).x.data_ptr() == dataset.x.data_ptr()  # decoded once


def test_tiny_imagenet_takes_valid_hashed_names_and_grey_images(tmp_path: Path) -> None:
    folder = tmp_path / "tiny_imagenet" / "data"
    grey, colour = picture(0, 64, 1), picture(1, 64)
    images = [compress(grey, "PNG"), compress(colour, "WEBP")]
    write(folder / "train-00000-of-00001-1359597a978bc4fa.parquet", {"image": images, "label": [0, 199]})
    write(folder / "valid-00000-of-00001-70d52db3c749a935.parquet", {"image": images[:1], "label": [7]})
    dataset = load("tiny_imagenet", tmp_path)
    assert dataset.task.input == (3, 64, 64)
    assert (dataset.x[0].numpy() == grey).all()
    np.testing.assert_array_equal(dataset.x[1].numpy(), colour.transpose(2, 0, 1))
    assert (dataset.train_rows, len(dataset)) == (2, 3)


def test_the_shelf_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "mnist", 28, 1, {"train-00000-of-00001": 3, "test-00000-of-00001": 1})
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path))
    assert len(load("mnist")) == 4
    assert len(DataConfig(name="mnist", dir="mnist").load(tmp_path)) == 4
    with pytest.raises(DataError, match=r"not in .*fashion_mnist"):
        load("fashion_mnist")


def test_cifar100_has_fine_and_coarse_labels(tmp_path: Path) -> None:
    image = [compress(picture(0, 32), "PNG")]
    for split in ("train", "test"):
        columns: dict[str, Sequence[Any]] = {"img": image, "fine_label": [99], "coarse_label": [3]}
        names_of = {"fine_label": [f"f{i}" for i in range(100)], "coarse_label": [f"c{i}" for i in range(20)]}
        write(tmp_path / "cifar100" / f"{split}-00000-of-00001.parquet", columns, names_of)
    fine, coarse = load("cifar100", tmp_path), load("cifar100", tmp_path, labels="coarse")
    assert (fine.task.classes, fine.y.tolist(), fine.class_names[99]) == (100, [99, 99], "f99")
    assert (coarse.task.classes, coarse.y.tolist(), coarse.class_names[3]) == (20, [3, 3], "c3")
    with pytest.raises(DataError, match="expected 'fine' or 'coarse'"):
        load("cifar100", tmp_path, labels="superfine")


def test_labels_alone_need_no_decoding(tmp_path: Path) -> None:
    for split in ("train", "test"):
        path = tmp_path / "svhn" / f"{split}-00000-of-00001.parquet"
        write(path, {"image": [b"not an image"] * 3, "label": [1, 2, 3]})
    dataset = load("svhn", tmp_path, labels_only=True)
    assert dataset.y.tolist() == [1, 2, 3] * 2
    assert tuple(dataset.x.shape) == (6, 3, 32, 32)
    assert load("digits", labels_only=True).train_rows == 1797


def test_decoded_images_are_kept_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_WORTH_KEEPING", 1)
    pixels = write_images(tmp_path / "svhn", 32, 3, {"train-00000-of-00001": 3, "test-00000-of-00001": 1})
    load("svhn", tmp_path)
    kept = list((tmp_path / "cache" / "potluck").iterdir())
    assert [path.suffix for path in kept] == [".npy"]
    parquet.read_images.cache_clear()
    monkeypatch.setattr(parquet, "_decode", None)
    np.testing.assert_array_equal(load("svhn", tmp_path).x.numpy(), pixels)
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    parquet.read_images.cache_clear()
    monkeypatch.undo()
    np.testing.assert_array_equal(load("svhn", tmp_path).x.numpy(), pixels)


@pytest.mark.parametrize("left", ["empty", "archive", "pipe"])
def test_images_that_were_not_kept_whole_are_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr(parquet, "_WORTH_KEEPING", 1)
    pixels = write_images(tmp_path / "svhn", 32, 3, {"train-00000-of-00001": 3, "test-00000-of-00001": 1})
    load("svhn", tmp_path)
    for kept in (tmp_path / "cache" / "potluck").iterdir():
        kept.unlink()
        if left == "pipe":
            os.mkfifo(kept)
        else:
            kept.touch()
        if left == "archive":
            with kept.open("wb") as file:
                np.savez(file, pixels)
    parquet.read_images.cache_clear()
    np.testing.assert_array_equal(load("svhn", tmp_path).x.numpy(), pixels)


def test_kept_images_are_on_the_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a file that has its name must have its pixels, too: nobody looks at them again."""
    synced = list[int]()
    fsync, replace = os.fsync, Path.replace

    def noted(handle: int) -> None:
        fsync(handle)
        synced.append(os.fstat(handle).st_ino)

    def named(self: Path, target: Path) -> Path:
        assert self.stat().st_ino in synced
        return replace(self, target)

    monkeypatch.setattr(parquet, "_WORTH_KEEPING", 1)
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "replace", named)
    write_images(tmp_path / "svhn", 32, 3, {"train-00000-of-00001": 3, "test-00000-of-00001": 1})
    load("svhn", tmp_path)
    assert synced
    assert len([*(tmp_path / "cache" / "potluck").glob("*.npy")]) == len(synced)


def one_sentence(error: pytest.ExceptionInfo[DataError], *parts: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_missing_data_set_says_where_it_was_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path / "nowhere")
    one_sentence(error, "'cifar10' is not in", "nowhere", "cifar10/train-00000-of-00001.parquet")
    with pytest.raises(DataError) as error:
        load("cifar10")
    one_sentence(error, "POTLUCK_DATA is not set", "uoft-cs/cifar10", "give `dir`")
    with pytest.raises(DataError) as error:
        load("newsgroups20")
    one_sentence(error, "is not here: POTLUCK_DATA is not set and the hub has no copy; give `dir`")
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path))
    with pytest.raises(DataError) as error:
        load("newsgroups20")
    one_sentence(error, f"it is not in {tmp_path / 'newsgroups20'} and the hub has no copy")


def test_the_hub_is_asked_for_parquet_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "cropped_digits", 32, 3, {"train-00000-of-00001": 2, "test-00000-of-00001": 1})
    asked: list[Any] = []

    def snapshot_download(
        repository: str, *, repo_type: str, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert not local_files_only
        asked.append((repository, repo_type))
        assert "cropped_digits/train-*.parquet" in allow_patterns
        assert all(pattern.endswith(".parquet") for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *asked, **options: None)
    assert len(load("svhn")) == 3
    assert asked == [("ufldl-stanford/svhn", "dataset")]


def test_a_hub_that_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has sent before is used; nothing else is asked of it."""
    end, asked = threading.Event(), list[dict[str, Any]]()

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.append(options)
        raise FileNotFoundError(repository)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *asked, **options: end.wait(60))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("potluck.data.parquet.HUB_PATIENCE", 0.01)
    monkeypatch.delenv("POTLUCK_DATA", raising=False)
    try:
        with pytest.raises(DataError) as error:
            load("svhn")
    finally:
        end.set()
    one_sentence(error, "POTLUCK_DATA is not set", "ufldl-stanford/svhn", "give `dir`")
    assert [options["local_files_only"] for options in asked] == [True]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "mnist", 28, 1, {"train-00000-of-00001": 3, "test-00000-of-00001": 1})
    path = tmp_path / "mnist" / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError) as error:
        load("mnist", tmp_path)
    one_sentence(error, str(path), "not readable Parquet")


def test_a_missing_shard_is_counted(tmp_path: Path) -> None:
    write_images(tmp_path / "mnist", 28, 1, {"train-00001-of-00002": 3, "test-00000-of-00001": 1})
    with pytest.raises(DataError) as error:
        load("mnist", tmp_path)
    one_sentence(error, "holds 1 file(s) of the split 'train' where the names promise 2")


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "mnist", 28, 1, {"train-00000-of-00001": 3})
    with pytest.raises(DataError, match="no Parquet file of the split 'test'"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk", compress(picture(0, 32), "PNG")[:200]])
def test_an_undecodable_image_is_named(tmp_path: Path, content: bytes) -> None:
    good = compress(picture(0, 32), "PNG")
    for split in ("train", "test"):
        path = tmp_path / "svhn" / f"{split}-00000-of-00001.parquet"
        write(path, {"image": [good, content], "label": [0, 1]})
    with pytest.raises(DataError) as error:
        load("svhn", tmp_path)
    one_sentence(error, "row 1 of", "train-00000-of-00001.parquet", "is not a PNG")


def test_an_image_of_another_size_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "svhn", 28, 3, {"train-00000-of-00001": 1, "test-00000-of-00001": 1})
    with pytest.raises(DataError, match="of 32x32 pixels \\(it has 28x28\\)"):
        load("svhn", tmp_path)


@pytest.mark.parametrize("labels", [[0, 10], [-1, 0]])
def test_labels_out_of_range_are_named(tmp_path: Path, labels: list[int]) -> None:
    image = compress(picture(0, 32), "PNG")
    for split in ("train", "test"):
        write(tmp_path / "svhn" / f"{split}-00000-of-00001.parquet", {"image": [image] * 2, "label": labels})
    with pytest.raises(DataError) as error:
        load("svhn", tmp_path)
    one_sentence(error, "train-00000-of-00001.parquet", f"{labels[0]} to {labels[1]}", "0 to 9")


def test_labels_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "sst2" / f"{split}-00000-of-00001.parquet", {"text": ["a"], "label": ["good"]})
        write(tmp_path / "sst2" / "validation-00000-of-00001.parquet", {"text": ["a"], "label": ["good"]})
    with pytest.raises(DataError, match="not all integers"):
        load("sst2", tmp_path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "svhn" / f"{split}-00000-of-00001.parquet", {"picture": [1], "label": [0]})
    with pytest.raises(DataError, match="no column 'img' or 'image', only picture, label"):
        load("svhn", tmp_path)


def test_fewer_samples_of_a_data_set() -> None:
    """The same rows in every run; labels, strata and captions stay with their samples."""
    whole, some = load("digits-captions"), DataConfig(name="digits-captions", samples=50).load()
    assert (len(some), some.train_rows) == (50, 50)
    rows = [int((whole.x == sample).all(1).nonzero()[0]) for sample in some.x]
    assert rows == sorted(set(rows))
    assert torch.equal(some.strata, whole.strata[rows])
    assert some.texts == tuple(whole.texts[row] for row in rows)
    assert some.own_rows.tolist() == rows
    assert torch.equal(DataConfig(name="digits-captions", samples=50).load().x, some.x)
    parts = from_arrays(
        np.zeros((9, 2), np.float32), np.arange(9) % 3, test=(np.ones((4, 2)), np.zeros(4, int))
    )
    assert (
        len(registry.fewer(parts, 3)),
        registry.fewer(parts, 3).train_rows,
        registry.fewer(parts, 3).x.sum(),
    ) == (6, 3, 6)
    assert len(registry.fewer(parts, 8)) == 12
    with pytest.raises(DataError, match="data set 'digits' has 1797 training samples, not 2000"):
        DataConfig(name="digits", samples=2000).load()


def test_noise_has_no_classes_to_find() -> None:
    data = load("noise", samples=20, side=8, channels=1)
    assert tuple(data.x.shape) == (20, 1, 8, 8)
    assert data.y.unique().tolist() == [0]
    assert 110 < float(data.x.float().mean()) < 145
    assert torch.equal(load("noise", samples=20, side=8, channels=1).x, data.x)
    with pytest.raises(DataError, match="noise"):
        load("noise", side=0)


def test_names_and_options_are_checked() -> None:
    assert {"digits", "cifar10", "cifar100", "svhn", "tiny_imagenet", "sst2", "newsgroups20"} <= set(names())
    with pytest.raises(DataError, match=r"from_files\('hosp\.csv', target=…\), or .*path: hosp\.csv"):
        load("hosp.csv")
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        load("cifar11")
    with pytest.raises(
        DataError, match=r"'digits' has no option 'length': it takes samples, normalize, augment$"
    ):
        DataConfig(length=4).load()
    with pytest.raises(DataError, match=r"'digits' has no option 'length': it takes none$"):
        load("digits", length=4)
    with pytest.raises(DataError, match=r"it takes vocabulary, length, tokenizer$"):
        load("sst2", lenght=3)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("digits-captions", {"shuffled": "no"}, "option 'shuffled' is 'no', expected true or false"),
        ("digits-captions", {"shuffled": 1}, "option 'shuffled' is 1, expected true or false"),
        ("noise", {"samples": "abc"}, "option 'samples' is 'abc', expected a whole number"),
        ("noise", {"side": 2.5}, "option 'side' is 2.5, expected a whole number"),
        ("noise", {"channels": True}, "option 'channels' is True, expected a whole number"),
        ("cifar10-captions", {"samples": "abc"}, "option 'samples' is 'abc', expected a whole number"),
        ("cifar100", {"labels": "broad"}, "option 'labels' is 'broad', expected 'fine' or 'coarse'"),
        ("sst2", {"tokenizer": 3}, "option 'tokenizer' is 3, expected a text or nothing"),
    ],
)
def test_values_of_options_are_checked(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError) as error:
        load(name, **options)
    assert str(error.value) == f"data set {name!r}: {sentence}"


def test_options_of_ones_own_are_checked_where_they_say_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_LOADERS", dict(registry._LOADERS))

    @register("own")
    def own(dir: Path | None, *, shape: tuple[int, int] = (1, 1), at: Path | None = None, any=None) -> Any:  # type: ignore[no-untyped-def]
        return from_arrays(np.zeros((4, *shape), np.float32)[:, None], [0, 1, 0, 1])

    assert load("own", shape=[2, 3], at="somewhere", any=object()).task.input == (1, 2, 3)
    assert load("own", shape=(2, 3), at=Path("somewhere")).task.input == (1, 2, 3)
    with pytest.raises(DataError, match=r"option 'shape' is \[2\], expected tuple\[int, int\]"):
        load("own", shape=[2])

    @register("unsaid")
    def unsaid(dir, *, of: "Nowhere" = 3):  # type: ignore[no-untyped-def]  # noqa: F821, UP037
        return from_arrays(np.zeros((4, 2), np.float32), [0, 1, 0, 1])

    assert len(load("unsaid", of="anything")) == 4
    assert len(load("noise", samples=np.int64(6), side=2)) == 6


def test_pairs_are_normalised_when_they_are_made() -> None:
    for given in (False, {"mean": 0.5, "std": 0.5}):
        with pytest.raises(DataError, match=r"'digits-captions' .*: leave out normalize"):
            DataConfig(name="digits-captions", normalize=given).load()  # type: ignore[arg-type]
    assert DataConfig(name="digits-captions").load().mean == load("digits").mean


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        DataError, match=r"'digits-captions', tokenizer: .*need the package transformers: pip"
    ):
        load("digits-captions", tokenizer=str(tmp_path))


def test_anyone_can_register_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_LOADERS", dict(registry._LOADERS))

    @register("test_only")
    def mine(dir: Path | None, *, rows: int = 4) -> Dataset:
        return from_arrays(np.zeros((rows, 2), np.float32), np.arange(rows) % 2, name="test_only")

    assert len(DataConfig(name="test_only", options={"rows": 6}).load()) == 6
    register("test_only")(mine)  # as a cell that is run twice does
    with pytest.raises(DataError, match="already registered"):
        register("test_only")(lambda dir: from_arrays(np.zeros((4, 2)), np.arange(4) % 2))


def test_words_and_numbers() -> None:
    assert words("Don't STOP — it's 1993!") == ["don't", "stop", "it's", "1993"]
    vocabulary = count_vocabulary([["b", "a", "b"], ["c", "a"]], 2)
    assert vocabulary == {"a": 2, "b": 3}
    assert encode([["b", "x", "a"], []], vocabulary, 2).tolist() == [[3, 1], [0, 0]]
    assert strip_headers("From: me\nSubject: x\n\nBody\n\nmore") == "Body\n\nmore"
    assert strip_headers("no header") == "no header"


def test_sst2_counts_words_on_the_training_part_alone(tmp_path: Path) -> None:
    write(
        tmp_path / "sst2/train-00000-of-00001.parquet",
        {"sentence": ["good good film", "bad"], "label": [1, 0]},
    )
    write(tmp_path / "sst2/validation-00000-of-00001.parquet", {"sentence": ["unseen film"], "label": [1]})
    dataset = load("sst2", tmp_path, length=4)
    assert dataset.task.kind == "text-classification"
    assert dataset.task.vocabulary == 5
    assert dataset.x.tolist() == [[2, 2, 4, 0], [3, 0, 0, 0], [1, 4, 0, 0]]
    assert load("sst2", tmp_path, vocabulary=1, length=2).x.tolist() == [[2, 2], [1, 0], [1, 1]]


def test_newsgroups_lose_their_headers(tmp_path: Path) -> None:
    posting = ["Newsgroups: sci.space\n\nmoon"]
    for split in ("train", "test"):
        write(tmp_path / f"newsgroups20/{split}-00000-of-00001.parquet", {"text": posting, "label": [14]})
    assert load("newsgroups20", tmp_path).task.vocabulary == 3
    assert load("newsgroups20", tmp_path, strip_headers=False).task.vocabulary == 6


def test_arrays_become_a_data_set() -> None:
    x = picture(0, 6)[None].transpose(0, 3, 1, 2).repeat(5, axis=0)
    dataset = from_arrays(x, [0, 1, 2, 0, 1], test=(x[:2], np.array([2, 2])), mean=(0.5,) * 3, std=(0.5,) * 3)
    assert dataset.task.input == (3, 6, 6)
    assert (dataset.task.classes, dataset.train_rows, len(dataset)) == (3, 5, 7)
    assert (dataset.x.dtype, dataset.y.dtype) == (torch.uint8, torch.int64)
    vectors = from_arrays(np.zeros((2, 3)), np.array([0, 1], np.uint8), classes=4)
    assert (vectors.x.dtype, vectors.task.classes) == (torch.float32, 4)
    tokens = from_arrays(torch.tensor([[1, 2]]), torch.tensor([0]), vocabulary=3)
    assert (tokens.task.kind, tokens.task.vocabulary) == ("text-classification", 3)


ZEROS = np.zeros((4, 3), np.float32)
TWO = np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("x", "y", "options", "sentence"),
    [
        (np.zeros((4, 32, 32, 3), np.uint8), TWO, {}, "channels last"),
        (np.zeros((4, 28, 28), np.uint8), TWO, {}, "without a channel axis"),
        (ZEROS[:3], TWO, {}, "does not give one sample per label"),
        (ZEROS, TWO / 2, {}, "one integer class per sample"),
        (ZEROS, TWO - 1, {}, "labels reach from -1 to 0"),
        (
            ZEROS,
            TWO,
            {"classes": 1},
            "outside 0 to 0, as classes=1 says: correct the labels, or leave out classes=1$",
        ),
        (ZEROS, TWO, {"class_names": ["a", "b", "c"], "classes": 2}, "3 class names for 2 classes"),
        (np.full((4, 3), np.nan), TWO, {}, "NaN"),
        (np.zeros((4, 3), np.int64), TWO, {}, "`vocabulary` for token ids"),
        (np.full((4, 3), 9), TWO, {"vocabulary": 9}, "outside 0 to 8"),
        (ZEROS, TWO, {"mean": [0.1], "std": [0.1]}, "channels of images"),
        (np.zeros((4, 3, 8, 8)), TWO, {"mean": [0.1], "std": [0.1]}, "each of the 3 channels"),
        (ZEROS, TWO, {"test": (np.zeros((1, 4)), [0])}, "differ in shape"),
        ([[1], [1, 2]], [0, 1], {}, "cannot make a tensor"),
        (ZEROS[:0], TWO[:0], {}, "there is no row in it"),
    ],
)
def test_bad_arrays_give_one_sentence(x: Any, y: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_arrays(x, y, name="mine", **options)


class Rows:
    """What a Hugging Face data set looks like from outside."""

    def __init__(self, rows: list[dict[str, Any]], class_names: Sequence[str] | None = None) -> None:
        self.rows = rows
        self.column_names = list(rows[0])
        self.features = {"label": type("ClassLabel", (), {"names": class_names})} if class_names else {}

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_hugging_face_images() -> None:
    pixels = [picture(i, 8) for i in range(3)]
    rows = [{"image": Image.fromarray(p), "label": i} for i, p in enumerate(pixels)]
    rows[2]["image"] = Image.fromarray(picture(5, 8, 1))
    dataset = from_datasets({"train": Rows(rows, ["a", "b", "c"]), "test": Rows(rows[:1])})
    assert tuple(dataset.x.shape) == (4, 3, 8, 8)
    np.testing.assert_array_equal(dataset.x[1].numpy(), pixels[1].transpose(2, 0, 1))
    assert (dataset.train_rows, dataset.class_names) == (3, ("a", "b", "c"))
    grey = from_datasets(Rows([{"scan": Image.fromarray(picture(5, 8, 1)), "label": 0}]), image="scan")
    assert grey.task.input == (1, 8, 8)


def test_hugging_face_texts() -> None:
    rows = [{"sentence": "a b a", "label": 1}, {"sentence": "b", "label": 0}]
    dataset = from_datasets(Rows(rows), length=3)
    assert dataset.x.tolist() == [[2, 3, 2], [3, 0, 0]]
    assert (dataset.task.classes, dataset.task.vocabulary) == (2, 4)


def test_hugging_face_mistakes() -> None:
    with pytest.raises(DataError, match="which column is the label"):
        from_datasets(Rows([{"text": "a", "target": 1}]))
    with pytest.raises(DataError, match=r"as in a table: use potluck.from_frame.* of texts with text="):
        from_datasets(Rows([{"body": "a", "label": 1}]))
    with pytest.raises(DataError, match="'yes' in column 'label' is not a class number"):
        from_datasets(Rows([{"text": "a", "label": "yes"}]))
    with pytest.raises(DataError, match="no split 'train', only test"):
        from_datasets({"test": Rows([{"text": "a", "label": 1}])})
    mixed = [{"image": Image.fromarray(picture(0, size)), "label": 0} for size in (8, 9)]
    with pytest.raises(DataError, match="not all of one size"):
        from_datasets(Rows(mixed))


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "rows", "classes"),
    [
        ("cifar10", 50_000, 60_000, 10),
        ("cifar100", 50_000, 60_000, 100),
        ("fashion_mnist", 60_000, 70_000, 10),
        ("sst2", 67_349, 68_221, 2),
        ("newsgroups20", 11_314, 18_846, 20),
    ],
)
def test_real_labels(name: str, train: int, rows: int, classes: int) -> None:
    if not (SHELF / name).is_dir():
        pytest.skip(f"{name} is not in the data folder")
    dataset = load(name, SHELF, labels_only=True)
    assert (dataset.train_rows, len(dataset)) == (train, rows)
    assert set(dataset.y.tolist()) == set(range(classes))
    assert len(dataset.class_names) == classes
    assert not dataset.class_names[0].isdigit()


@pytest.mark.data
@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion_mnist"])
def test_real_images(name: str, tmp_path: Path) -> None:
    if not (SHELF / name).is_dir():
        pytest.skip(f"{name} is not in the data folder")
    for split in ("train", "test"):
        source = next((SHELF / name).glob(f"{split}-*.parquet"))
        path = tmp_path / name / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(
            next(pa.Table.from_batches([b]) for b in pq.ParquetFile(source).iter_batches(400)), path
        )
    dataset = load(name, tmp_path)
    pixels = dataset.x.float() / 255
    assert len(dataset) == 800
    # 800 images are enough to tell the published mean and deviation from those of another data set.
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(dataset.mean), atol=0.03, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(dataset.std), atol=0.03, rtol=0)


@pytest.mark.data
def test_real_text() -> None:
    if not (SHELF / "sst2").is_dir():
        pytest.skip("sst2 is not in the data folder")
    dataset = load("sst2", SHELF)
    assert dataset.task.vocabulary == 8_002
    assert tuple(dataset.x.shape) == (68_221, 64)
    assert int(dataset.x.max()) == 8_001
    assert 0 < (dataset.x == 1).sum() / (dataset.x > 0).sum() < 0.1


def test_the_embedded_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    images, labels = _embedded_digits()
    bunch = load_digits()
    assert np.array_equal(images, bunch.images)
    assert np.array_equal(labels, bunch.target)
    assert (images.dtype, labels.dtype) == (bunch.images.dtype, bunch.target.dtype)


def write_solid(folder: Path, value: int, rows: int = 12, **head: Any) -> list[Path]:
    """Training and test files of equal pictures in one colour."""
    content = compress(np.full((28, 28), value, np.uint8), "PNG")
    table = pa.table({"image": [content] * rows, "label": [row % 10 for row in range(rows)]})
    files = [folder / "mnist" / f"{split}-00000-of-00001.parquet" for split in ("train", "test")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.replace_schema_metadata(head), file)
    return files


def test_a_file_that_was_changed_and_has_its_time_again_is_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_WORTH_KEEPING", 1)
    before = {file: file.stat() for file in write_solid(tmp_path, 7)}
    assert load("mnist", tmp_path).x.unique().tolist() == [7]
    for file in write_solid(tmp_path, 9):
        assert file.stat().st_size == before[file].st_size
        os.utime(file, ns=(before[file].st_atime_ns, before[file].st_mtime_ns))
    assert load("mnist", tmp_path).x.unique().tolist() == [9]


def test_few_bytes_that_become_many_pictures_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_solid(tmp_path, 7, rows=2000)
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "3000000")
    with pytest.raises(DataError, match=r"mnist would take .* \(4,000 rows\).*POTLUCK_DATA_LIMIT"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    "features",
    [
        '{"label":' * 3000 + "1" + "}" * 3000,
        '{"label": ["x"]}',
        '{"label": {"names": 10}}',
        '{"label": {"names": null}}',
        '{"label": {"names": "abcdefghij"}}',
    ],
)
def test_odd_notes_of_the_hub_name_no_classes(tmp_path: Path, features: str) -> None:
    write_solid(tmp_path, 7, huggingface=f'{{"info": {{"features": {features}}}}}')
    assert load("mnist", tmp_path).class_names == tuple("0123456789")


@pytest.mark.parametrize("claimed", [2, 20])
def test_a_head_that_counts_other_rows_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: int
) -> None:
    write_solid(tmp_path, 7)
    real = parquet._open

    def forged(path: Path) -> Any:
        file = real(path)
        return Mock(wraps=file, schema_arrow=file.schema_arrow, metadata=Mock(num_rows=claimed))

    monkeypatch.setattr(parquet, "_open", forged)
    monkeypatch.setattr(parquet, "check_size", lambda path, columns: None)
    files = tuple(map(parquet.File.at, (tmp_path / "mnist").iterdir()))
    with pytest.raises(DataError, match=r"parquet has another number of rows than its head says"):
        parquet.read_images(files, ("image",), (1, 28, 28))
