"""Tables: pandas frames, and CSV and Parquet files, of one or of every client."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from rich.console import Console

import potluck
from potluck import Experiment, Split, from_arrays, from_files, from_frame
from potluck.cli.views.split import split_entry, split_view
from potluck.data.views import client_samples
from potluck.errors import DataError, PotluckError
from potluck.runs.advice import advice


def patients(rows: int = 12, older: float = 0.0, **columns: Any) -> pd.DataFrame:
    draw = np.random.default_rng(rows)
    frame = pd.DataFrame(
        {
            "age": draw.normal(50 + older, 10, rows),
            "sex": np.resize(["m", "f"], rows),
            "smoker": np.resize([True, False, False], rows),
            "stay": draw.normal(5, 2, rows),
        }
    )
    return frame.assign(**columns)


def test_texts_become_categories_and_numbers_stay() -> None:
    frame = patients()
    data = from_frame(frame, target="stay")
    assert (data.task.kind, data.task.classes, data.task.input) == ("regression", 1, (4,))
    np.testing.assert_array_equal(data.y.numpy(), frame["stay"].to_numpy(np.float32))
    np.testing.assert_array_equal(data.x[:, 0].numpy(), frame["age"].to_numpy(np.float32))
    assert data.x[:3, 1:].tolist() == [[0, 1, 1], [1, 0, 0], [0, 1, 0]]
    assert data.standardize == (0,)


def test_one_vocabulary_over_all_clients() -> None:
    frames = {"north": patients(sex="m"), "south": patients(sex="f")}
    data = from_frame(frames, target="stay", features=["sex"])
    assert data.x[[0, 12]].tolist() == [[0, 1], [1, 0]]
    declared = from_frame(frames, target="stay", features=["sex"], categorical={"sex": ["f", "x", "m"]})
    assert declared.x[[0, 12]].tolist() == [[0, 0, 1], [1, 0, 0]]


def test_a_column_names_the_clients_and_is_not_learned_from() -> None:
    data = from_frame(patients(site=[*"bca" * 4]), target="stay", by="site")
    assert data.owners is not None
    assert data.owners.names == ("a", "b", "c")
    assert data.task.input == (4,)


def test_classes_keep_their_names() -> None:
    data = from_frame(patients(), target="sex")
    assert (data.task.kind, data.class_names) == ("classification", ("f", "m"))
    numbered = from_frame(patients(grade=[1, 2, 10] * 4), target="grade", task="classification")
    assert numbered.class_names == ("1", "2", "10")
    assert numbered.y[:3].tolist() == [0, 1, 2]
    both = from_frame(patients(ill=[0, 1] * 6, old=[0, 0, 1] * 4), target=["ill", "old"], task="multi-label")
    assert both.class_names == ("ill", "old")
    assert both.y[:3].tolist() == [[0, 0], [1, 0], [0, 1]]


def test_each_client_standardises_by_its_own_training_rows(tmp_path: Path) -> None:
    data = from_frame({"a": patients(40), "b": patients(40, older=30)}, target="sex")
    experiment = Experiment.make(data=data, models="mlp-small", method="local")
    split = experiment.make_split(data)
    seen = client_samples(data, split.clients)
    assert seen is not None
    for client in split.clients:
        own = seen[client.train][:, list(data.standardize)]
        torch.testing.assert_close(own.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(own.std(0, correction=0), torch.ones(2), atol=1e-5, rtol=0)
        raw, mine = data.x[client.train].double(), client.test
        expected = (data.x[mine, 0].double() - raw[:, 0].mean()) / raw[:, 0].std(correction=0)
        torch.testing.assert_close(seen[mine, 0].double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(seen[:, 1], data.x[:, 1])  # a truth value
    split.save(tmp_path / "split.json", data)
    again = client_samples(data, Split.load(tmp_path / "split.json").clients)
    assert again is not None
    assert torch.equal(again, seen)
    bare = from_frame({"a": patients(40)}, target="sex", standardize="none")
    plain = Experiment.make(data=bare, models="mlp-small", method="local").make_split(bare)
    assert client_samples(bare, plain.clients) is None


def test_public_samples_cannot_follow_clients_that_standardise() -> None:
    data = from_frame({"a": patients(40), "b": patients(40)}, target="sex")
    public = {"data": from_arrays(data.x, data.y), "samples": 10}
    experiment = Experiment.make(data=data, models="mlp-small", method="fedmd", public=public)
    with pytest.raises(PotluckError, match="say standardize: none"):
        experiment.build()


def _with_gaps(rows: int = 40) -> dict[str, pd.DataFrame]:
    """Two tables where every fourth age and one sex are missing."""
    frames = {"a": patients(rows), "b": patients(rows, older=30)}
    for frame in frames.values():
        frame.loc[::4, "age"] = np.nan
        frame.loc[5, "sex"] = None
    return frames


def test_missing_values_are_filled_with_the_mean_of_the_client_s_training_rows(tmp_path: Path) -> None:
    frames = _with_gaps()
    data = from_frame(frames, target="stay", missing="mean", standardize="none")
    assert data.x[:, 0].isnan().sum() == 20
    assert data.x[5, 1:3].tolist() == [0, 0]
    whole = pd.concat([frame.assign(site=name) for name, frame in frames.items()])
    by_column = from_frame(whole, target="stay", by="site", missing="mean", standardize="none")
    torch.testing.assert_close(by_column.x, data.x, equal_nan=True)
    split = Experiment.make(data=data, models="mlp-small", method="local").make_split(data)
    seen = client_samples(data, split.clients)
    assert seen is not None
    for client in split.clients:
        for part in client.parts:
            stored, mean = data.x[part, 0], data.x[client.train, 0].nanmean()
            torch.testing.assert_close(seen[part, 0], torch.where(stored.isnan(), mean, stored))
    split.save(tmp_path / "split.json", data)
    again = client_samples(data, Split.load(tmp_path / "split.json").clients)
    assert again is not None
    assert torch.equal(again, seen)


def test_what_is_filled_follows_from_training_rows_alone() -> None:
    """Other values in validation and test rows change nothing that a client fills or standardises with."""
    frames = _with_gaps()
    data = from_frame(frames, target="stay", missing="mean")
    experiment = Experiment.make(data=data, models="mlp-small", method="local")
    first = experiment.make_split(data)
    for name, frame in frames.items():
        start = 0 if name == "a" else 40
        frame.loc[np.concatenate(first[name].parts[1:]) - start, "age"] = 1000.0
    other = experiment.make_split(from_frame(frames, target="stay", missing="mean"))
    for one, two in zip(first.clients, other.clients, strict=True):
        assert one.view == two.view


def test_a_text_column_may_be_mostly_missing_at_a_client() -> None:
    some = patients(40, allergy=["nuts", *[None] * 2, "milk", None] * 8)
    data = from_frame({"a": patients(40, allergy="milk"), "b": some}, target="stay", missing="mean")
    assert data.encoding is not None
    assert data.encoding.names[-2:] == ("allergy=milk", "allergy=nuts")
    assert data.x[40:43, -2:].tolist() == [[0, 1], [0, 0], [0, 0]]


def _never_measured(value: Any = np.nan) -> dict[str, pd.DataFrame]:
    return {"a": patients(40, bmi=np.linspace(18, 35, 40)), "b": patients(44, older=9, bmi=value)}


@pytest.mark.parametrize("gap", [np.nan, None])
def test_a_column_that_a_client_never_measured_is_zero_there(tmp_path: Path, gap: Any) -> None:
    frames = _never_measured(gap)
    frames["b"]["sex"] = gap
    data = from_frame(frames, target="stay", missing="mean")
    experiment = Experiment.make(data=data, models="mlp-small", method="local", training={"rounds": 1})
    split = experiment.make_split(data)
    seen = client_samples(data, split.clients)
    assert seen is not None
    assert torch.isfinite(seen).all()
    assert seen[40:, [1, 2, 4]].unique().tolist() == [0.0]  # both categories of sex, and bmi
    assert len(seen[:40, 4].unique()) == 40
    split.save(tmp_path / "split.json", data)
    again = client_samples(data, Split.load(tmp_path / "split.json").clients)
    assert again is not None
    assert torch.equal(again, seen)
    assert sum("column 'bmi' of client b is never measured" in one for one in advice(experiment.build())) == 1
    client = potluck.run(experiment, out=tmp_path / "run", progress=False).clients["b"]
    new = frames["b"].drop(columns="stay")
    torch.testing.assert_close(client.predict(new.assign(bmi=30.0)), client.predict(new))


def test_a_column_without_a_value_in_a_client_s_training_rows_is_zero_there() -> None:
    one = patients(40)
    one.loc[1:, "age"] = np.nan
    data = from_frame(
        {"a": patients(40), "b": {"train": one, "test": patients(4)}}, target="stay", missing="mean"
    )
    partition = {"kind": "natural", "validation": 0.9, "test": 0.05}
    split = Experiment.make(data=data, models="mlp-small", method="local", partition=partition).make_split(
        data
    )
    assert split["b"].sees(data.x[split["b"].test])[:, 0].tolist() == [0.0] * 4


def _advice(frames: Any) -> list[str]:
    data = from_frame(frames, target="stay", missing="mean")
    return [*advice(Experiment.make(data=data, models="mlp-small", method="local").build())]


def test_columns_that_teach_nothing_or_number_the_rows_are_told() -> None:
    assert _advice({"a": patients(80), "b": patients(70)}) == []
    (sentence,) = _advice(_never_measured(22.0))
    assert "column 'bmi' of client b is the same in all training rows" in sentence
    numbered = {name: patients(rows, id=np.arange(rows)) for name, rows in (("a", 80), ("b", 70))}
    (sentence,) = _advice(numbered)
    assert "column 'id'" in sentence
    assert "leave it out of features" in sentence
    numbered["b"].loc[0, "id"] = 1
    assert _advice(numbered) == []


def test_infinite_numbers_are_named(tmp_path: Path) -> None:
    frame = patients(40)
    data = from_frame({"a": frame, "b": patients(44)}, target="stay")
    run = potluck.run(
        data=data, models="mlp-small", method="local", training={"rounds": 1}, out=tmp_path / "run"
    )
    endless, x = frame.assign(age=frame["age"].mask(frame.index == 3, np.inf)), data.x[:5].clone()
    x[2, 0] = torch.inf
    with pytest.raises(DataError, match=r"column 'age' holds an infinite value \(row 3\)"):
        from_frame(endless, target="stay")
    with pytest.raises(DataError, match=r"client a: column 'age' holds an infinite value \(row 3\)"):
        run.clients["a"].predict(endless)
    with pytest.raises(DataError, match="client a: sample 2 holds an infinite value"):
        run.clients["a"].predict(x)
    for wrong in ("new.csv", {"age": 3.0}):
        with pytest.raises(DataError, match="give a pandas frame"):
            run.clients["a"].predict(wrong)


def test_a_client_predicts_for_rows_of_a_table(tmp_path: Path) -> None:
    frames = _with_gaps()
    data = from_frame(frames, target="stay", missing="mean")
    run = potluck.run(
        data=data,
        models="mlp-small",
        method="local",
        training={"rounds": 1},
        keep="last",
        evaluate={"predictions": True},
        out=tmp_path / "run",
    )
    client = run.clients["b"]
    new = frames["b"].drop(columns="stay")
    answers = client.predict(new)
    torch.testing.assert_close(client.predict(new.iloc[:1]), answers[:1])  # whoever else is in the frame
    torch.testing.assert_close(client.predict(data.x[40:]), answers)
    alone = pd.DataFrame([{"age": None, "sex": "m", "smoker": True}])
    torch.testing.assert_close(client.predict(alone), answers[:1])
    kept = run.predictions()
    kept = kept[kept["client"] == "b"]
    expected = torch.tensor(np.stack(kept["scores"].to_list()))
    assert kept["own_row"].tolist() == (kept["row"] - 40).tolist()
    torch.testing.assert_close(answers[kept["own_row"].tolist()], expected)
    opened = potluck.open(tmp_path / "run").clients["b"]
    torch.testing.assert_close(opened.predict(new), answers)
    with pytest.raises(PotluckError, match="client b: there is no column 'age'"):
        opened.predict(new.drop(columns="age"))
    with pytest.raises(PotluckError, match="client b: column 'sex' has 'x', which is none of its categories"):
        opened.predict(new.assign(sex="x"))


def test_the_columns_that_are_learned_from_are_shown(tmp_path: Path) -> None:
    data = from_frame({"a": patients(40), "b": patients(40)}, target="stay")
    split = Experiment.make(data=data, models="mlp-small", method="local").make_split(data)
    entry = split_entry(data, split)
    assert entry["features"] == ["age", "sex=f", "sex=m", "smoker"]
    console = Console(width=200)
    with console.capture() as shown:
        console.print(split_view(entry))
    assert "learned from: age, sex=f, sex=m, smoker" in shown.get()
    split.save(tmp_path / "split.json", data)
    assert json.loads((tmp_path / "split.json").read_text())["features"] == entry["features"]
    assert Split.load(tmp_path / "split.json") == split


def test_nan_is_refused_where_a_run_does_not_fill_it(tmp_path: Path) -> None:
    data = from_frame({"a": patients(40), "b": patients(40)}, target="stay")
    run = potluck.run(
        data=data, models="mlp-small", method="local", training={"rounds": 1}, out=tmp_path / "run"
    )
    x = data.x[:3].clone()
    x[1, 0] = torch.nan
    with pytest.raises(PotluckError, match="client a: sample 1 holds NaN, which this run does not fill"):
        run.clients["a"].predict(x)
    with pytest.raises(PotluckError, match="client a: column 'age' lacks 40 of 40 values"):
        run.clients["a"].predict(patients(40, age=np.nan))


@pytest.mark.parametrize(
    ("frames", "options", "sentence"),
    [
        (patients(), {"target": "stays"}, "no column 'stays'; did you mean 'stay'"),
        (
            patients(stay=3),
            {"target": "stay"},
            "whole numbers: say task='regression' or task='classification'",
        ),
        (patients(age=[np.nan] + [1.0] * 11), {"target": "stay"}, "column 'age' lacks 1 of 12 values"),
        (patients(age=np.nan), {"target": "stay", "missing": "mean"}, "'age' has no value at all"),
        (patients(stay=np.nan), {"target": "stay"}, "the target 'stay' lacks 12"),
        (patients(day=pd.Timestamp("2026-01-01")), {"target": "stay"}, "column 'day' holds dates"),
        (patients(day="2026-01-01"), {"target": "stay"}, "column 'day' holds dates"),
        (patients(name=[*"abcdefghijkl"]), {"target": "stay", "categorical": ["sex"]}, "'name' holds texts"),
        (patients(120, name=[f"p{i}" for i in range(120)]), {"target": "stay"}, "120 different texts"),
        (
            patients(),
            {"target": "stay", "categorical": {"sex": ["f"]}},
            "has 'm', which is none of its categories",
        ),
        (patients(), {"target": "stay", "missing": "median"}, "missing is 'median'; choose refuse or mean"),
        (patients(), {"target": "stay", "features": ["stay"]}, "take it out of features"),
        (patients()[["stay"]], {"target": "stay"}, "no column to learn from"),
        (
            {"a": patients(40, stay=np.arange(40) / 7)},
            {"target": "stay", "task": "classification"},
            "target 'stay': 40 different classes in 40 rows cannot be learned: for numbers say task='regression'",
        ),
        (
            {"a": patients(), "b": patients(more=1)},
            {"target": "stay"},
            "client b: the column 'more' is not in",
        ),
        ({"a": patients(more=1), "b": patients()}, {"target": "stay"}, "client b: there is no column 'more'"),
        (
            {"a": patients(), "b": patients(age="?")},
            {"target": "stay"},
            "client b: column 'age' holds the text '\\?'",
        ),
        (
            {"a": patients(), "b": patients(age=[*"12345678", "forty", *"123"])},
            {"target": "stay"},
            "client b: column 'age' holds numbers but for 1 of 12 values \\(row 8: 'forty'\\)",
        ),
        (
            patients(age=[*"12345678", "forty", *"123"]),
            {"target": "stay"},
            "column 'age' holds numbers but for 1 of 12 values \\(row 8: 'forty'\\).* name it in categorical",
        ),
        (
            patients(site=[*"abcabcabcab", np.nan]),
            {"target": "stay", "by": "site"},
            "row 11 names no client",
        ),
        (
            {1: patients(), "1": patients()},
            {"target": "stay"},
            "the number 1 and the text '1' would be one client",
        ),
        ({"a": patients()}, {"target": "stay", "by": "sex"}, "given one by one: leave out by"),
        ([1, 2], {"target": "stay"}, "give a pandas frame"),
        (patients()[:0], {"target": "stay"}, "no row in it"),
    ],
)
def test_a_mistake_in_a_table_is_named(frames: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_frame(frames, **options)


def write(folder: Path) -> None:
    folder.mkdir()
    for number, name in enumerate(("north", "south", "west")):
        patients(24 + number, older=10 * number).to_csv(folder / f"{name}.csv", index=False)


def test_files_are_clients(tmp_path: Path) -> None:
    write(tmp_path / "hospitals")
    data = from_files("hospitals/*.csv", target="sex", dir=tmp_path)
    assert data.owners is not None
    assert data.owners.names == ("north", "south", "west")
    patients().to_parquet(tmp_path / "test.parquet")
    named = from_files(
        {"a": "hospitals/north.csv", "b": {"train": "hospitals/west.csv", "test": "test.parquet"}},
        target="sex",
        dir=tmp_path,
    )
    assert (named.train_rows, len(named)) == (24 + 26, 24 + 26 + 12)


def test_a_mistake_names_the_file_and_the_column(tmp_path: Path) -> None:
    write(tmp_path / "hospitals")
    patients(more=1).to_csv(tmp_path / "hospitals" / "zoo.csv", index=False)
    with pytest.raises(DataError, match=r"zoo\.csv: the column 'more' is not in .*north\.csv"):
        from_files("hospitals/*.csv", target="stay", dir=tmp_path)
    (tmp_path / "notes.txt").write_text("nothing")
    for path, sentence in (
        ("x*.csv", r"no file is called .*x\*\.csv: check the path"),
        ("x.csv", "no file"),
        ("notes.txt", "neither .csv"),
        ("hospitals", r"hospitals is a folder; write hospitals/\*\.csv"),
        ({"north": "hospitals"}, "hospitals is a folder; name a file in it"),
    ):
        with pytest.raises(DataError, match=sentence):
            from_files(path, target="stay", dir=tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    for name, header in (("feature", "age,age,stay"), ("target", "age,stay,stay")):
        (tmp_path / f"{name}.csv").write_text(f"{header}\n1,2,3.5\n4,5,6.5\n")
        with pytest.raises(DataError, match=rf"{name}\.csv: two columns are called"):
            from_files(f"{name}.csv", target="stay", dir=tmp_path)
    (tmp_path / "semicolons.csv").write_text("age;stay\n1;3.5\n")
    with pytest.raises(DataError, match="parted by semicolons"):
        from_files("semicolons.csv", target="stay", dir=tmp_path)


def test_numbers_with_a_text_may_be_categories() -> None:
    sizes = patients(size=[*["38", "40"] * 5, "XL", "S"])
    data = from_frame(sizes, target="stay", features=["size"], categorical=["size"])
    assert data.task.input == (4,)


def experiment_file(folder: Path, **blocks: Any) -> Path:
    content = {"models": ["mlp-small"], "method": "local", "training": {"rounds": 1}} | blocks
    (folder / "trial.yaml").write_text(yaml.safe_dump(content))
    return folder / "trial.yaml"


def test_an_experiment_file_names_the_files(tmp_path: Path) -> None:
    write(tmp_path / "hospitals")
    path = experiment_file(tmp_path, data={"name": "files", "path": "hospitals/*.csv", "target": "sex"})
    experiment = Experiment.load(path)
    split = experiment.make_split(experiment.load_data())
    assert split.ids == ("north", "south", "west")
    (tmp_path / "elsewhere").mkdir()
    again = tmp_path / "elsewhere" / "config.yaml"
    again.write_text(experiment.to_yaml())
    copy = Experiment.load(again)
    assert copy.make_split(copy.load_data()) == split
    result = potluck.run(experiment, out=tmp_path / "run")
    assert result is not None
    assert '"scaling"' in (tmp_path / "run" / "split.json").read_text()


def test_an_experiment_file_names_the_column_in_data_or_in_the_partition(tmp_path: Path) -> None:
    patients(30, site=[*"abc" * 10]).to_csv(tmp_path / "all.csv", index=False)
    files, hashes = {"name": "files", "path": "all.csv", "target": "sex"}, set()
    for data, partition in (
        (files, {"kind": "natural", "by": "site"}),
        (files | {"by": "site"}, {"kind": "natural"}),
        (files | {"by": "site"}, None),
    ):
        experiment = Experiment.load(experiment_file(tmp_path, data=data, partition=partition))
        hashes.add(experiment.make_split(experiment.load_data()).hash)
    assert len(hashes) == 1
    for data, sentence in (
        (files, "does not say which client"),
        ({"name": "files", "path": "all.csv"}, "the files need the key 'target'"),
        ({"name": "digits", "target": "sex"}, "'digits' has no option 'target'"),
    ):
        experiment = Experiment.load(experiment_file(tmp_path, data=data, partition={"kind": "natural"}))
        with pytest.raises(PotluckError, match=sentence):
            experiment.make_split(experiment.load_data())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"categorical": ["sexx"]}, "categorical names 'sexx', which is not a column; did you mean 'sex'"),
        ({"categorical": {"sexx": ["f", "m"]}, "features": ["age"]}, "categorical names 'sexx'"),
        (
            {"categorical": {"sex": ["f", "m"]}, "features": ["age"]},
            "categorical names 'sex', which is not learned from: add it to features, or take it out of categorical",
        ),
        ({"categorical": ["stay"]}, "'stay', which is not learned from: take it out of categorical"),
        ({"categorical": {"sex": "fm"}}, "categorical.sex: give a list of categories"),
        ({"target": None}, "target: give the name of a column, or a list of names, not None"),
        ({"target": 3}, "target: give the name of a column"),
        ({"target": []}, "target: give the name of a column"),
        ({"target": ["stay", "stay"]}, "target names 'stay' twice"),
        ({"features": []}, "features: give the name of a column"),
        ({"features": ["age", "age"]}, "features names 'age' twice"),
        ({"by": "stay"}, "'stay' is target and by"),
        ({"by": 3}, "by: give the name of a column"),
        ({"class_names": "ab"}, "class_names: give a list of texts"),
        ({"class_names": ["a", "a"]}, "class_names holds 'a' twice"),
    ],
)
def test_arguments_that_make_no_sense_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_frame(patients(), **{"target": "stay", **options})


def test_one_name_of_a_column_may_stand_alone() -> None:
    data = from_frame(patients(), target="stay", features="sex", categorical="sex")
    assert data.encoding is not None
    assert data.encoding.names == ("sex=f", "sex=m")


def test_columns_without_a_name_are_refused() -> None:
    with pytest.raises(DataError, match=r"the column 0 is not called by a text.*rename\(columns=str\)"):
        from_frame(pd.DataFrame(np.zeros((4, 3))), target="2")


@pytest.mark.parametrize("column", ["age", "stay"])
def test_lists_in_a_column_are_named(column: str) -> None:
    with pytest.raises(DataError, match=f"column '{column}' holds a list in a cell"):
        from_frame(patients(**{column: [[1, 2]] * 12}), target="stay", task="regression")


def test_paths_that_are_none_are_named(tmp_path: Path) -> None:
    patients().to_csv(tmp_path / "a.csv", index=False)
    for paths, options, sentence in (
        (3, {}, "paths: give the path of a file"),
        ({"north": 3}, {}, "client north: give a path, not a int"),
        ("a.csv", {"dir": 5}, "dir: give a path, not 5"),
    ):
        with pytest.raises(DataError, match=sentence):
            from_files(paths, **{"target": "stay", "dir": tmp_path, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"modality": "vektor"}, "there is no modality 'vektor'; did you mean 'vector'"),
        ({"classes": "3"}, "classes: give a whole number, not '3'"),
        ({"class_names": ["a", "a", "b"]}, "class_names holds 'a' twice"),
        ({"class_names": "abc"}, "class_names: give a list of texts"),
        ({"class_names": ["a", "b", "\ud800"]}, r"the class name '\\ud800' is not text in UTF-8; rename"),
    ],
)
def test_what_makes_no_sense_about_arrays_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        from_arrays(np.zeros((6, 2)), np.arange(6) % 3, **options)


def test_labels_that_hardly_repeat_are_no_classes_unless_they_are_named() -> None:
    x, y = np.zeros((40, 2)), np.arange(40)
    for labels in (y, [f"p{one}" for one in y]):
        with pytest.raises(DataError, match="40 different classes in 40 rows cannot be learned"):
            from_arrays(x, labels)
    assert from_arrays(x, y, classes=40).task.classes == 40
    assert from_arrays(x, y % 20).task.classes == 20
    assert from_arrays(x, y[:20].repeat(2)).task.classes == 20


@pytest.mark.parametrize("rows", ["61,1,3.5,0\n62,2,4.5,1\n", "61,1,3.5,0,8\n62,2,4.5,1,9\n"])
def test_rows_with_more_fields_than_names_are_refused(tmp_path: Path, rows: str) -> None:
    """pandas would take the ages for names of the rows, and the doses for ages."""
    (tmp_path / "a.csv").write_text("age,dose,stay\n" + rows)
    with pytest.raises(DataError, match=r"a\.csv: its rows have more fields than its first line names: give"):
        from_files(tmp_path / "a.csv", target="stay")


def test_a_comma_at_the_end_of_each_line_moves_no_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,stay\n" + "61,3.5,\n62,4.5,\n" * 4)
    data = from_files(tmp_path / "a.csv", target="stay", standardize="none")
    assert (data.x[:2, 0].tolist(), data.y[:2].flatten().tolist()) == ([61, 62], [3.5, 4.5])


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
@pytest.mark.parametrize("first", ["1", ",".join("1" * 3000)])
def test_short_rows_count_as_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, first: str
) -> None:
    names = ",".join(f"c{place}" for place in range(3000 if first == "1" else 2))
    (tmp_path / "a.csv").write_text(f"{names}{end}{end}{first}{end}" + f"1{end}" * 2000, newline="")
    monkeypatch.setenv("POTLUCK_DATA_LIMIT", "40000000")
    with pytest.raises(DataError, match=r"a\.csv would take 0\.0 GiB .* \(2,00\d rows\).*POTLUCK_DATA_LIMIT"):
        from_files(tmp_path / "a.csv", target="c1")


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_long_text_in_the_first_row_is_one_field(tmp_path: Path, quote: str) -> None:
    rows = f"61,{quote}{'word ' * 30_000}{quote},3.5\n" + "62,short,4.5\n" * 7
    (tmp_path / "a.csv").write_text("age,note,stay\n" + rows)
    limit = csv.field_size_limit()
    assert from_files(tmp_path / "a.csv", target="stay", features=["age"]).x.shape == (8, 1)
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("names", [("01", "1"), ("1e3", "1000"), ("0.1", ".1")])
def test_clients_that_would_become_one_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    rows = [f"{row},{name},{row}.5" for row in range(8) for name in (*names, "2")]
    (tmp_path / "a.csv").write_text("\n".join(["age,who,stay", *rows]))
    with pytest.raises(
        DataError, match=rf"a\.csv: '{names[0]}' and '{names[1]}' in the column 'who' are read as"
    ):
        from_files(tmp_path / "a.csv", target="stay", by="who")


@pytest.mark.parametrize("end", ["", ","])
def test_clients_with_numbers_in_one_way_are_clients(tmp_path: Path, end: str) -> None:
    rows = [f"{row},{name},{row}.5{end}" for row in range(8) for name in ("007", " 8", "8 ", "10")]
    (tmp_path / "a.csv").write_text("\n".join(["age,who,stay", *rows]))
    data = from_files(tmp_path / "a.csv", target="stay", by="who")
    assert data.owners is not None
    assert sorted(data.owners.names) == ["10", "7", "8"]


def test_clients_with_long_numbers_stay_apart(tmp_path: Path) -> None:
    names = ["12345678901234567890", "12345678901234567891", "2"]
    rows = [f"{row},{name},{row}.5" for row in range(8) for name in names]
    (tmp_path / "a.csv").write_text("\n".join(["age,who,stay", *rows]))
    data = from_files(tmp_path / "a.csv", target="stay", by="who")
    assert data.owners is not None
    assert sorted(data.owners.names) == names


def test_a_long_column_is_read_as_one(tmp_path: Path) -> None:
    """pandas reads a large file in parts, in which 01 would be a number here and a text there."""
    names, zeros = ",".join(f"c{place}" for place in range(2000)), "0," * 2000
    rows = "".join(f"{zeros}{'01' if row < 598 else 'ward'},{row}.5\n" for row in range(600))
    (tmp_path / "a.csv").write_text(f"{names},who,stay\n{rows}")
    data = from_files(tmp_path / "a.csv", target="stay", by="who", features=["c0"])
    assert data.owners is not None
    assert sorted(data.owners.names) == ["01", "ward"]


@pytest.mark.parametrize(
    ("column", "options"),
    [("sex", {}), ("stay", {"task": "classification"}), ("hospital", {"by": "hospital"}), ("a" * 1001, {})],
)
def test_texts_too_long_for_names_are_refused(column: str, options: dict[str, Any]) -> None:
    """A text as long as a book would be copied for every row, though only one row has it."""
    frame = patients(hospital=["north", "south"] * 6)
    frame["stay"] = ["short", "long"] * 6
    frame[column] = ["b" * 1001, *["c", "d"] * 5, "c"]
    with pytest.raises(DataError, match=r"column '.*' has a text of more than 1,000 letters"):
        from_frame(frame, target="stay", **options)
    frame[column] = ["b" * 1000, *["c", "d"] * 5, "c"]
    if len(column) <= 1000:
        from_frame(frame, target="stay", **options)


def test_very_many_names_are_compared_once_each(tmp_path: Path) -> None:
    """Comparing each with each would take hours."""
    many = [f"c{number}" for number in range(100_000)]
    frame = patients()
    with pytest.raises(DataError, match="class_names holds 'c99999' twice"):
        from_frame(frame, target="sex", class_names=[*many, "c99999"])
    with pytest.raises(DataError, match="features names 'c99999' twice"):
        from_frame(frame, target="stay", features=[*many, "c99999"])
    clients = [{"id": one, "train": [0], "validation": [], "test": []} for one in [*many, "c99999"]]
    (tmp_path / "split.json").write_text(json.dumps({"clients": clients}))
    with pytest.raises(DataError, match="two clients with the id 'c99999'"):
        Split.load(tmp_path / "split.json")
