"""Messages: the bytes, their size, the contract and every way to break it."""

import contextlib
import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.core.card import Card
from potluck.core.contract import (
    Field,
    check,
    declared_scalars,
    largest_size,
    numbers,
    shapes_below,
    state_of,
    tensor,
)
from potluck.core.formulas import formula_value
from potluck.core.message import LastMessage, Message
from potluck.core.method import Method
from potluck.core.task import Task
from potluck.errors import MessageError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
WHOLE = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
DTYPES = [*FLOATS, *WHOLE, torch.bool, torch.complex64]

names = st.text('ab./"\\\n\t\x00\x1f\x7f é€\u2028𝄞', min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)


@st.composite
def messages(draw):
    content = {}
    for name in draw(st.lists(names, max_size=6, unique=True)):
        shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
        count = torch.Size(shape).numel()
        content[name] = (torch.arange(count) % 2).reshape(shape).to(dtype)
    return Message(content)


def same(one, other):
    return (
        one.keys() == other.keys()
        and all(one[name].dtype == other[name].dtype for name in one)
        and all(one[name].shape == other[name].shape for name in one)
        and all(one[name].tolist() == other[name].tolist() for name in one)
    )


class TestBytes:
    @settings(deadline=None, max_examples=150)
    @given(messages())
    def test_round_trip_and_size(self, message):
        data = message.encode()
        back, envelope = Message.decode(data)
        assert same(message, back)
        assert list(message) == list(back)
        assert envelope == {}
        assert message.nbytes == len(data)

    def test_size_of_types_of_one_width_in_one_message(self):
        """Where a tensor lies decides how many digits its offsets have."""
        long, short = torch.zeros(5000, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
        for one in (Message({"a": long, "b": short}), Message({"b": long, "a": short})):
            assert one.nbytes == len(one.encode())
        mixed = Message({f"{i}": torch.zeros(7**i, dtype=dtype) for i, dtype in enumerate(FLOATS[1:4])})
        assert mixed.nbytes == len(mixed.encode())

    @settings(deadline=None, max_examples=50)
    @given(messages(), st.dictionaries(names, names, max_size=3))
    def test_the_envelope_travels_along(self, message, envelope):
        back, received = Message.decode(message.encode(envelope))
        assert received == envelope
        assert same(message, back)

    def test_names_that_share_memory_travel_too(self):
        whole = torch.arange(4.0)
        message = Message({"a": whole, "b": whole, "c": whole[1:], "d": whole.view(2, 2).t()})
        assert same(Message.decode(message.encode())[0], message)

    def test_later_changes_of_the_bytes_owner_do_not_matter(self):
        message, _ = Message.decode(Message({"a": torch.ones(2)}).encode())
        message["a"].add_(1)
        assert message["a"].tolist() == [2.0, 2.0]

    @settings(deadline=None, max_examples=100)
    @given(messages().filter(len), st.data())
    def test_cut_short(self, message, data):
        whole = message.encode()
        end = data.draw(st.integers(0, len(whole) - 1))
        with pytest.raises(MessageError, match=f"^{end} bytes are no message: "):
            Message.decode(whole[:end])

    @settings(deadline=None, max_examples=200)
    @given(st.binary(max_size=64))
    def test_random_bytes(self, data):
        with pytest.raises(MessageError, match="bytes are no message"):
            Message.decode(data)

    @settings(deadline=None, max_examples=150)
    @given(messages().filter(len), st.data())
    def test_one_flipped_byte_is_a_message_or_a_sentence(self, message, data):
        whole = bytearray(message.encode())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        with contextlib.suppress(MessageError):
            message, _ = Message.decode(bytes(whole))
            assert message.scalars >= 0

    @pytest.mark.parametrize(
        "header",
        [
            [],
            None,
            7,
            "text",
            {"a": 3},
            {"a": {"dtype": "F32"}},
            {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
            {"a": {"dtype": "F32", "shape": [2**64 - 1, 0], "data_offsets": [0, 0]}},
            {"a": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}},
            {"__metadata__": {"a": 1}},
        ],
    )
    def test_a_header_that_is_wrong(self, header):
        text = json.dumps(header).encode()
        for data in (b"", bytes(4)):
            with pytest.raises(MessageError, match="bytes are no message"):
                Message.decode(len(text).to_bytes(8, "little") + text + data)

    @pytest.mark.parametrize("length", [0, 1, 10**6, 2**63, 2**64 - 1])
    def test_a_header_that_lies_about_its_length(self, length):
        data = Message({"a": torch.ones(3)}).encode()
        with pytest.raises(MessageError, match="bytes are no message"):
            Message.decode(length.to_bytes(8, "little") + data[8:])

    def test_a_header_without_an_envelope(self):
        text = b'{"__metadata__":null}'
        message, envelope = Message.decode(len(text).to_bytes(8, "little") + text)
        assert (len(message), envelope) == (0, {})


class TestContent:
    def test_groups_are_flattened_and_found_again(self):
        message = Message({"small": {"w": torch.zeros(2, 3), "b": torch.ones(2)}, "counts": torch.ones(4)})
        assert list(message) == ["counts", "small/b", "small/w"]
        assert message.group("small").keys() == {"w", "b"}
        assert message.group("smal") == message.group("counts") == {}
        assert message.sizes() == {"small": 8, "counts": 4}
        assert message.scalars == 12

    def test_memory_is_laid_out_as_after_a_journey(self):
        """Sums over memory in another order differ in their last bits."""
        image = torch.arange(48.0).view(2, 3, 4, 2).to(memory_format=torch.channels_last)
        sent = Message({"model": {"w": image}, "t": torch.ones(2, 3).t()})
        arrived, _ = Message.decode(sent.encode())
        assert {name: value.stride() for name, value in sent.items()} == {
            name: value.stride() for name, value in arrived.items()
        }
        assert torch.equal(sent["model/w"], image)

    def test_no_gradient_crosses(self):
        parameter = torch.nn.Parameter(torch.ones(2))
        assert not Message({"w": parameter})["w"].requires_grad
        assert not Message({"g": {"w": parameter * 2}})["g/w"].requires_grad

    def test_what_is_no_tensor_is_refused(self):
        with pytest.raises(MessageError, match="'lr' of a message is a float, not a tensor"):
            Message({"lr": 0.5})

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
    def test_values_that_are_not_finite_are_found(self, bad, dtype):
        message = Message(
            {
                "a": torch.ones(3),
                "n": torch.tensor([2**60]),
                "g": {"w": torch.tensor([1.0, bad], dtype=dtype)},
            }
        )
        assert message.not_finite() == "g/w"

    @settings(deadline=None, max_examples=50)
    @given(messages())
    def test_finite_messages_pass(self, message):
        plain = Message({name: value for name, value in message.items() if value.dtype not in FLOATS[4:]})
        assert plain.not_finite() is None


def attempt(message, contract, symbols=None, shapes=None):
    check(Message(message), contract, symbols or {}, (shapes or {}).get, "client 7, step train")


class TestContract:
    def test_what_is_declared_passes(self):
        contract = {
            "prototypes": tensor("C_k<=C, d", "means"),
            "classes": tensor("C_k", "labels", torch.int64),
            "rate": tensor("", "one number"),
            "model": state_of("model", "weights"),
            "extra": tensor("2*d", "more", optional=True),
        }
        content = {
            "prototypes": torch.zeros(3, 5),
            "classes": torch.zeros(3, dtype=torch.int64),
            "rate": torch.tensor(1.0),
            "model": {"w": torch.zeros(2)},
        }
        attempt(content, contract, {"C": 4, "d": 5}, {"model": {"w": (2,)}})
        attempt(content | {"extra": torch.zeros(10)}, contract, {"C": 4, "d": 5}, {"model": {"w": (2,)}})

    @pytest.mark.parametrize(
        ("content", "name"),
        [
            ({"spy": torch.zeros(1)}, "spy"),
            ({"spy": {"w": torch.zeros(1)}}, "spy/w"),
            ({"p": torch.zeros(2), "p/spy": torch.zeros(1)}, "p/spy"),
            ({"p": torch.zeros(2), "model": {"w": torch.zeros(1)}, "model ": torch.zeros(1)}, "model "),
        ],
    )
    def test_undeclared(self, content, name):
        contract = {"p": tensor("2", "numbers"), "model": state_of("model", "weights", optional=True)}
        expected = f"client 7, step train: tensor '{name}' is not declared; send only: p, model"
        with pytest.raises(MessageError) as caught:
            attempt(content, contract)
        assert str(caught.value) == expected

    def test_a_tensor_under_the_name_of_a_group_is_undeclared(self):
        contract = {"model": state_of("model", "weights", optional=True)}
        with pytest.raises(MessageError, match="tensor 'model' is not declared"):
            attempt({"model": torch.zeros(9)}, contract, shapes={"model": {"w": (1,)}})
        with pytest.raises(MessageError, match="tensor 'model' is not declared"):
            check(
                Message({"model": torch.zeros(9), "model/w": torch.zeros(1)}),
                contract,
                {},
                {"model": {"w": (1,)}}.get,
                "client 7",
            )

    def test_nothing_is_declared(self):
        with pytest.raises(MessageError, match="tensor 'a' is not declared; send only: nothing"):
            attempt({"a": torch.zeros(1)}, {})

    @pytest.mark.parametrize(
        ("contract", "content", "sentence"),
        [
            ({"p": tensor("2", "")}, {}, "tensor 'p' is missing; send it, or declare it optional"),
            ({"m": state_of("model", "")}, {}, "group 'm' is missing; send it, or declare it optional"),
            (
                {"m": state_of("model", "")},
                {"m": {"w": torch.zeros(2)}},
                "tensor 'm/b' is missing; send it, or declare the group partial",
            ),
            (
                {"p": tensor("2, d", "")},
                {"p": torch.zeros(2, 4)},
                "tensor 'p' has shape (2, 4), declared (2, d) with C=3, d=5",
            ),
            (
                {"p": tensor("2", "")},
                {"p": torch.zeros(2, 1)},
                "tensor 'p' has shape (2, 1), declared (2) with C=3, d=5",
            ),
            (
                {"p": tensor("", "")},
                {"p": torch.zeros(1)},
                "tensor 'p' has shape (1,), declared () with C=3, d=5",
            ),
            (
                {"p": tensor("2", "")},
                {"p": torch.zeros(2, dtype=torch.float64)},
                "tensor 'p' has type torch.float64, declared torch.float32",
            ),
            (
                {"p": tensor("k<=C", "")},
                {"p": torch.zeros(4)},
                "tensor 'p' has shape (4,), declared (k<=C) with C=3, d=5, k=4",
            ),
            (
                {"p": tensor("k<=C, d", ""), "y": tensor("k", "", torch.int64)},
                {"p": torch.zeros(2, 5), "y": torch.zeros(3, dtype=torch.int64)},
                "tensor 'y' has shape (3,), declared (k) with C=3, d=5, k=2",
            ),
            (
                {"m": state_of("model", "")},
                {"m": {"w": torch.zeros(3), "b": torch.zeros(1)}},
                "tensor 'm/w' has shape (3,), declared (2,)",
            ),
            (
                {"m": state_of("model", "")},
                {"m": {"w": torch.zeros(2), "b": torch.zeros(1), "x": torch.zeros(1)}},
                "tensor 'm/x' is not part of 'model'",
            ),
            (
                {"m": state_of("model", "", partial=True)},
                {"m": {"x": torch.zeros(1)}},
                "tensor 'm/x' is not part of 'model'",
            ),
            (
                {"m": state_of("model", "")},
                {"m": {"w": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(1)}},
                "tensor 'm/w' has type torch.int64, declared torch.float32",
            ),
        ],
    )
    def test_refusals(self, contract, content, sentence):
        with pytest.raises(MessageError) as caught:
            attempt(content, contract, {"C": 3, "d": 5}, {"model": {"w": (2,), "b": (1,)}})
        assert str(caught.value).startswith(f"client 7, step train: {sentence}")
        assert "; " in str(caught.value)  # what to do

    def test_partial_and_optional_groups(self):
        shapes = {"model": {"w": (2,), "b": (1,)}, "empty": {}}
        attempt({"m": {"w": torch.zeros(2)}}, {"m": state_of("model", "", partial=True)}, shapes=shapes)
        attempt({}, {"m": state_of("model", "", optional=True)}, shapes=shapes)
        attempt({}, {"m": state_of("empty", "")}, shapes=shapes)
        with pytest.raises(MessageError, match="group 'm' is missing"):
            attempt({}, {"m": state_of("model", "", partial=True)}, shapes=shapes)
        with pytest.raises(MessageError, match="'m/b' is missing"):
            attempt({"m": {"w": torch.zeros(2)}}, {"m": state_of("model", "", optional=True)}, shapes=shapes)

    def test_a_side_that_knows_no_shapes_still_checks_types(self):
        contract = {"m": state_of("model", "")}
        attempt({"m": {"anything": torch.zeros(2)}}, contract)
        with pytest.raises(MessageError, match=r"'m/n' has type torch\.int64"):
            attempt({"m": {"n": torch.zeros(2, dtype=torch.int64)}}, contract)

    def test_a_bound_symbol_does_not_leak_into_the_next_message(self):
        contract = {"p": tensor("k", "")}
        symbols = {"C": 3}
        attempt({"p": torch.zeros(2)}, contract, symbols)
        attempt({"p": torch.zeros(5)}, contract, symbols)
        assert symbols == {"C": 3}


class TestFormulas:
    @pytest.mark.parametrize(
        ("formula", "value"),
        [
            ("7", 7),
            ("C", 10),
            ("C*(d+1)", 5130),
            ("C * d - 3", 5117),
            ("d // C", 51),
            (" C ", 10),
            ("2*C+d//2", 276),
        ],
    )
    def test_values(self, formula, value):
        assert formula_value(formula, {"C": 10, "d": 512}) == value

    @pytest.mark.parametrize(
        "formula",
        [
            "x",
            "C**2",
            "C/2",
            "-C",
            "f(C)",
            "C.real",
            "C if C else d",
            "1.5",
            "'a'",
            "C +",
            "",
            "C // (C - C)",
        ],
    )
    def test_what_is_not_understood(self, formula):
        with pytest.raises(MessageError) as caught:
            formula_value(formula, {"C": 10, "d": 512})
        assert str(caught.value) == f"the shape formula {formula!r} is not understood; known: C, d"

    @settings(deadline=None)
    @given(st.integers(0, 99), st.integers(1, 99))
    @example(0, 1)
    def test_they_agree_with_python(self, a, b):
        assert formula_value("(a + 2*b) * a // b - b", {"a": a, "b": b}) == (a + 2 * b) * a // b - b

    @pytest.mark.parametrize(
        ("field", "scalars"),
        [
            (tensor("C, d", ""), 30),
            (tensor("", ""), 1),
            (tensor("k<=C, d", ""), 30),
            (tensor("k<=C, k", ""), 9),
            (tensor("k, d", ""), None),
            (tensor("C*(d+1)", ""), 33),
            (state_of("model", ""), 8),
            (state_of("unknown", ""), None),
        ],
    )
    def test_declared_scalars(self, field, scalars):
        shapes = {"model": {"w": (2, 3), "b": (2,)}}
        assert declared_scalars(field, {"C": 3, "d": 10}, shapes.get) == scalars


class TestPartOfAPart:
    """`state_of("model/head")`: a module inside a part crosses alone, with exact names and shapes."""

    whole = {"fc.weight": (9, 4), "head.weight": (3, 9), "head.bias": (3,), "header.weight": (1,)}

    def test_shapes_below(self):
        assert shapes_below(self.whole, "head") == {"weight": (3, 9), "bias": (3,)}
        assert shapes_below(self.whole, "") == self.whole
        assert shapes_below(self.whole, "hea") == {}

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (
                {"weight": torch.zeros(3, 9)},
                "tensor 'head/bias' is missing; send it, or declare the group partial",
            ),
            (
                {"weight": torch.zeros(3, 8), "bias": torch.zeros(3)},
                "tensor 'head/weight' has shape (3, 8), declared (3, 9)",
            ),
            (
                {"weight": torch.zeros(3, 9), "bias": torch.zeros(3), "fc.weight": torch.zeros(9, 4)},
                "tensor 'head/fc.weight' is not part of 'model/head'",
            ),
        ],
    )
    def test_refusals(self, content, sentence):
        shapes = {"model/head": shapes_below(self.whole, "head")}
        contract = {"head": state_of("model/head", "the classifier")}
        attempt({"head": {"weight": torch.zeros(3, 9), "bias": torch.zeros(3)}}, contract, shapes=shapes)
        with pytest.raises(MessageError) as caught:
            attempt({"head": content}, contract, shapes=shapes)
        assert str(caught.value).startswith(f"client 7, step train: {sentence}")
        assert "; " in str(caught.value)  # what to do

    def test_the_server_knows_it_from_a_card_with_names(self):
        names = Card("7", 5, Task("classification", 3, (4,)), {"names": self.whole})
        assert Method().expected(names, "model/head") == {"weight": (3, 9), "bias": (3,)}
        assert Method().expected(names, "small/head") is None
        assert Method().expected(Card("7", 5, Task("classification", 3, (4,))), "model/head") is None


