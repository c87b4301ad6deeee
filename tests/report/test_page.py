"""Pages: self-contained, well-formed, escaped, and complete as far as the run's files go."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import yaml
from made_up import make_run, write_outputs, write_predictions
from typer.testing import CliRunner

from potluck.cli.app import app
from potluck.errors import RunError
from potluck.report import comparison_page, page
from potluck.report.charts import MOST_POINTS, thinned
from potluck.report.html import with_whole_names
from potluck.report.predictions import Answers
from potluck.report.predictions_part import _classes
from potluck.report.scores import summarise
from potluck.report.sheets import headline

VOID = {"meta", "br", "link", "img", "input", "hr"}
EVIL = "<script>alert(1)</script>\"'&"


class Checker(HTMLParser):
    """Refuses tags that do not nest; collects text and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.addresses, self.tags = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attributes if name in ("src", "href", "xlink:href", "action")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open = self.open[:-1] if tag not in VOID else self.open

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data.replace("\N{NO-BREAK SPACE}", " "))


def check(path):
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    checker.close()
    assert checker.open == []
    outside = [address for address in checker.addresses if not address.startswith(("#", "data:"))]
    assert outside == []
    return checker


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def measured(number, client, accuracy, when="after_aggregation", mode="mix-large", **more):
    test = {"accuracy": accuracy, "loss": 1.0, "samples": 20}
    return {"round": number, "client": client, "when": when, "mode": mode, "test": test} | more


