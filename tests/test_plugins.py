"""Functions of one's own in an experiment: by name in a file, as objects in Python."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from potluck.cli.exits import explained
from potluck.core.method import registered
from potluck.core.settings import per_client
from potluck.errors import ConfigError
from potluck.experiment import Experiment
from potluck.kit.loss_weights import rules, weigh
from potluck.plugins import find_function, load_function, load_plugin
from potluck.runs.own_code import own_code

FILE = """\
data: digits
partition: {kind: iid, clients: 2}
models: [mlp-small]
method: {name: fedmrl, d1: 8, weight_small: "own_rules:fade"}
plugins: [own_rules.py]
"""
VALUES: dict[str, Any] = {
    "data": "digits",
    "partition": {"kind": "iid", "clients": 2},
    "models": ["mlp-small"],
    "method": "local",
}


def test_a_plugin_file_goes_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "own_rules.py").write_text("def fade(report):\n    return 1 / (1 + report['large'])\n")
    (tmp_path / "own.yaml").write_text(FILE)
    experiment = Experiment.load(tmp_path / "own.yaml")
    assert experiment.portable
    assert experiment.build().method.rules["small"]({"large": 1.0}) == 0.5  # type: ignore[attr-defined]
    (tmp_path / "again.yaml").write_text(experiment.to_yaml())
    assert Experiment.load(tmp_path / "again.yaml").method == experiment.method


def test_a_module_goes_by_its_own() -> None:
    assert find_function("math:hypot")(3, 4) == 5


@pytest.mark.parametrize(
    "name", ["hypot", ":hypot", "math:", "math:pi", "math:hypotenuse", "no_such_module:f"]
)
def test_what_is_no_function_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match=name.split(":", maxsplit=1)[0] or name):
        find_function(name)


def test_objects_make_an_experiment_that_yaml_cannot_say() -> None:
    def fade(report: dict[str, torch.Tensor]) -> float:
        return 1.0

    def make(**options: object) -> Experiment:
        partition = {"kind": "iid", "clients": 2}
        return Experiment.make(partition=partition, models="mlp-small", method={"name": "fedmrl", **options})

    own = make(weight_large=fade)
    assert not own.portable
    assert yaml.safe_load(own.to_yaml())["method"]["weight_large"] == "<fade>"
    assert not make(small=torch.nn.Flatten).portable
    assert make(small="mlp-small", d1={"0": 4, "1": 8}).portable


def test_weights_reach_a_step_as_tensors() -> None:
    found = rules({"a": lambda report: report["b"] * 2, "b": 1.0, "c": "math:fsum"})
    assert set(found) == {"a", "c"}
    weights = weigh({"a": found["a"]}, {"b": torch.tensor(3.0)}, torch.device("cpu"))
    assert torch.equal(weights["a"], torch.tensor(6.0))


def test_a_setting_of_every_client() -> None:
    ids = ["x", "y", "z"]
    assert per_client(7, ids, "key") == {"x": 7, "y": 7, "z": 7}
    assert per_client([7, 8], ids, "key") == {"x": 7, "y": 8, "z": 7}
    assert per_client({"z": 1, "x": 2, "y": 3}, ids, "key") == {"x": 2, "y": 3, "z": 1}
    with pytest.raises(ConfigError, match="key leaves out client 'y'"):
        per_client({"x": 1, "z": 1}, ids, "key")
    with pytest.raises(ConfigError, match="key names client 'q', which does not exist"):
        per_client({"x": 1, "y": 1, "z": 1, "q": 1}, ids, "key")


def test_a_function_may_be_named_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "site.py"
    file.write_text("def build():\n    return 7\n")
    assert load_function(f"{file}:build")() == 7
    assert load_function("math:sqrt")(4) == 2
    (tmp_path / "broken.py").write_text("1 / 0")
    for name, sentence in {
        f"{file}:load": "there is no function 'load'",
        f"{tmp_path}/broken.py:build": "broken.py cannot be loaded: ZeroDivisionError",
        f"{tmp_path}/none.py:build": "cannot be loaded: there is no file",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            load_function(name)


def test_files_of_one_name_stay_apart_and_the_one_asked_for_last_counts(tmp_path: Path) -> None:
    for number, place in enumerate(("one", "two")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "same_name.py").write_text(f"def number():\n    return {number}\n")
        load_plugin("same_name.py", tmp_path / place)
        assert find_function("same_name:number")() == number
    load_plugin("same_name.py", tmp_path / "one")
    assert find_function("same_name:number")() == 0
    assert load_function(f"{tmp_path}/two/same_name.py:number")() == 1


def test_a_file_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text("calls = []\n\n\ndef count():\n    return len(calls)\n")
    load_plugin("counted.py", tmp_path)
    find_function("counted:count").__globals__["calls"].append(1)
    load_plugin(f"../{tmp_path.name}/counted.py", tmp_path)
    assert find_function("counted:count")() == 1


@pytest.mark.parametrize(
    "code",
    ["def half(): return 1\n1 / 0", "def half(:", "class OwnError(BaseException): ...\nraise OwnError"],
)
def test_a_plugin_that_fails_leaves_nothing_behind(tmp_path: Path, code: str) -> None:
    file, before = tmp_path / "failing.py", set(sys.modules)
    file.write_text(code)
    with pytest.raises(ConfigError, match=r"plugins: failing.py cannot be loaded: \w+Error"):
        load_plugin("failing.py", tmp_path)
    assert set(sys.modules) == before
    assert list(tmp_path.iterdir()) == [file]
    file.write_text("def half(): return 2\n# 1")
    load_plugin("failing.py", tmp_path)
    assert find_function("failing:half")() == 2


def test_a_plugin_may_import_the_file_beside_it(tmp_path: Path) -> None:
    """Files of one name in two folders stay apart, nothing is written there, and the path is as before."""
    before = list(sys.path)
    for folder, size in (("one", 1), ("two", 2)):
        home = tmp_path / folder
        home.mkdir()
        (home / "beside_sizes.py").write_text(f"SIZE = {size}\n")
        (home / "own_plug.py").write_text("from beside_sizes import SIZE\n\n\ndef size():\n    return SIZE\n")
        load_plugin("own_plug.py", home)
        assert find_function("own_plug:size")() == size
        assert sorted(path.name for path in home.iterdir()) == ["beside_sizes.py", "own_plug.py"]
    assert sys.path == before


IN_PACKAGES = {
    "helpers/__init__.py": "from .sizes import B\n",
    "helpers/sizes.py": "B = 1\n",
    "helpers/nets/deep.py": "from .. import more\nfrom ..more import C\n",
    "helpers/more.py": "import helpers.last\n",
    "helpers/last.py": "",
}


@pytest.mark.parametrize(
    ("name", "code", "used", "unused"),
    [
        ("plug.py", "import os\nfrom first import A\n", {"first.py": "import second\n", "second.py": ""}, "a.py"),
        ("plug.py", "from helpers.nets import deep\n", IN_PACKAGES, "helpers/unused.py"),
        ("plug.py", "import helpers.nets.deep as deep\n", IN_PACKAGES, "deep.py"),
        ("own_plugs", "from .one import A\nimport own_plugs.two\n",
         {"own_plugs/one.py": "", "own_plugs/two.py": ""}, "other.py"),
    ],
)  # fmt: skip
def test_what_a_plugin_imports_from_its_own_folder_is_part_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, used: dict[str, str], unused: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / name if name.endswith(".py") else tmp_path / name / "__init__.py"
    for one, text in (used | {unused: "", str(file): code}).items():
        (tmp_path / one).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / one).write_text(text)
    settings = {"plugins": [str(file) if name.endswith(".py") else name]}
    known = own_code(settings)
    (tmp_path / unused).write_text("C = 2\n")
    assert own_code(settings) == known
    for one, text in used.items():
        (tmp_path / one).write_text(f"{text}# edited\n")
        assert own_code(settings) != known, one
        (tmp_path / one).write_text(text)


def test_a_hash_of_an_earlier_version_which_left_out_packages_is_still_taken(tmp_path: Path) -> None:
    code = "from helpers import A\nimport first\n"
    for one, text in (("plug.py", code), ("first.py", "B = 1\n"), ("helpers/__init__.py", "A = 1\n")):
        (tmp_path / one).parent.mkdir(exist_ok=True)
        (tmp_path / one).write_text(text)
    settings, earlier = {"plugins": [str(tmp_path / "plug.py")]}, hashlib.sha256(f"{code}B = 1\n".encode())
    known = {settings["plugins"][0]: earlier.hexdigest()}
    assert own_code(settings, known) == known
    (tmp_path / "first.py").write_text("B = 2\n")
    assert own_code(settings, known) == own_code(settings) != known


BARE = "from potluck import Method\n\n\nclass Bare(Method):\n    name = {name!r}\n"


def test_a_plugin_that_ends_the_program_is_told(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"plugins: script.py cannot be loaded: it calls sys.exit"):
        load_plugin("script.py", tmp_path)
    with pytest.raises(ConfigError, match=r"script.py cannot be loaded: it calls sys.exit"):
        load_function(f"{tmp_path}/script.py:build")


def test_a_folder_is_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_run").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("./some_run", "some_run"):
        with pytest.raises(ConfigError, match=r"some_run cannot be loaded: it is a folder; name a \.py file"):
            load_plugin(name, tmp_path)
    assert "some_run" not in sys.modules


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.core.method._registry", dict(registered()))


@pytest.mark.usefixtures("own_registry")
def test_a_method_without_a_round_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(BARE.format(name="bare"))
    (tmp_path / "own.yaml").write_text(
        "data: digits\npartition: {kind: iid, clients: 2}\nmodels: mlp-small\nmethod: bare\nplugins: [bare.py]\n"
    )
    with pytest.raises(ConfigError, match=r"method bare \(.*bare.py, class Bare\) defines no round"):
        Experiment.load(tmp_path / "own.yaml")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            BARE.format(name="fedavg"),
            r"there is a method 'fedavg' already \(potluck.methods.fedavg_variants\)",
        ),
        (
            "from potluck.models import register\n\n\n@register('cnn1')\ndef mine(classes):\n    return None\n",
            "a model named 'cnn1' is already registered",
        ),
        (
            "from potluck.data import register\n\n\n@register('digits')\ndef mine(dir):\n    return None\n",
            "a data set called 'digits' is already registered",
        ),
    ],
)
def test_a_plugin_cannot_take_the_name_of_another(tmp_path: Path, code: str, sentence: str) -> None:
    (tmp_path / "double.py").write_text(code)
    with pytest.raises(ConfigError, match=f"plugins: double.py cannot be loaded: {sentence}"):
        load_plugin("double.py", tmp_path)


@pytest.mark.usefixtures("own_registry")
def test_a_plugin_may_be_imported_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loaded_twice.py").write_text(
        BARE.format(name="loaded-twice")
        + "\n\nfrom potluck.data import register\n\n\n@register('loaded-twice')\ndef mine(dir):\n    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugin("loaded_twice", tmp_path)
    load_plugin("loaded_twice.py", tmp_path)


def test_an_error_in_a_plugin_names_its_file_and_line() -> None:
    code = compile("def step():\n    return 1 / 0\n", "/home/me/own.py", "exec")
    own: dict[str, Any] = {"__name__": "potluck_plugin:/home/me/own.py"}
    exec(code, own)
    with pytest.raises(ZeroDivisionError) as raised:
        own["step"]()
    sentence, exit_code = explained(raised.value)
    assert sentence.startswith(
        "error: /home/me/own.py, line 2, in step: ZeroDivisionError: division by zero; "
    )
    assert exit_code == 2
    sentence, exit_code = explained(ZeroDivisionError("ours"))
    assert (sentence.startswith("internal error"), exit_code) == (True, 1)


def test_an_error_without_words_is_told_by_its_type(tmp_path: Path) -> None:
    assert explained(AssertionError())[0].startswith("internal error: AssertionError; run again")
    (tmp_path / "silent.py").write_text("raise ValueError\n")
    with pytest.raises(ConfigError, match=r"cannot be loaded: ValueError; fix the file$"):
        load_plugin("silent.py", tmp_path)


def test_what_is_no_plugin_says_what_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("method: local\n")
    (tmp_path / "lonely_plugin.py").write_text("")
    for plugin, sentence in (
        ("base.yaml", "'base.yaml' is no Python file; name a .py file, or a module"),
        ("", "'' is no Python file"),
        ("lonely_plugin", r"did you mean lonely_plugin\.py\?"),
        (3, "3 is neither a .py file nor a module"),
    ):
        with pytest.raises(ConfigError, match=f"plugins: .*{sentence}"):
            Experiment.make(**VALUES, plugins=[plugin])


@pytest.mark.usefixtures("own_registry")
def test_two_plugins_of_one_experiment_may_not_share_a_method(tmp_path: Path) -> None:
    text = "from potluck.methods import Local\nclass Mine(Local):\n    name = 'twice_there'\n"
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    for file in (first, second):
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"first\.py and .*second\.py both define the method 'twice_there'"):
        Experiment.make(**VALUES, plugins=[str(first), str(second)])
    for file in (first, second, first):  # of two experiments each has its own
        Experiment.make(**VALUES, plugins=[str(file), str(file)])
        assert inspect.getfile(registered()["twice_there"]) == str(file)