def test_fields_are_values():
    assert tensor("C", "x") == Field("x", shape="C")
    assert state_of("m", "x", partial=True) == Field("x", like="m", partial=True)


def test_the_largest_size_follows_from_the_contract() -> None:
    contract = {
        "means": tensor("k<=C, d", "at most one a class"),
        "classes": numbers("k", "which", below="C"),
        "head": state_of("head", "a part"),
    }
    shapes = {"head": {"weight": (10, 4), "bias": (10,)}}
    most = largest_size(contract, {"C": 10, "d": 4}, shapes.get)
    content = {
        "means": torch.zeros(10, 4),
        "classes": torch.zeros(10, dtype=torch.int64),
        "head": {name: torch.zeros(shape) for name, shape in shapes["head"].items()},
    }
    real = Message(content)
    check(real, contract, {"C": 10, "d": 4}, shapes.get, "client 0")
    assert most == real.nbytes
    assert largest_size(contract, {"C": 10, "d": 4}, lambda part: None) is None
    assert largest_size({"rows": tensor("n, d", "open")}, {"d": 4}, shapes.get) is None


def test_the_same_tensors_are_the_same_message_until_one_is_replaced() -> None:
    """A server sends one thing to many clients: it is put in order and measured once."""
    messages, small, counts = LastMessage(), {"w": torch.ones(2, 3)}, torch.ones(4)
    first = messages.of({"small": small, "counts": counts})
    assert messages.of({"small": dict(small), "counts": counts}) is first
    assert messages.of(first) is first
    counts.add_(1)
    assert torch.equal(messages.of({"small": small, "counts": counts})["counts"], counts)
    counts.data = torch.zeros(4)
    assert torch.equal(messages.of({"small": small, "counts": counts})["counts"], torch.zeros(4))
    counts.data = counts.data[:2]
    assert messages.of({"small": small, "counts": counts})["counts"].shape == (2,)
    turned = torch.ones(2, 3).t()
    assert messages.of({"turned": turned})["turned"].sum() == 6
    turned.add_(1)
    assert messages.of({"turned": turned})["turned"].sum() == 12
    square = torch.arange(4.0).reshape(2, 2)
    assert messages.of({"square": square})["square"].tolist() == [[0, 1], [2, 3]]
    square.t_()
    assert messages.of({"square": square})["square"].is_contiguous()
    small["w"] = torch.ones(2, 3)
    assert messages.of({"small": small, "counts": counts})["small/w"].data_ptr() == small["w"].data_ptr()
    assert list(messages.of({"counts": counts})) == ["counts"]
    with pytest.raises(MessageError, match="'counts' of a message is a float"):
        messages.of({"counts": 1.0})  # type: ignore[dict-item]