CLIENTS = ("0", "1", EVIL)
FILES = {
    "config.yaml": yaml.safe_dump(
        {"name": "first", "data": {"name": "digits"}, "partition": {"kind": "dirichlet"},
         "method": {"name": "fedmrl"}, "training": {"rounds": 3}, "evaluate": {"on": "own"}, "seed": 7}
    ),
    "environment.json": json.dumps({"potluck": "0.1.0", "device": "cpu", "format": 1}),
    "split.json": json.dumps(
        {"hash": "abc", "classes": 2, "class_names": ["cat", EVIL], "held_out": ["9"],
         "clients": [{"id": c, "train": [1, 2, 3], "test": [4], "counts": [1, 2]} for c in CLIENTS]}
    ),
    "metrics.jsonl": lines(
        *(measured(n, c, 0.2 * n + 0.1 * (c == "1"), when) for n in (1, 2, 3) for c in CLIENTS
          for when in ("after_training", "after_aggregation")),
        measured(3, "9", 0.11, held_out=True),
    ),
    "ledger.jsonl": lines(
        *({"round": 1, "client": "0", "step": "train", "direction": d, "purpose": "train", "scalars": 465658,
           "bytes": 1862632, "names": {}} for d in ("up", "down"))
    ),
    "timing.jsonl": lines({"round": 1, "seconds": 0.42}),
    "contract.json": json.dumps(
        {"method": "FedMRL", "citation": "Yi et al.", "card": ["samples"], "report": ["steps"],
         "stays": ["the projector"],
         "steps": [{"name": "train", "down": [], "up": [
             {"name": "small", "shape": ["d1", 10], "scalars": 465658, "meaning": "the small model"}]}],
         "up_scalars": 465658, "down_scalars": 0}
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    for name, text in FILES.items():
        (run / name).write_text(text)
    return run


def test_the_page_says_what_a_reader_asks(folder):
    path = page.write_report(folder)
    assert path == folder / "report.html"
    text = " ".join(check(path).text)
    for part in (
        "FedMRL on digits", "Yi et al.", "63.33 %", "1.9 MB", "465,658 scalars", "0.42 s", "11.00 %",
        "after aggregation", "the projector", "the small model", "d1 × 10", f"potluck resume {folder}",
        "seed: 7", "Split abc",
    ):  # fmt: skip
        assert part in text, part


def test_a_moment_at_which_fewer_clients_were_measured_says_so(folder):
    summary = summarise(folder / "metrics.jsonl")
    assert [one["clients"] for one in summary["measured"]] == [3, 3]
    assert " over " not in headline({"accuracy": summary})[1]
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(lines(*(measured(4, client, 0.5) for client in CLIENTS)))
        log.write(lines(*(measured(4, client, 0.5, "after_training") for client in CLIENTS[:2])))
    told = headline({"accuracy": summarise(folder / "metrics.jsonl")})
    assert told[1].startswith("after training, by mix-large: 50.00 % ± 0.00 % over 2 clients, worst tenth")
    text = " ".join(" ".join(check(page.write_report(folder)).text).split())
    assert "evaluated mode clients last" in text


def test_names_are_escaped_everywhere(folder):
    text = page.write_report(folder).read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert(1)" in text
    (folder / "split.json").write_text(FILES["split.json"].replace('"cat"', '"c\\u0000a\\u001bt"'))
    text = page.write_report(folder).read_text(encoding="utf-8")
    assert "c?a?t" in text
    assert not {*text} & {*"\x00\x1b"}
    (folder / "split.json").write_text(FILES["split.json"].replace('"cat"', '"\\ud800"'))
    with pytest.raises(RunError, match=r"split\.json cannot be read: .*surrogates not allowed"):
        page.write_report(folder)


def test_the_same_run_gives_the_same_page(folder):
    first = page.write_report(folder).read_bytes()
    assert page.write_report(folder).read_bytes() == first
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


SECTIONS = {
    "metrics.jsonl": "Accuracy over rounds",
    "split.json": "Who has which labels",
    "contract.json": "The wire",
    "environment.json": "Environment",
    "ledger.jsonl": "leaves a client, per round",
    "timing.jsonl": "a round takes",
}


@pytest.mark.parametrize("missing", SECTIONS)
def test_a_missing_file_leaves_out_its_section_and_no_other(folder, missing):
    (folder / missing).unlink()
    text = " ".join(check(page.write_report(folder)).text)
    assert {name for name, title in SECTIONS.items() if title not in text} == {missing}


def test_a_config_alone_makes_a_page(folder):
    for name in SECTIONS:
        (folder / name).unlink()
    assert "fedmrl on digits" in " ".join(check(page.write_report(folder)).text)


def test_the_summary_chooses_the_headline_and_names_models_and_failures(folder):
    summary = {
        "method": "fedmrl", "rounds": 3, "clients": 3, "models": {"0": "resnet-18"},
        "accuracy": {"when": "after_training", "mode": "mix-large"}, "failures": ["client 1: out of memory"],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    text = " ".join(check(page.write_report(folder)).text)
    assert "resnet-18" in text
    assert "client 1: out of memory" in text
    assert "held-out clients" not in text


def test_models_failures_and_a_contract_in_words(folder):
    (folder / "environment.json").write_text(json.dumps({"models": {"0": "resnet-18", "1": "cnn"}}))
    reasons = {"1": "client 1: step train: out of memory"}
    failed = {"failures": {"1": 3, "2": 1}, "failure_reasons": reasons}
    (folder / "summary.json").write_text(json.dumps(failed))
    contract = {
        "client": {"id": "0", "model": "resnet-18"},
        "card": [{"name": "samples", "meaning": "how many"}],
    }
    (folder / "contract.json").write_text(json.dumps(contract))
    text = " ".join(check(page.write_report(folder)).text)
    for part in (
        "resnet-18",
        "client 1: 3 times, the last time: step train: out of memory",
        "client 2: once",
        "Sizes are those of client 0 (resnet-18).",
        "samples how many",
    ):
        assert part in text, part
    assert "Environment" not in text


def test_no_line_ends_inside_a_name_or_before_a_unit():
    shown = with_whole_names("54.88 % by mix-large & M = 3, 5\nMB")
    space = "\N{NO-BREAK SPACE}"
    name = '<span class="whole">mix-large</span>'
    assert shown == f"54.88{space}% by {name} &amp; M{space}={space}3, 5{space}MB"


def test_the_modes_of_a_run_are_a_list_and_no_product(folder):
    (folder / "environment.json").write_text(json.dumps({"modes": ["mix-large", "head"], "seed": 1}))
    assert "mix-large, head" in " ".join(check(page.write_report(folder)).text)


def test_a_summary_serves_where_the_log_is_gone(folder):
    (folder / "metrics.jsonl").unlink()
    accuracy = {"last": 0.5, "std_over_clients": 0.1, "worst_tenth": 0.4, "per_client": {"0": 0.5}}
    (folder / "summary.json").write_text(json.dumps({"accuracy": accuracy}))
    assert "50.00 %" in " ".join(check(page.write_report(folder)).text)


def test_counts_may_be_absent(folder):
    split = json.loads(FILES["split.json"])
    for client in split["clients"]:
        del client["counts"]
    (folder / "split.json").write_text(json.dumps(split))
    text = " ".join(check(page.write_report(folder)).text)
    assert "Who has which labels" not in text
    assert "Clients" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="there is no folder"):
        page.write_report(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"no config\.yaml"):
        page.write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.yaml", "a: ["), ("config.yaml", "- 1"), ("split.json", "{"), ("split.json", "[]")],
)
def test_a_broken_file_is_named_and_no_page_is_written(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(RunError, match=name):
        page.write_report(folder)
    assert not (folder / "report.html").exists()


def test_a_comparison_shows_table_intervals_and_curves(tmp_path):
    nothing = {"scalars": 0, "bytes": 0}

    def method(name, mean, difference):
        curve = {"rounds": [1, 2], "mean": [0.1, mean], "low": [0.1, mean], "high": [0.2, mean]}
        return {
            "method": name, "when": "after_aggregation", "accuracy": {"mean": mean, "std_over_seeds": None},
            "difference": difference, "messages": {"up": nothing, "down": nothing},
            "seconds_per_round": None, "curve": curve,
        }  # fmt: skip

    tie = {"mean": 0.1, "low": -0.1, "high": 0.3, "tie": True, "pairs": 9}
    methods = [method("local", 0.7, None), method(EVIL, 0.8, tie)]
    comparison = {
        "baseline": "local",
        "seeds": ["0", "1"],
        "view": "last",
        "draws": 10,
        "level": 0.9,
        "methods": methods,
    }
    path = comparison_page.write_comparison(tmp_path / "comparison.html", comparison)
    text = " ".join(check(path).text)
    for part in (
        "2 methods",
        "+10.00 [−10.00, +30.00] tie",
        "What each gains",
        "Accuracy over rounds",
        "90 %",
    ):
        assert part in text, part
    assert "<script>alert" not in path.read_text(encoding="utf-8")


def test_further_measures_have_a_table_where_there_are_any(folder):
    assert "Further measures" not in " ".join(check(page.write_report(folder)).text)
    test = {"score": 0.5, "metric": "mean_ap", "mean_ap": 0.5, "f1": 0.4321, "loss": 1.0, "samples": 20}
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(lines(measured(3, "0", 0.1, test=test)))
    text = " ".join(check(page.write_report(folder)).text)
    for part in ("Further measures", "F1", "43.21 %"):
        assert part in text, part


def test_a_comparison_shows_clients_and_further_measures_of_mixed_tasks(tmp_path):
    nothing = {"scalars": 0, "bytes": 0}
    entry = {
        "method": "local", "when": "before", "accuracy": {"mean": 0.5, "std_over_seeds": None}, "gain": 0.0,
        "difference": None, "messages": {"up": nothing, "down": nothing}, "per_client": {"0": 0.5},
        "further": {"t2i_r10": {"mean": 0.4321, "std_over_seeds": None}},
    }  # fmt: skip
    metrics = {"0": "accuracy", "1": "mean_recall"}
    path = comparison_page.write_comparison(
        tmp_path / "comparison.html", {"metrics": metrics, "methods": [entry]}
    )
    text = " ".join(check(path).text)
    for part in ("Δ %", "Client by client", "undefined", "Further measures", "R@10 text to image", "43.21"):
        assert part in text, part


# --- large, small and odd runs --------------------------------------------------------------------------


def test_a_hundred_clients_and_a_thousand_rounds_fit_into_a_small_file(tmp_path):
    path = page.write_report(make_run(tmp_path / "run", clients=100, rounds=1000, predictions=True))
    text = " ".join(check(path).text)
    assert path.stat().st_size < 1_500_000
    assert "The curve of every client" in text
    assert "1,000" in text


def test_thinned_curves_keep_their_ends_and_extremes():
    values = np.sin(np.arange(5000.0))
    values[1234], values[4321] = 7.0, -7.0
    kept = thinned(values).tolist()
    assert len(kept) <= MOST_POINTS
    assert {0, 1234, 4321, 4999} <= {*kept}
    assert thinned(values[:9]).tolist() == [*range(9)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"evaluated": False}, "There are no scores: no client has been measured."),
        ({"rounds": 1}, "Accuracy over rounds"),
        ({"clients": 1}, "The curve of every client"),
        ({"clients": 1, "rounds": 1, "predictions": True}, "10 of 20 are right"),
        ({"classes": 30, "predictions": True}, "The classes that are mistaken most often"),
        ({"clients": 300}, "Left out are 100 clients"),
        ({"rounds": 4}, "The run is not finished: all 4 rounds are done, but the summary is missing; resume"),
        ({"clients": 0}, "There are no scores"),
    ],
)
def test_odd_runs_have_a_page(tmp_path, changes, says):
    text = " ".join(" ".join(check(page.write_report(make_run(tmp_path / "run", **changes))).text).split())
    assert says in text


@pytest.mark.parametrize(("clients", "rounds", "band"), [(3, 3, True), (1, 3, False), (3, 1, False)])
def test_a_band_is_named_where_there_is_one(tmp_path, clients, rounds, band):
    folder = make_run(tmp_path / "run", clients=clients, rounds=rounds)
    assert ("The band is" in " ".join(check(page.write_report(folder)).text)) == band


def test_advice_is_written_in_sentences(folder):
    advice = ["there is one client alone; ask for more", "engine.workers does nothing on a GPU."]
    (folder / "summary.json").write_text(json.dumps({"rounds": 3, "advice": advice}))
    text = " ".join(check(page.write_report(folder)).text)
    for sentence in ("There is one client alone; ask for more.", "engine.workers does nothing on a GPU."):
        assert sentence in text


def test_a_run_of_failures_alone_has_a_page(tmp_path):
    folder = make_run(tmp_path / "run", evaluated=False)
    failures = {"0": 3, EVIL: 2}
    accuracy = {"when": None, "mode": None, "last": None, "per_client": {}, "rounds": {"last": None}}
    (folder / "summary.json").write_text(
        json.dumps({"rounds": 3, "accuracy": accuracy, "failures": failures})
    )
    text = " ".join(check(page.write_report(folder)).text)
    for part in ("client 0: 3 times", "There are no scores", "What failed"):
        assert part in text
    assert "not finished" not in text


def test_kept_predictions_are_shown_by_class_and_confidence(tmp_path):
    text = " ".join(
        " ".join(check(page.write_report(make_run(tmp_path / "run", predictions=True))).text).split()
    )
    for part in ("30 of 60 are right", "class 9", "The matrix of every client", "calibration error"):
        assert part in text


@pytest.mark.parametrize(
    ("labels", "predictions", "parts"),
    [
        ([1.0, 2.0, 3.0], [1.5, 2.0, float("nan")], ["output 0", "nan", "true value", "The largest errors"]),
        ([1.0, 2.0, 3.0], [1.5, 2.5, 2.5], ["output 0 0.5 0.5 0.625", "0 0 1 1.5"]),
        ([[0.5, 9.0]] * 3, [[0.5, 8.0]] * 3, ["output 0 0 0 –", "output 1 1 1 –", "0 0 output 1 9 8"]),
        ([[1, 0], [1, 1], [0, 0]], [[1, 0], [0, 1], [0, 1]], [
            "4 of 6 labels are right, and all labels of 1 of 3 samples.",
            "label 0 2 1 100.00 % 50.00 % 66.67 %",
        ]),
    ],
)  # fmt: skip
def test_predictions_of_labels_and_numbers_are_shown(tmp_path, labels, predictions, parts):
    folder = make_run(tmp_path / "run")
    write_outputs(folder, 3, labels, predictions)
    text = " ".join(" ".join(check(page.write_report(folder)).text).split())
    for part in ("Test samples of round 3", *parts):
        assert part in text
    assert "Calibration" not in text


@pytest.mark.parametrize("label", [10, -1])
def test_a_class_that_cannot_be_is_the_fault_of_the_file(tmp_path, label):
    folder = make_run(tmp_path / "run")
    write_predictions(folder, ["0"], 3, 10, label=label)
    with pytest.raises(RunError, match=r"round-000003\.parquet is damaged"):
        page.write_report(folder)


def test_runs_and_their_comparison_link_to_each_other(tmp_path):
    folder = make_run(tmp_path / "mine <b>" / "fedavg-seed0")
    assert "comparison.html" not in page.write_report(folder).read_text()
    (folder.parent / "experiment.yaml").write_text("")
    text = page.write_report(folder).read_text()
    assert '<a href="../comparison.html">mine &lt;b&gt;</a>' in text
    entry = {
        "method": "fedavg", "accuracy": {"mean": 0.5, "std_over_seeds": None}, "difference": None,
        "messages": {"up": {"scalars": 0}, "down": {"scalars": 0}}, "runs": {"0": "fedavg-seed0"},
    }  # fmt: skip
    path = comparison_page.write_comparison(folder.parent / "comparison.html", {"methods": [entry]})
    assert '<a href="fedavg-seed0/report.html">' in path.read_text()


def test_the_command_writes_pages_anew_or_says_one_sentence(tmp_path):
    run = make_run(tmp_path / "mine" / "fedavg-seed0.jsonl")  # a folder may have the name of a log
    (run / "environment.json").write_text('{"potluck": "0.1.0", "format": 2}')
    done = CliRunner().invoke(app, ["report", str(run), "--json"])
    assert json.loads(done.stdout) == {"pages": [str(run / "report.html")]}
    (run.parent / "comparison.json").write_text('{"methods": 3}')
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text('{"settings": {"a": {}}}')
    for folder, says in (
        (tmp_path, "is not the folder of a run"),
        (run.parent, "comparison.json is damaged"),
        (tmp_path / "sweep", "a has no comparison.json: it is not a finished comparison"),
        (tmp_path / "gone", "there is no run folder"),
    ):
        refused = CliRunner().invoke(app, ["report", str(folder)])
        assert refused.exit_code == 2
        assert says in refused.stderr


def test_a_page_runs_its_own_script_and_no_other(folder):
    text = page.write_report(folder).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{hashed}'" in policy


def test_a_number_and_its_unit_stay_on_one_line(tmp_path):
    written = page.write_report(make_run(tmp_path / "run", rounds=2)).read_text(encoding="utf-8")
    shown = re.sub(r"<(style|script|pre|title)\b.*?</\1>|<[^>]+>", "|", written, flags=re.DOTALL)
    assert re.search("\\d\N{NO-BREAK SPACE}%", shown)
    assert not re.search(r"\d (%|±|kB|MB|ms)(?!\w)", shown)


def test_mistaken_classes_are_found_without_a_matrix_of_all():
    """A matrix of a million classes has a million million cells."""
    label, prediction = np.array([5, 5, 5, 7, 999_999, 2, 2]), np.array([6, 5, 6, 8, 3, 1, 0])
    ones = np.ones(7)
    found = Answers(1, ("0",), 0 * label, label, label, prediction, ones, np.full(7, 1_000_000))
    group = _classes(found, [], ["0"])
    assert group.matrix is None
    shown = [
        (one["label"], one["prediction"], one["samples"], one["share"]) for one in group.confused.entries
    ]
    assert shown == [
        ("5", "6", 2, 2 / 3),
        ("2", "0", 1, 1 / 2),
        ("2", "1", 1, 1 / 2),
        ("7", "8", 1, 1.0),
        ("999999", "3", 1, 1.0),
    ]
