"""What a site has agreed to holds: everything else is refused in one sentence that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.cli.views.rehearsal import rehearsal_entry, rehearsal_sheet
from potluck.core.message import Message
from potluck.deploy.agreement import Agreement, Crossing, certain_message, fits
from potluck.deploy.rehearsal import propose, rehearse
from potluck.deploy.resident import enrolment
from potluck.deploy.tensor_specs import TensorSpec
from potluck.deploy.wire import told_at_enrolment
from potluck.errors import ConfigError, PinError
from potluck.federation.explain import explain
from potluck.methods.registry import method_names
from potluck.testing.bench import DEFAULT_MODELS, Bench
from staged_nets import OneBlock, ThreeExits, TwoBlocks, TwoExits

unhurried = settings(deadline=None)
OPTIONS = {"fedin": {"noise": 0.8, "batch": 4}, "fedmrl": {"d1": 16}, "feddf": {"steps": 5}}
MODELS: dict[str, Any] = {
    "fedin": ("conv-small", "conv-large"),
    **dict.fromkeys(("fedrolex", "fjord", "heterofl"), ({"name": "conv-large", "scale": 0.5}, "conv-large")),
    **dict.fromkeys(("inclusivefl", "inco"), (OneBlock, TwoBlocks)),
    "scalefl": (TwoExits, ThreeExits),
}
AGREED = Agreement(
    method="fedin",
    options={"noise": {"least": 0.8}, "batches": {"least": 1, "most": 4}, "mu": 0.1, "levels": None},
    steps={
        "train": Crossing(
            up={"s_in": TensorSpec.read("float32[<=4, 8]"), "classes": TensorSpec.read("int64[*]")},
            down={"s_in": TensorSpec.read("float32[16, 8]")},
        ),
        "bring": Crossing(up={"model/w": TensorSpec.read("float32[3]")}),
    },
    card=("samples", "task", "stem"),
    bytes_per_round=1000,
)
GIVEN = {"noise": 0.8, "batches": 2, "mu": 0.1, "levels": None, "schedule": "joint"}


def offer(**changes: Any) -> Agreement:
    return AGREED.model_copy(update=changes)


def train(**changes: Any) -> dict[str, Crossing]:
    return {**AGREED.steps, "train": AGREED.steps["train"].model_copy(update=changes)}


# --- sizes and options ----------------------------------------------------------------------------------

sizes = st.integers(0, 9).flatmap(lambda size: st.sampled_from([str(size), f"<={size}"])) | st.just("*")
specs = st.builds(
    TensorSpec,
    st.sampled_from(["float32", "int64", "float8_e5m2"]),
    st.lists(sizes, max_size=3).map(lambda list: tuple(list)),
)
shapes = st.lists(st.integers(0, 9), max_size=3)


def allows(spec: TensorSpec, shape: list[int]) -> bool:
    """The meaning of a spec, spelt out."""
    if len(spec.shape) != len(shape):
        return False
    for text, size in zip(spec.shape, shape, strict=True):
        most = text.startswith("<=")
        if text != "*" and not (size <= int(text[2:]) if most else size == int(text)):
            return False
    return True


@unhurried
@given(specs)
def test_a_spec_is_written_and_read_back(spec: TensorSpec) -> None:
    assert TensorSpec.read(str(spec)) == spec
    assert spec.holds(spec)


@unhurried
@given(specs, shapes)
def test_a_spec_holds_the_tensors_it_allows_and_no_others(spec: TensorSpec, shape: list[int]) -> None:
    tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
    assert spec.holds(TensorSpec.of(tensor)) == allows(spec, shape)


@unhurried
@given(specs, specs, shapes)
def test_a_spec_that_holds_another_allows_all_that_one_does(
    agreed: TensorSpec, other: TensorSpec, shape: list[int]
) -> None:
    if agreed.holds(other) and allows(other, shape):
        assert agreed.dtype == other.dtype
        assert allows(agreed, shape)


@unhurried
@given(specs, specs, specs)
def test_holding_is_transitive(a: TensorSpec, b: TensorSpec, c: TensorSpec) -> None:
    if a.holds(b) and b.holds(c):
        assert a.holds(c)


@pytest.mark.parametrize(
    "text", ["float32", "float32[", "float32[-1]", "float32[2,]", "[2]", "float32[<2]", 7, None]
)
def test_what_is_no_spec_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="write type and shape"):
        TensorSpec.read(text)


numbers = st.integers(-100, 100) | st.floats(-100, 100)
plain = st.none() | st.booleans() | numbers | st.text(max_size=3)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
)


@unhurried
@given(numbers, numbers)
def test_a_least_and_a_most_are_bounds(bound: float, value: float) -> None:
    assert fits({"least": bound}, value) == (value >= bound)
    assert fits({"most": bound}, value) == (value <= bound)
    assert fits({"least": bound, "most": bound}, value) == (value == bound)


@unhurried
@given(values)
def test_a_value_fits_itself_as_it_comes_back_from_json(value: Any) -> None:
    assert fits(value, json.loads(json.dumps(value)))


@unhurried
@given(plain, plain)
def test_a_pinned_value_fits_only_itself(pin: Any, value: Any) -> None:
    equal = type(pin) is type(value) or (not isinstance(pin, bool) and not isinstance(value, bool))
    assert fits(pin, value) == (equal and pin == value)
    assert fits([pin], [value]) == fits(pin, value)


@pytest.mark.parametrize("value", [True, "1", None, [1], float("nan"), float("inf")])
def test_bounds_want_a_number(value: object) -> None:
    assert not fits({"least": 0}, value)
    assert not fits({"most": 10}, value)


# --- the agreement against an offer ---------------------------------------------------------------------


def test_the_agreed_options_are_admitted() -> None:
    AGREED.admit_options("fedin", GIVEN)


@pytest.mark.parametrize(
    ("method", "change", "sentence"),
    [
        ("fedavg", {}, "the server runs 'fedavg', this site agreed to 'fedin'"),
        ("fedin", {"noise": 0.5}, "option 'noise' is 0.5, this site agreed to at least 0.8"),
        ("fedin", {"noise": float("nan")}, "option 'noise' is nan, this site agreed to at least 0.8"),
        ("fedin", {"batches": 5}, "option 'batches' is 5, this site agreed to at least 1 and at most 4"),
        ("fedin", {"mu": 0.2}, "option 'mu' is 0.2, this site agreed to 0.1"),
        ("fedin", {"levels": 0}, "option 'levels' is 0, this site agreed to None"),
    ],
)
def test_other_options_are_refused(method: str, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PinError) as refused:
        AGREED.admit_options(method, GIVEN | change)
    assert str(refused.value).startswith(f"{sentence}; ")


def test_a_pinned_option_must_be_given() -> None:
    with pytest.raises(PinError, match="option 'noise' is not given"):
        AGREED.admit_options("fedin", {"mu": 0.1})


@pytest.mark.parametrize(
    "less",
    [
        offer(),
        offer(card=("samples",)),
        offer(steps={"train": AGREED.steps["train"]}),
        offer(steps=train(up={})),
        offer(steps=train(up={"s_in": TensorSpec.read("float32[3, 8]")})),
        offer(bytes_per_round=0),
    ],
)
def test_what_was_agreed_and_less_is_covered(less: Agreement) -> None:
    AGREED.covers(less)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            offer(card=("samples", "task", "classes_held")),
            "the card would tell 'classes_held', this site agreed to: samples, task, stem",
        ),
        (
            offer(steps={**AGREED.steps, "spy": Crossing()}),
            "step 'spy' is asked for, this site agreed to: train, bring",
        ),
        (
            offer(steps=train(up={"y": TensorSpec.read("int64[4]")})),
            "step train would send 'y', which this site has not agreed to",
        ),
        (
            offer(steps=train(up={"s_in": TensorSpec.read("float32[<=5, 8]")})),
            "step train would send 's_in' as float32[<=5, 8], this site agreed to float32[<=4, 8]",
        ),
        (
            offer(steps=train(up={"s_in": TensorSpec.read("float64[4, 8]")})),
            "step train would send 's_in' as float64[4, 8], this site agreed to float32[<=4, 8]",
        ),
        (
            offer(steps=train(down={"s_in": TensorSpec.read("float32[<=16, 8]")})),
            "step train would receive 's_in' as float32[<=16, 8], this site agreed to float32[16, 8]",
        ),
        (offer(bytes_per_round=1001), "a round would send 1,001 bytes, this site agreed to 1,000"),
    ],
)
def test_more_than_was_agreed_is_refused(more: Agreement, sentence: str) -> None:
    with pytest.raises(PinError) as refused:
        AGREED.covers(more)
    assert str(refused.value).startswith(f"{sentence}; ")


# --- messages -------------------------------------------------------------------------------------------


def test_messages_are_let_in_and_out_as_agreed() -> None:
    AGREED.let_in(["train"], Message({"s_in": torch.zeros(16, 8)}))
    AGREED.let_in(["bring"], Message())
    up = Message({"s_in": torch.zeros(3, 8), "classes": torch.zeros(5, dtype=torch.int64)})
    assert AGREED.let_out(["train"], 1, up) == up.nbytes
    both = Message({"s_in": torch.zeros(3, 8), "model": {"w": torch.zeros(3)}})
    assert AGREED.let_out(["train", "bring"], 1, both) == both.nbytes


def test_messages_beyond_it_are_stopped() -> None:
    with pytest.raises(PinError, match=r"step train receives 's_in' as float32\[17, 8\]"):
        AGREED.let_in(["train"], Message({"s_in": torch.zeros(17, 8)}))
    with pytest.raises(PinError, match="step 'spy' is asked for"):
        AGREED.let_in(["train", "spy"], Message())
    with pytest.raises(PinError, match="step bring sends 's_in', which this site has not agreed to"):
        AGREED.let_out(["bring"], 1, Message({"s_in": torch.zeros(3, 8)}))
    with pytest.raises(PinError, match=r"sends 's_in' as float32\[3, 9\]"):
        AGREED.let_out(["train"], 1, Message({"s_in": torch.zeros(3, 9)}))
    with pytest.raises(PinError, match="step 'spy' is asked for"):
        AGREED.let_out(["spy"], 1, Message())
    for refused in (lambda: AGREED.let_in([], Message()), lambda: AGREED.let_out([], 1, Message())):
        with pytest.raises(PinError, match="names no step"):
            refused()


@unhurried
@given(st.lists(st.integers(1, 4), max_size=12))
def test_bytes_are_counted_over_a_round(rows: list[int]) -> None:
    """Told what it gave before, a new process goes on counting; nothing passes that would go beyond."""
    spent, sent = 0, 0
    for number in rows:
        message = Message({"s_in": torch.zeros(number, 8)})
        if sent + message.nbytes > AGREED.bytes_per_round:
            with pytest.raises(PinError, match="round 3 would send"):
                AGREED.let_out(["train"], 3, message, spent)
        else:
            spent = AGREED.let_out(["train"], 3, message, spent)
            sent += message.nbytes
    assert spent == sent <= AGREED.bytes_per_round


def test_an_empty_message_costs_nothing() -> None:
    assert AGREED.let_out(["train"], 1, Message(), 1000) == 1000


# --- the file -------------------------------------------------------------------------------------------


def test_an_agreement_is_written_once_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    AGREED.write(path)
    assert Agreement.load(path) == AGREED
    assert '"s_in": "float32[<=4, 8]"' in path.read_text()
    with pytest.raises(ConfigError, match=r"contract\.json exists; move it away"):
        AGREED.write(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "it is not JSON"),
        ("{}", "the key 'method' is missing"),
        (
            '{"method": "a", "steps": {}, "bytes_per_round": 3, "option": {}}',
            "unknown key 'option'; did you mean 'options'?",
        ),
        ('{"method": "fedavg", "steps": {}, "bytes_per_round": -1}', "bytes_per_round: "),
        ("[]", "is no agreement: it must be a block of keys with values"),
        (
            '{"method": "a", "steps": {"train": {"up": {"w": "float[]x"}}}, "bytes_per_round": 1}',
            "steps.train.up.w: write type and shape of a tensor as in float32[<=10, 64] (given: 'float[]x')",
        ),
        (
            '{"method": "a", "steps": {}, "bytes_per_round": 1, "options": {"noise": {"least": "much"}}}',
            "option 'noise': least must be a number (given: 'much')",
        ),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "contract.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Agreement.load(path)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(f"{path} is no agreement: ")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "text", ['{"method": "fedavg", "bytes_per_round": 1, "bytes_per_round": 9}', "[" * 200_000]
)
def test_an_agreement_says_each_thing_once_and_is_flat(tmp_path: Path, text: str) -> None:
    (tmp_path / "contract.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is no agreement: it is (not JSON \(.*twice|nested too deeply)"):
        Agreement.load(tmp_path / "contract.json")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no agreement .*none\.json"):
        Agreement.load(tmp_path / "none.json")


# --- methods --------------------------------------------------------------------------------------------


def bench(method: str, **options: Any) -> Bench:
    return Bench({"name": method} | OPTIONS.get(method, {}) | options, MODELS.get(method, DEFAULT_MODELS))


@pytest.mark.parametrize("method", method_names())
def test_a_proposal_allows_what_the_method_does(method: str) -> None:
    """Made from the contract alone, it lets a whole round pass; admitted again, it is not too narrow."""
    federation = bench(method).build()
    for client in federation.population.ids[:2]:  # two architectures
        live = federation.clients.build_client(client)
        agreement = Agreement.of(federation.method, live)
        agreement.admit(federation.method, federation.clients.build_client(client))
        assert Agreement.model_validate(agreement.model_dump(mode="json")) == agreement
        spent = 0
        for exchange in rehearse(federation, client):
            agreement.let_in(exchange.steps, exchange.down)
            certain = certain_message(federation.method, live, exchange.steps)
            assert {name: value.shape for name, value in certain.items()}.items() <= {
                name: value.shape for name, value in exchange.up.items()}.items()  # fmt: skip
            spent = agreement.let_out(exchange.steps, 1, exchange.up, spent)
        assert spent <= agreement.bytes_per_round
        assert bool(spent) == (method not in ("local", "simclr"))


def test_the_proposal_says_names_shapes_and_bytes() -> None:
    federation = bench("fedmrl", small="mlp-small").build()
    agreement, (exchange,) = propose(federation, "0")
    assert agreement.options["d1"] == 16
    assert {name: str(spec) for name, spec in agreement.steps["train"].up.items()} == {
        "small/fc1.weight": "float32[128, 64]",
        "small/fc1.bias": "float32[128]",
        "small/fc.weight": "float32[16, 128]",
        "small/fc.bias": "float32[16]",
        "small/head.weight": "float32[3, 16]",
        "small/head.bias": "float32[3]",
    }
    assert agreement.steps["evaluate"] == Crossing(down=agreement.steps["train"].down)
    assert agreement.card == ("samples", "task")
    assert agreement.bytes_per_round == exchange.up.nbytes
    assert agreement.attempts_per_round == 8


def test_messages_of_a_rehearsal_raise_the_bytes() -> None:
    federation = bench("fedproto").build()
    client, sent = federation.clients.build_client("0"), [Message({"x": torch.zeros(9999)})] * 2
    assert Agreement.of(federation.method, client, sent).bytes_per_round == 2 * sent[0].nbytes


@pytest.mark.parametrize(
    ("method", "agreed", "asked", "sentence"),
    [
        ("fedin", {}, {"noise": 0.1}, "option 'noise' is 0.1, this site agreed to at least 0.8"),
        ("fedre", {"noise": 0.5}, {"noise": 0.0}, "option 'noise' is 0.0, this site agreed to at least 0.5"),
        ("fedmrl", {"tie_headers": False}, {"tie_headers": True}, "option 'tie_headers' is True"),
    ],
)
def test_a_server_that_asks_for_more_is_refused(
    method: str, agreed: dict[str, Any], asked: dict[str, Any], sentence: str
) -> None:
    home, server = bench(method, **agreed).build(), bench(method, **asked).build()
    agreement = Agreement.of(home.method, home.clients.build_client("0"))
    with pytest.raises(PinError, match=sentence):
        agreement.admit(server.method, server.clients.build_client("0"))


def test_more_noise_is_welcome() -> None:
    home, server = bench("fedre", noise=0.5).build(), bench("fedre", noise=0.7).build()
    Agreement.of(home.method, home.clients.build_client("0")).admit(
        server.method, server.clients.build_client("0")
    )


def test_options_left_open_still_do_not_widen_what_leaves() -> None:
    """A site that unpins d1 has still agreed to the shapes it saw."""
    home, server = bench("fedmrl", d1=16).build(), bench("fedmrl", d1=32).build()
    agreement = Agreement.of(home.method, home.clients.build_client("0")).model_copy(update={"options": {}})
    with pytest.raises(PinError, match="step train would receive 'small/"):
        agreement.admit(server.method, server.clients.build_client("0"))


def test_the_rehearsal_is_shown_tensor_by_tensor() -> None:
    federation = bench("fedproto").build()
    agreement, exchanges = propose(federation, "0")
    entry = rehearsal_entry(agreement, exchanges, told_at_enrolment(enrolment(federation, "0")))
    assert json.loads(json.dumps(entry)) == entry
    assert [(line["step"], line["name"], line["shape"], line["bytes"]) for line in entry["leaves"]] == [
        ("train", "classes", [3], 24),
        ("train", "counts", [3], 12),
        ("train", "prototypes", [3, 64], 768),
    ]
    sheet = rehearsal_sheet(entry, "client 0")
    assert sheet.rows[2] == ("train", "prototypes", "(3, 64)", "float32", "192", "768 B")
    assert "198 scalars, 1." in sheet.notes[0]
    assert sheet.notes[0].endswith(" come to the site.")
    later = rehearsal_entry(
        agreement, exchanges, entry["enrolment"], explain(federation, "0")["down_scalars"]
    )
    down = later["down_scalars"]
    assert down["later"] > down["first"] == 0  # no client has told any prototypes so far
    (note, *_) = rehearsal_sheet(later, "client 0").notes
    assert f"come to the site in this first round, up to {down['later']:,} scalars in a later one." in note
    told = entry["enrolment"]
    assert set(told["extra"]) | {"samples", "task"} == set(agreement.card)
    assert told["samples"] == federation.population.samples("0")
    parts = ", ".join(f"{part} {number}" for part, number in federation.population.samples("0").items())
    assert f"client 0; samples ({parts}); task (kind classification, classes" in sheet.notes[1]
    assert all(f"; {name} {value}" in sheet.notes[1] for name, value in told["extra"].items())


# --- metrics --------------------------------------------------------------------------------------------


def test_a_metric_outside_the_agreement_is_refused():
    agreed = offer(metrics=("macro_f1",))
    agreed.let_measure(["macro_f1"])
    with pytest.raises(PinError, match="the metric 'auroc' would be measured, this site agreed to: macro_f1"):
        agreed.covers(offer(metrics=("macro_f1", "auroc")))
    with pytest.raises(
        PinError, match="'macro_f1' would be measured, this site agreed to: those of its task"
    ):
        AGREED.let_measure(["macro_f1"])


def test_an_agreement_names_the_metrics_it_allows(tmp_path: Path):
    path = tmp_path / "contract.json"
    offer(metrics=("macro_f1",)).write(path)
    assert Agreement.load(path).metrics == ("macro_f1",)
    told = json.loads(path.read_text())
    del told["metrics"]  # as written before metrics could be asked for
    path.write_text(json.dumps(told))
    assert Agreement.load(path).metrics == ()
