"""The views of a run's log: against numbers worked out by hand, and against what must hold for any log."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.rng import Rng
from potluck.errors import ConfigError, RunError
from potluck.report import log, reading, scores
from potluck.report.comparison import bootstrap_interval, compare_runs, paired, paired_difference
from potluck.report.run_frames import frame


def line(
    round_,
    client,
    accuracy=None,
    *,
    when="after_aggregation",
    mode="own",
    samples=10,
    validation=None,
    held=False,
):
    record = {"round": round_, "client": client, "when": when, "mode": mode}
    if accuracy is not None:
        record["test"] = {"accuracy": accuracy, "loss": 1.0, "samples": samples}
    if validation is not None:
        record["validation"] = {"accuracy": validation, "loss": 1.0, "samples": 5}
    return record | ({"held_out": True} if held else {})


def write_log(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def metrics_of(tmp_path: Path, records) -> log.Metrics:
    return log.read_metrics(write_log(tmp_path / "metrics.jsonl", records))


@pytest.fixture
def three_rounds(tmp_path):
    """Two clients; validation prefers round 1, test round 2, and round 3 is the last."""
    table = {1: ((0.5, 0.9), (0.7, 0.9)), 2: ((0.9, 0.6), (0.9, 0.6)), 3: ((0.6, 0.5), (0.8, 0.5))}
    return metrics_of(
        tmp_path,
        [
            line(number, client, test, validation=valid, samples=samples)
            for number, values in table.items()
            for client, (test, valid), samples in zip("ab", values, (10, 30), strict=True)
        ],
    )


def test_the_block_holds_the_numbers_worked_out_by_hand(three_rounds):
    assert scores.summarise(three_rounds) == {
        "when": "after_aggregation",
        "mode": "own",
        "last": 0.7,
        "best_by_validation": 0.6,
        "best_by_test": 0.9,
        "weighted_last": 0.75,
        "std_over_clients": 0.1,
        "worst_tenth": 0.6,
        "coverage": 2,
        "rounds": {"last": 3, "best_by_validation": 1, "best_by_test": 2},
        "per_client": {"a": 0.6, "b": 0.8},
    }


def test_no_validation_means_no_best_by_validation(tmp_path):
    block = scores.summarise(metrics_of(tmp_path, [line(1, "a", 0.5)]))
    assert block["best_by_validation"] is None
    assert block["rounds"]["best_by_validation"] is None


def test_an_absent_log_gives_a_block_without_values(tmp_path):
    block = scores.summarise(tmp_path)
    assert (block["last"], block["when"], block["per_client"]) == (None, None, {})
    assert json.loads(json.dumps(block, allow_nan=False)) == block


def test_an_absent_folder_is_named(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        scores.summarise(tmp_path / "nowhere")


def test_last_is_the_last_evaluated_round_and_coverage_counts_its_clients(tmp_path):
    records = [line(1, str(client), 0.2) for client in range(5)] + [line(2, "3", 0.8), line(3, "4", None)]
    block = scores.summarise(metrics_of(tmp_path, records))
    assert (block["last"], block["coverage"], block["rounds"]["last"]) == (0.8, 1, 2)


def test_held_out_clients_stay_out_of_the_means(tmp_path):
    block = scores.summarise(metrics_of(tmp_path, [line(1, "a", 0.5), line(1, "new", 0.1, held=True)]))
    assert block["last"] == 0.5
    assert block["held_out"] == {"clients": 1, "last": 0.1}
    assert "new" not in block["per_client"]


def test_the_headline_prefers_aggregation_and_the_first_mode(tmp_path):
    records = [
        line(1, "a", 0.1, when="before", mode="small"),
        line(1, "a", 0.2, when="after_training", mode="small"),
        line(1, "a", 0.3, when="after_aggregation", mode="large"),
        line(1, "a", 0.4, when="after_aggregation", mode="small"),
    ]
    assert metrics_of(tmp_path, records).headline() == ("after_aggregation", "large")
    assert metrics_of(tmp_path, records).headline(mode="small") == ("after_aggregation", "small")
    assert metrics_of(tmp_path, records[:2]).headline() == ("after_training", "small")
    assert metrics_of(tmp_path, records[:1]).headline() == ("before", "small")


def test_an_unknown_moment_or_mode_is_refused_with_the_nearest(three_rounds):
    with pytest.raises(ConfigError, match=r"'after_agregation'.*'after_aggregation'"):
        scores.summarise(three_rounds, when="after_agregation")
    with pytest.raises(ConfigError, match=r"mode 'owm'.*'own'"):
        scores.summarise(three_rounds, mode="owm")


def test_the_later_of_two_equal_lines_counts(tmp_path):
    assert scores.summarise(metrics_of(tmp_path, [line(1, "a", 0.1), line(1, "a", 0.7)]))["last"] == 0.7


def test_an_unfinished_last_line_is_skipped_and_a_broken_one_is_not(tmp_path):
    path = write_log(tmp_path / "metrics.jsonl", [line(1, "a", 0.5)])
    with path.open("a") as file:
        file.write('{"round": 2, "cli')
    assert scores.summarise(tmp_path)["last"] == 0.5
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is not JSON"):
        scores.summarise(tmp_path)


@pytest.mark.parametrize(
    "record", [{"client": "a"}, {"round": "x", "client": "a", "when": "before"}, {"round": 1}]
)
def test_a_line_that_is_no_measurement_is_named(tmp_path, record):
    with pytest.raises(RunError, match="line 1 is not a measurement"):
        metrics_of(tmp_path, [record])


def test_values_that_are_not_numbers_count_as_absent(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"round":1,"client":"a","when":"before","mode":"m","test":{"accuracy":NaN,"samples":3}}\n'
        '{"round":1,"client":"b","when":"before","mode":"m","test":{"accuracy":0.5,"samples":3}}\n'
    )
    assert scores.summarise(tmp_path)["per_client"] == {"b": 0.5}


def test_values_are_sorted_by_round_and_client_however_they_were_logged(tmp_path):
    metrics = metrics_of(tmp_path, [line(3, "10", 0.3), line(3, "9", 0.2), line(1, "10", 0.1)])
    series = metrics.series["after_aggregation", "own"]
    assert series.names == ("9", "10")
    assert series.rounds.tolist() == [1, 3]
    assert series.at(0).per_client() == {"10": 0.1}
    assert list(series.at(1).per_client().items()) == [("9", 0.2), ("10", 0.3)]


def test_a_band_is_one_deviation_to_either_side(three_rounds):
    series = three_rounds.series["after_aggregation", "own"]
    curve = series.curve("x", band=True)
    np.testing.assert_allclose(curve.mean, [0.6, 0.9, 0.7], rtol=1e-5)
    np.testing.assert_allclose(curve.high - curve.mean, [0.1, 0.0, 0.1], atol=1e-6)
    np.testing.assert_allclose(curve.mean - curve.low, [0.1, 0.0, 0.1], atol=1e-6)
    assert series.curve("x").low is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "is not JSON"),
        ('{"round": 1, "client": "a"}', r"is not a measurement \(it has no when\)"),
        ('{"round": 1, "client": "a", "when": "before", "test": {"f1": "high"}}', "is not a measurement"),
        ("[1]", "is not a measurement"),
    ],
)
def test_a_broken_line_in_the_middle_of_a_long_log_is_named(tmp_path, broken, message):
    test = {"score": 0.5, "metric": "mean_ap", "mean_ap": 0.5, "f1": 0.5, "samples": 1}
    good = json.dumps({"round": 1, "client": "a", "when": "before", "test": test})
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([good] * 300 + [broken] + [good] * 200) + "\n")
    with pytest.raises(RunError, match=f"line 301 {message}"):
        log.read_metrics(path)


fractions = st.floats(0, 1).map(lambda value: round(value, 6))
logs = st.dictionaries(
    st.tuples(st.integers(1, 6), st.integers(0, 14)),
    st.tuples(fractions, st.integers(1, 50), st.none() | fractions),
    min_size=1,
)


def records_of(log, order=None):
    cells = list(log.items()) if order is None else [list(log.items())[place] for place in order]
    return [
        line(number, str(client), test, samples=samples, validation=valid)
        for (number, client), (test, samples, valid) in cells
    ]


@given(log=logs, data=st.data())
@settings(deadline=None, max_examples=60)
def test_what_holds_for_every_log(tmp_path_factory, log, data):
    folder = tmp_path_factory.mktemp("log")
    block = scores.summarise(metrics_of(folder, records_of(log)))
    assert block["best_by_test"] >= block["last"]
    assert block["best_by_validation"] is None or block["best_by_test"] >= block["best_by_validation"]
    assert block["worst_tenth"] <= block["last"] + 1e-6
    values = list(block["per_client"].values())
    for name in ("last", "weighted_last", "worst_tenth"):
        assert min(values) - 1e-6 <= block[name] <= max(values) + 1e-6
    assert 0 <= block["std_over_clients"] <= 0.5
    assert block["coverage"] == len(values)
    order = data.draw(st.permutations(range(len(log))))
    assert scores.summarise(metrics_of(folder, records_of(log, order))) == block


@given(log=logs, names=st.permutations(range(15)))
@settings(deadline=None, max_examples=40)
def test_renaming_the_clients_changes_only_their_names(tmp_path_factory, log, names):
    folder = tmp_path_factory.mktemp("log")
    block = scores.summarise(metrics_of(folder, records_of(log)))
    renamed = {(number, names[client]): value for (number, client), value in log.items()}
    other = scores.summarise(metrics_of(folder, records_of(renamed)))
    assert other["last"] == pytest.approx(block["last"], abs=2e-6)
    assert other["worst_tenth"] == pytest.approx(block["worst_tenth"], abs=2e-6)
    expected = {str(names[int(client)]): value for client, value in block["per_client"].items()}
    assert other["per_client"] == expected


@given(st.lists(fractions, min_size=1, max_size=40))
def test_the_worst_tenth_is_rounded_up_to_whole_clients(values):
    scores = log.Scores(tuple(map(str, range(len(values)))), np.array(values), np.ones(len(values)))
    worst = sorted(values)[: -(-len(values) // 10)]
    assert scores.worst_tenth() == pytest.approx(sum(worst) / len(worst))
    assert scores.weighted() == pytest.approx(scores.mean())


# --- ledger and clock -----------------------------------------------------------------------------------


def entry(round_, client, direction, scalars, purpose="train", step="train"):
    return {
        "round": round_, "client": client, "step": step, "direction": direction, "purpose": purpose,
        "scalars": scalars, "bytes": 4 * scalars, "names": {"w": scalars},
    }  # fmt: skip


def test_messages_are_means_per_client_and_round_for_training(tmp_path):
    path = write_log(
        tmp_path / "ledger.jsonl",
        [
            entry(1, "a", "up", 100),
            entry(1, "a", "up", 50, step="second"),
            entry(1, "a", "down", 10),
            entry(1, "b", "down", 10),
            entry(2, "a", "up", 150),
            entry(2, "b", "up", 99, purpose="evaluate"),
            entry(0, "b", "down", 7, purpose="setup"),
        ],
    )
    block = scores.messages_block(path)
    assert block["up"] == {"scalars": 100, "bytes": 400}
    assert block["down"] == {"scalars": pytest.approx(6.666667), "bytes": pytest.approx(26.666667)}
    assert block["total"]["evaluate"]["up"] == {"scalars": 99, "bytes": 396}
    assert block["total"]["setup"]["down"]["scalars"] == 7


def test_nothing_crossed_is_zero(tmp_path):
    nothing = {"scalars": 0, "bytes": 0}
    assert scores.messages_block(tmp_path / "ledger.jsonl") == {"up": nothing, "down": nothing, "total": {}}


def test_a_broken_ledger_is_named(tmp_path):
    with pytest.raises(RunError, match="line 1 is not an entry of the ledger"):
        scores.messages_block(write_log(tmp_path / "ledger.jsonl", [{"round": 1}]))


def test_seconds_are_a_median_over_rounds(tmp_path):
    path = write_log(
        tmp_path / "timing.jsonl",
        [
            {"round": 1, "seconds": 9.0},
            {"round": 1, "seconds": 30.0},
            {"round": 2, "seconds": 1.0},
            {"round": 3, "seconds": 2.0},
            {"note": "x"},
        ],
    )
    assert scores.seconds_per_round(path) == 2.0
    assert scores.seconds_per_round(tmp_path / "absent.jsonl") is None


# --- comparisons ----------------------------------------------------------------------------------------


def test_paired_takes_the_clients_both_have_in_client_order():
    differences = paired({"10": 0.9, "9": 0.5, "x": 1.0}, {"9": 0.25, "10": 0.4, "y": 0.0})
    assert list(differences.items()) == [("9", 0.25), ("10", 0.5)]


finite = st.floats(-1, 1)


@given(st.lists(st.lists(finite, min_size=1, max_size=8), min_size=1, max_size=4), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_an_interval_lies_between_the_smallest_and_the_largest_difference(rows, seed):
    values = [value for row in rows for value in row]
    low, high = bootstrap_interval(list(map(np.array, rows)), np.random.default_rng(seed), draws=50)
    if len(values) == 1:
        assert math.isnan(low)
        assert math.isnan(high)
    else:
        assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12


def test_an_interval_has_about_the_width_the_normal_theory_gives():
    rng = np.random.default_rng(0)
    differences = rng.normal(0.02, 0.1, 400)
    low, high = bootstrap_interval([differences], rng)
    assert high - low == pytest.approx(2 * 1.96 * differences.std() / 20, rel=0.1)


def test_several_seeds_widen_the_interval_by_what_differs_between_them():
    rng = np.random.default_rng(0)
    clients = rng.normal(0, 0.01, (6, 50))
    same = bootstrap_interval(clients, np.random.default_rng(1))
    shifted = bootstrap_interval(clients + rng.normal(0, 0.1, (6, 1)), np.random.default_rng(1))
    assert shifted[1] - shifted[0] > 5 * (same[1] - same[0])


def test_a_method_equal_to_the_baseline_is_a_tie_and_a_better_one_is_not():
    local = {"0": {str(client): 0.5 for client in range(10)}}
    better = {"0": {str(client): 0.6 + client / 100 for client in range(10)}}
    rng = np.random.default_rng(0)
    equal = paired_difference(local, local, rng)
    assert equal is not None
    assert equal.tie is True
    gain = paired_difference(better, local, rng)
    assert gain is not None
    assert gain.tie is False
    assert gain.mean == pytest.approx(0.145)
    assert paired_difference(local, {"1": local["0"]}, rng) is None
    single = paired_difference({"0": {"0": 1.0}}, local, rng)
    assert single is not None
    assert single.tie is None


def make_run(folder: Path, method: str, seed: int, gain: float, split: str = "s") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"method": {"name": method}, "seed": seed, "data": {"name": "d"}})
    )
    (folder / "split.json").write_text(json.dumps({"hash": f"{split}{seed}"}))
    records = [line(number, str(c), 0.4 + c / 50 + gain * number / 2) for number in (1, 2) for c in range(8)]
    write_log(folder / "metrics.jsonl", records)
    write_log(folder / "ledger.jsonl", [entry(1, "0", "up", 8), entry(1, "0", "down", 4)] if gain else [])
    write_log(folder / "timing.jsonl", [{"round": 1, "seconds": 1.0 + seed}])
    return folder


@pytest.fixture
def folders(tmp_path):
    gains = {"local": 0.0, "fedmrl": 0.1, "fedavg": -0.1}
    return [make_run(tmp_path / f"{m}-{s}", m, s, gain) for m, gain in gains.items() for s in (0, 1)]


def test_runs_are_compared_by_seed_and_client(folders):
    comparison = compare_runs(folders, Rng(0), draws=200)
    entries = {entry["method"]: entry for entry in comparison["methods"]}
    assert comparison["seeds"] == ["0", "1"]
    assert entries["local"]["difference"] is None
    assert entries["fedmrl"]["difference"]["mean"] == pytest.approx(0.1)
    assert entries["fedmrl"]["difference"]["tie"] is False
    assert entries["fedmrl"]["difference"]["pairs"] == 16
    assert entries["fedavg"]["difference"]["high"] < 0
    assert entries["fedmrl"]["accuracy"] == {"mean": pytest.approx(0.57), "std_over_seeds": 0.0}
    assert entries["fedmrl"]["messages"]["up"]["scalars"] == 8
    assert entries["local"]["messages"]["up"]["scalars"] == 0
    assert entries["local"]["seconds_per_round"] == 1.5
    assert entries["fedmrl"]["curve"]["rounds"] == [1, 2]
    json.dumps(comparison, allow_nan=False)


def test_an_interval_does_not_depend_on_the_other_methods(folders):
    both = compare_runs(folders, Rng(0), draws=50)
    alone = compare_runs(folders[:4], Rng(0), draws=50)
    assert both["methods"][1] == alone["methods"][1]


def test_equal_scores_have_equal_intervals_under_any_label(folders):
    write_log(folders[2] / "metrics.jsonl", [line(2, str(c), 0.4 + c * c / 90) for c in range(8)])
    labels = {"local": folders[:1], "a": folders[2:3], "b": folders[2:3]}
    _, a, b = compare_runs(labels, Rng(0), draws=50)["methods"]
    assert a["difference"]["low"] < a["difference"]["high"]
    assert (a["difference"], a["measured"]) == (b["difference"], b["measured"])


def test_two_runs_of_one_seed_need_labels(folders, tmp_path):
    again = make_run(tmp_path / "again", "fedmrl", 0, 0.2)
    with pytest.raises(RunError, match="both fedmrl with seed 0"):
        compare_runs([*folders, again], Rng(0))
    labelled = compare_runs({"local": folders[:1], "a": folders[2:3], "b": [again]}, Rng(0), draws=20)
    assert [entry["method"] for entry in labelled["methods"]] == ["local", "a", "b"]


def test_runs_on_different_splits_are_not_compared(folders, tmp_path):
    other = make_run(tmp_path / "other", "fedproto", 0, 0.2, split="t")
    with pytest.raises(RunError, match="different splits"):
        compare_runs([*folders, other], Rng(0))


def test_comparisons_refuse_what_is_not_there(folders, tmp_path):
    with pytest.raises(ConfigError, match="the views are last, best_by_validation, best_by_test"):
        compare_runs(folders, Rng(0), view="lats")
    with pytest.raises(ConfigError, match=r"local-0.*'before' was not evaluated"):
        compare_runs(folders, Rng(0), when="before")
    with pytest.raises(RunError, match="nothing to compare"):
        compare_runs([], Rng(0))
    with pytest.raises(RunError, match=r"no config\.yaml"):
        compare_runs([tmp_path], Rng(0))


# --- several tasks --------------------------------------------------------------------------------------


def tagged(round_, client, score, f1, **more):
    """A line of a client with several labels per sample."""
    test = {"score": score, "metric": "mean_ap", "mean_ap": score, "f1": f1, "loss": 1.0, "samples": 10}
    return line(round_, client, **more) | {"test": test}


def group_run(folder: Path, method: str, records, seed: int = 0, sizes=(("digits", 2), ("sst2", 1))) -> Path:
    """A run of a federation, with as many clients per data set as `sizes` says."""
    folder.mkdir(parents=True)
    config = {
        "method": {"name": method},
        "seed": seed,
        "federation": [{"data": {"name": n}} for n, _ in sizes],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    clients = [{"id": str(number)} for number in range(sum(size for _, size in sizes))]
    groups = [{"data": name, "clients": size} for name, size in sizes]
    (folder / "split.json").write_text(json.dumps({"hash": f"s{seed}", "groups": groups, "clients": clients}))
    write_log(folder / "metrics.jsonl", records)
    return folder


def test_groups_with_accuracies_alone_have_a_relative_gain_and_a_value_per_client(tmp_path):
    local = [line(1, "0", 0.5), line(1, "1", 0.4), line(1, "2", 0.0), line(1, "3", 0.9, held=True)]
    other = [line(1, "0", 0.6), line(1, "1", 0.5), line(1, "2", 0.5), line(1, "3", 0.9, held=True)]
    sizes = (("digits", 2), ("sst2", 2))
    runs = [
        group_run(tmp_path / "l", "local", local, 0, sizes),
        group_run(tmp_path / "o", "o", other, 0, sizes),
    ]
    comparison = compare_runs(runs, Rng(0), draws=20)
    assert comparison["metrics"] == {"0": "accuracy", "1": "accuracy", "2": "accuracy"}
    assert comparison["data_sets"] == {"0": "digits", "1": "digits", "2": "sst2"}
    assert comparison["methods"][1]["gain"] == pytest.approx((20 + 25) / 2)
    assert comparison["methods"][1]["per_client"] == {"0": 0.6, "1": 0.5, "2": 0.5}
    assert "further" not in comparison["methods"][1]


def test_one_group_alone_is_compared_as_before(folders, tmp_path):
    alone = group_run(tmp_path / "l", "local", [line(1, "0", 0.5)], 0, (("digits", 1),))
    for comparison in (
        compare_runs(folders, Rng(0), draws=20),
        compare_runs([alone], Rng(0)),
    ):
        assert {"metrics", "data_sets"}.isdisjoint(comparison)
        assert {"gain", "per_client", "further"}.isdisjoint(comparison["methods"][0])


def test_a_client_whose_measure_is_undefined_is_still_named(tmp_path):
    records = [line(1, "0", 0.5), line(1, "1", 0.4), tagged(1, "2", None, 0.25)]
    run = group_run(tmp_path / "l", "local", records)
    comparison = compare_runs([run], Rng(0))
    assert comparison["metrics"] == {"0": "accuracy", "1": "accuracy", "2": "mean_ap"}
    assert comparison["methods"][0]["per_client"] == {"0": 0.5, "1": 0.4}
    block = scores.summarise(run)
    assert block["metrics"] == comparison["metrics"]
    assert (block["last"], block["coverage"]) == (0.45, 2)


def test_a_client_without_test_rows_is_left_out_of_mixed_tasks_too(tmp_path):
    records = [line(1, "0", validation=0.5), line(1, "1"), tagged(1, "2", 0.5, 0.25)]
    run = group_run(tmp_path / "l", "local", records)
    assert scores.summarise(run)["metrics"] == compare_runs([run], Rng(0))["metrics"] == {"2": "mean_ap"}


def test_clients_that_are_all_undefined_are_named_too(tmp_path):
    run = group_run(tmp_path / "l", "local", [tagged(1, "0", None, 0.5), tagged(2, "0", None, 0.25)])
    comparison = compare_runs([run], Rng(0))
    assert comparison["metrics"] == {"0": "mean_ap"}
    assert comparison["methods"][0]["further"]["f1"]["mean"] == 0.25


def test_further_measures_are_means_over_the_clients_that_have_them_in_the_reported_series(tmp_path):
    records = [
        tagged(1, "1", 0.9, 0.9),
        line(2, "0", 0.5),
        tagged(2, "1", 0.5, 0.2),
        tagged(2, "2", 0.5, 0.6),
        tagged(2, "3", None, None),
        tagged(2, "4", 0.5, 1.0, held=True),
        tagged(2, "1", 0.5, 0.99, when="after_training"),
        tagged(2, "1", 0.5, 0.98, mode="other"),
        tagged(2, "2", 0.5, 0.4),
    ]
    metrics = metrics_of(tmp_path, records)
    assert scores.summarise(metrics)["further"] == {"f1": {"mean": pytest.approx(0.3), "clients": 2}}
    assert scores.summarise(metrics, "after_training")["further"]["f1"] == {"mean": 0.99, "clients": 1}


def test_classification_has_no_further_measures(three_rounds):
    assert "further" not in scores.summarise(three_rounds)


def test_a_comparison_has_further_measures_over_the_seeds(tmp_path):
    runs = [
        group_run(tmp_path / f"l{seed}", "local", [line(1, "0", 0.5), tagged(1, "2", 0.4, f1)], seed)
        for seed, f1 in enumerate((0.2, 0.4))
    ]
    further = compare_runs(runs, Rng(0))["methods"][0]["further"]
    assert further == {"f1": {"mean": pytest.approx(0.3), "std_over_seeds": pytest.approx(0.141421)}}


def test_further_measures_follow_the_view(tmp_path):
    records = [tagged(1, "0", 0.9, 0.8), tagged(2, "0", 0.1, 0.3)]
    run = group_run(tmp_path / "l", "local", records)
    best = compare_runs([run], Rng(0), view="best_by_test")["methods"][0]
    assert best["further"]["f1"]["mean"] == 0.8
    undefined = compare_runs([run], Rng(0), view="best_by_validation")["methods"][0]
    assert "further" not in undefined


def test_a_log_whose_lines_have_ever_more_fields_takes_no_memory(tmp_path, monkeypatch):
    """A table has every field in every line: a log of three megabytes could take ninety gigabytes."""
    records = [line(1, str(client), 0.5) for client in range(400)]
    for client, record in enumerate(records):
        record["test"][f"measure {client}"] = 1
    path = write_log(tmp_path / "metrics.jsonl", records)
    assert len(log.read_metrics(path).series["after_aggregation", "own"].further) == 400
    monkeypatch.setattr(reading, "MOST_CELLS", 100_000)
    monkeypatch.setattr(log.arrow_json, "read_json", _few_fields(log.arrow_json.read_json))
    for read in (log.read_metrics, lambda path: frame(path, {})):
        with pytest.raises(RunError, match=r"metrics\.jsonl is damaged.* its 400 lines have 40\d different"):
            read(path)


def test_a_log_whose_lines_all_have_many_measures_is_read(tmp_path, monkeypatch):
    """Its table takes about as much memory as the log itself, however many clients there are."""
    records = [line(1, str(client), 0.5) for client in range(400)]
    for record in records:
        record["test"] |= {f"recall {each}": 0.25 for each in range(300)}
    monkeypatch.setattr(reading, "MOST_CELLS", 100_000)
    path = write_log(tmp_path / "metrics.jsonl", records)
    assert len(log.read_metrics(path).series["after_aggregation", "own"].further) == 300
    assert len(frame(path, {})) == 400


def _few_fields(read_json):
    """Arrow's reader, which is not given many lines with many fields to infer."""

    def checked(file, options, parse):
        if parse.unexpected_field_behavior == "infer":
            assert len(reading.fields_in(file)) <= 210
            file.seek(0)
        return read_json(file, options, parse)

    return checked


def test_measures_that_come_later_or_become_fractions_are_read(tmp_path):
    records = [line(round_, "0", 0.5) for round_ in range(1, 501)]
    for record in records:
        record["test"]["recall"] = 1 if record["round"] < 400 else 0.25
    series = log.read_metrics(write_log(tmp_path / "metrics.jsonl", records)).series[
        "after_aggregation", "own"
    ]
    assert series.further["recall"][[0, 499]].tolist() == [1.0, 0.25]
    records[450]["test"]["f1"] = 0.5
    records[460]["seconds"] = "none"
    series = log.read_metrics(write_log(tmp_path / "metrics.jsonl", records)).series[
        "after_aggregation", "own"
    ]
    assert list(series.further) == ["recall", "f1"]
    assert series.further["f1"][450] == 0.5


def test_a_log_of_endless_modes_is_refused(tmp_path):
    records = [line(1, "0", 0.5, mode=str(mode)) for mode in range(1001)]
    with pytest.raises(RunError, match="it has 1,001 pairs of moments and modes"):
        log.read_metrics(write_log(tmp_path / "metrics.jsonl", records))
