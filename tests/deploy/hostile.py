"""Replies of a hostile client, made from honest ones: many kinds, each in shapes drawn from a seed.

A kind is a function `(draw, data)` that turns the bytes of an honest reply into hostile ones, or gives None
where it has nothing to work on (a method without counts has no wrong ones). Every kind is to be refused.
"""

from __future__ import annotations

import json
import math

import torch

from potluck.core.message import Message
from potluck.core.rng import Rng
from potluck.deploy import wire

CARDS, ANSWERS, EXAMINATIONS = {}, {}, {}  # kinds by name; those of BYTES are in all three
ANYWHERE = (CARDS, ANSWERS, EXAMINATIONS)


def kind(*tables):
    def register(function):
        for table in tables:
            table[function.__name__] = function
        return function

    return register


class Draw:
    """Choices from a seed."""

    def __init__(self, seed):
        self._numbers = Rng(seed).child("hostile").numpy()

    def among(self, *values):
        return values[int(self._numbers.integers(len(values)))]

    def number(self, low, high):
        return int(self._numbers.integers(low, high))

    def bytes(self, size):
        return self._numbers.bytes(size)


def header_of(data):
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def framed(header, rest, padded=True):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if padded else 0)
    return len(text).to_bytes(8, "little") + text + rest


def note_of(data):
    header, _ = header_of(data)
    return json.loads(header["__metadata__"][wire.KEY])


def noted(data, note):
    """The same tensors under another note, which may be any text."""
    header, rest = header_of(data)
    header["__metadata__"] = {wire.KEY: note if isinstance(note, str) else json.dumps(note)}
    return framed(header, rest)


def changed(data, **values):
    return noted(data, note_of(data) | values)


def with_tensors(data, change):
    """The reply with other tensors; the note is unchanged."""
    tensors = dict(Message.decode(data)[0])
    if not tensors:
        return None
    found = change(tensors)
    return None if found is None else Message(found).encode({wire.KEY: json.dumps(note_of(data))})


def each(function, only=lambda value: True):
    """Change every tensor that `only` takes."""

    def change(tensors):
        if not any(map(only, tensors.values())):
            return None
        return {name: function(value) if only(value) else value for name, value in tensors.items()}

    return change


def one(draw, function, only=lambda value: True):
    """Change one tensor that `only` takes, drawn at random."""

    def change(tensors):
        names = [name for name, value in tensors.items() if only(value)]
        if not names:
            return None
        name = draw.among(*names)
        return tensors | {name: function(tensors[name].clone())}

    return change


def floating(value):
    return value.is_floating_point() and value.numel() > 0


def named(draw, name, function):
    """Change the tensor of that name, where there is one."""
    return lambda tensors: tensors | {name: function(tensors[name].clone())} if name in tensors else None


# --- bytes that are no message --------------------------------------------------------------------------


@kind(*ANYWHERE)
def nothing_at_all(draw, data):
    return b""


@kind(*ANYWHERE)
def noise(draw, data):
    return draw.bytes(draw.number(1, 4000))


@kind(*ANYWHERE)
def cut_short(draw, data):
    return data[: draw.number(1, len(data) - 1)]


@kind(*ANYWHERE)
def bytes_behind_it(draw, data):
    return data + draw.bytes(draw.number(1, 64))


@kind(*ANYWHERE)
def header_length_out_of_bounds(draw, data):
    size = draw.among(1 << 63, (1 << 64) - 1, len(data), 100_000_001, 0)
    return size.to_bytes(8, "little") + data[8:]


@kind(*ANYWHERE)
def header_no_json(draw, data):
    return framed(draw.among(b"{", b"\xff" * 16, b"[1, 2]", b"null", b'"text"'), header_of(data)[1])


@kind(*ANYWHERE)
def unknown_type_in_header(draw, data):
    header, rest = header_of(data)
    header["spy"] = {
        "dtype": draw.among("Q8", "F4", "F6_E2M3", "F8_E8M0", "STR", "", 7),
        "shape": [0],
        "data_offsets": [len(rest)] * 2,
    }
    return framed(header, rest)


@kind(*ANYWHERE)
def tensor_outside_the_data(draw, data):
    header, rest = header_of(data)
    offsets = draw.among([0, 1 << 40], [8, 4], [-8, 0], [len(rest) + 8, len(rest) + 12], [0, 4])
    header["spy"] = {"dtype": "F32", "shape": [1], "data_offsets": offsets}
    return framed(header, rest)


@kind(*ANYWHERE)
def sizes_that_overflow(draw, data):
    header, rest = header_of(data)
    shape = draw.among([1 << 62, 4], [1 << 32, 1 << 32], [(1 << 64) - 1], [1 << 70], [-1], [1.5], ["2"])
    header["spy"] = {"dtype": "F32", "shape": shape, "data_offsets": [len(rest)] * 2}
    return framed(header, rest)


# --- envelopes ------------------------------------------------------------------------------------------


@kind(*ANYWHERE)
def no_envelope(draw, data):
    header, rest = header_of(data)
    del header["__metadata__"]
    return framed(header, rest)


@kind(*ANYWHERE)
def envelope_under_another_name(draw, data):
    header, rest = header_of(data)
    header["__metadata__"] = {"flower": header["__metadata__"][wire.KEY]}
    return framed(header, rest)


@kind(*ANYWHERE)
def envelope_no_json(draw, data):
    return noted(data, draw.among("", "{", "reply", "{'reply': 1}", '{"reply": "answer",}', "\x00"))


@kind(*ANYWHERE)
def envelope_no_mapping(draw, data):
    return noted(data, draw.among("[]", "3", "null", '"answer"', "NaN", "true", '[["reply", "answer"]]'))


@kind(*ANYWHERE)
def envelope_too_deep(draw, data):
    deep = draw.number(5_000, 100_000)
    return noted(data, draw.among("[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep))


@kind(*ANYWHERE)
def a_key_twice(draw, data):
    text = json.dumps(note_of(data))
    return noted(data, f'{{"client": "0", {text[1:]}')


@kind(*ANYWHERE)
def a_number_of_thousands_of_digits(draw, data):
    text = json.dumps(note_of(data))
    return noted(data, f'{{"steps": {"9" * draw.number(5000, 9000)}, {text[1:]}')


@kind(*ANYWHERE)
def thousands_of_entries(draw, data):
    return changed(data, **{f"x{number}": number for number in range(draw.number(100, 3000))})


@kind(*ANYWHERE)
def an_entry_missing(draw, data):
    note = note_of(data)
    del note[draw.among(*(key for key in note if key != "errors"))]
    return noted(data, note)


# --- replies to something else --------------------------------------------------------------------------


@kind(*ANYWHERE)
def a_reply_there_is_not(draw, data):
    return changed(data, reply=draw.among("dance", "", None, 3, ["answer"], {"reply": "answer"}))


@kind(ANSWERS, EXAMINATIONS)
def in_the_name_of_another(draw, data):
    return changed(data, client=draw.among("0", "2", "nobody", "", "1 "))


@kind(*ANYWHERE)
def an_id_that_is_none(draw, data):
    return changed(data, client=draw.among(1, None, ["1"], {"1": 1}, "\x1b[2J", "1" * 10_000, True, 1.0))


@kind(ANSWERS, EXAMINATIONS)
def a_card_in_place_of_an_answer(draw, data):
    task = {"kind": "classification", "classes": 10, "input": [1, 8, 8]}
    sizes = {"train": 10, "validation": 1, "test": 1}
    note = {"reply": "card", "client": "1", "samples": sizes, "task": task, "extra": {}}
    return Message().encode({wire.KEY: json.dumps(note)})


@kind(CARDS)
def an_answer_in_place_of_a_card(draw, data):
    note = {"reply": "answer", "client": "1", "steps": 0, "losses": {}, "metrics": {}}
    return Message().encode({wire.KEY: json.dumps(note)})


@kind(*ANYWHERE)
def failure_that_paints_the_terminal(draw, data):
    reason = draw.among("\x1b[2J\x1b[31mall is lost", "ok\r\nround 1: fine", "\x9b5m", "a\x00b", "‮gnp")
    return Message().encode({wire.KEY: json.dumps({"reply": "failure", "client": "1", "reason": reason})})


@kind(*ANYWHERE)
def failure_of_any_length(draw, data):
    reason = "no " * draw.number(5_000, 80_000)
    return Message().encode({wire.KEY: json.dumps({"reply": "failure", "client": "1", "reason": reason})})


@kind(*ANYWHERE)
def failure_without_a_sentence(draw, data):
    reason = draw.among(None, 3, [], {"why": 1}, True, "")
    return Message().encode({wire.KEY: json.dumps({"reply": "failure", "client": "1", "reason": reason})})


@kind(*ANYWHERE)
def failure_in_the_name_of_another(draw, data):
    note = {"reply": "failure", "client": "0", "reason": "client 0: it has lied"}
    return Message().encode({wire.KEY: json.dumps(note)})


# --- names ----------------------------------------------------------------------------------------------


@kind(ANSWERS, EXAMINATIONS)
def a_tensor_nobody_declared(draw, data):
    extra = {draw.among("spy", "model", "head.weight", "0", "../x"): torch.zeros(draw.number(0, 3))}
    message = Message(dict(Message.decode(data)[0]) | extra)
    return message.encode({wire.KEY: json.dumps(note_of(data))})


@kind(ANSWERS)
def a_tensor_missing(draw, data):
    def change(tensors):
        gone = draw.among(*tensors)
        return {name: value for name, value in tensors.items() if name != gone}

    return with_tensors(data, change)


@kind(ANSWERS)
def no_tensors_at_all(draw, data):
    return with_tensors(data, lambda tensors: {})


@kind(ANSWERS)
def a_group_where_a_tensor_belongs(draw, data):
    def change(tensors):
        name = draw.among(*tensors)
        other = name.replace("/", ".") if "/" in name else f"{name}/weight"
        return {key: value for key, value in tensors.items() if key != name} | {other: tensors[name]}

    return with_tensors(data, change)


@kind(ANSWERS)
def names_that_cannot_be_shown(draw, data):
    name = draw.among("\x1b[2J", "", "/", "a" * 20_000, "‮", "model/\x00", "\n")
    return with_tensors(data, lambda tensors: tensors | {name: torch.zeros(1)})


@kind(ANSWERS)
def thousands_of_tensors(draw, data):
    many = {f"model/spy{number}": torch.zeros(0) for number in range(draw.number(200, 2000))}
    return with_tensors(data, lambda tensors: tensors | many)


@kind(ANSWERS)
def names_exchanged(draw, data):
    """Every name is there, over the tensor of another."""

    def change(tensors):
        names = list(tensors)
        shapes = [tensors[name].shape for name in names]
        if len(names) < 2 or shapes == shapes[1:] + shapes[:1]:
            return None
        return dict(zip(names, [*[*tensors.values()][1:], tensors[names[0]]], strict=True))

    return with_tensors(data, change)


# --- types ----------------------------------------------------------------------------------------------


def typed(name, dtype, only):
    def change(draw, data):
        return with_tensors(data, draw.among(each, lambda f, o: one(draw, f, o))(lambda v: v.to(dtype), only))

    change.__name__ = name
    kind(ANSWERS)(change)


typed("float64", torch.float64, floating)
typed("float16", torch.float16, floating)
typed("bfloat16", torch.bfloat16, floating)
typed("float8", torch.float8_e4m3fn, floating)
typed("other_float8", torch.float8_e5m2, floating)
typed("complex_numbers", torch.complex64, floating)
typed("booleans", torch.bool, lambda value: value.numel() > 0)
typed("unsigned", torch.uint64, lambda value: value.numel() > 0)
typed("whole_for_floating", torch.int64, floating)
typed("bytes_for_numbers", torch.uint8, lambda value: value.numel() > 0)
typed("floating_for_whole", torch.float32, lambda value: not value.is_floating_point())


@kind(ANSWERS)
def float8_nobody_declared(draw, data):
    spy = torch.ones(draw.number(1, 9)).to(draw.among(torch.float8_e4m3fn, torch.float8_e5m2))
    return with_tensors(data, lambda tensors: tensors | {"spy": spy})


# --- shapes ---------------------------------------------------------------------------------------------


@kind(ANSWERS)
def no_rows(draw, data):
    return with_tensors(data, one(draw, lambda v: v[:0], lambda v: v.dim() > 0 and len(v) > 0))


@kind(ANSWERS)
def a_row_too_few(draw, data):
    return with_tensors(data, one(draw, lambda v: v[:-1], lambda v: v.dim() > 0 and len(v) > 1))


@kind(ANSWERS)
def a_row_too_many(draw, data):
    return with_tensors(
        data, one(draw, lambda v: torch.cat([v, v[:1]]), lambda v: v.dim() > 0 and len(v) > 0)
    )


@kind(ANSWERS)
def no_rows_of_endless_width(draw, data):
    header, rest = header_of(data)
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return None
    name = draw.among(*names)
    tensors = {key: value for key, value in Message.decode(data)[0].items() if key != name}
    header, rest = header_of(Message(tensors).encode({wire.KEY: json.dumps(note_of(data))}))
    shape = draw.among([0, 1 << 62], [1 << 40, 0, 1 << 20], [0] * 60, [0, 0, (1 << 63) - 1])
    header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(rest)] * 2}
    return framed(header, rest)


@kind(ANSWERS)
def flattened(draw, data):
    return with_tensors(data, one(draw, lambda v: v.reshape(-1), lambda v: v.dim() != 1))


@kind(ANSWERS)
def an_axis_too_many(draw, data):
    return with_tensors(data, one(draw, lambda v: v.reshape(*[1] * draw.number(1, 40), *v.shape)))


@kind(ANSWERS)
def axes_exchanged(draw, data):
    return with_tensors(
        data, one(draw, lambda v: v.mT.contiguous(), lambda v: v.dim() > 1 and v.shape[-1] != v.shape[-2])
    )


# --- values ---------------------------------------------------------------------------------------------


def at_some_place(draw, value):
    def change(tensor):
        tensor.view(-1)[draw.number(0, tensor.numel())] = value
        return tensor

    return change


@kind(ANSWERS)
def not_a_number(draw, data):
    return with_tensors(data, one(draw, at_some_place(draw, math.nan), floating))


@kind(ANSWERS)
def endless(draw, data):
    return with_tensors(data, one(draw, at_some_place(draw, draw.among(math.inf, -math.inf)), floating))


@kind(ANSWERS)
def nothing_but_not_a_number(draw, data):
    return with_tensors(data, each(lambda value: value * math.nan, floating))


@kind(ANSWERS)
def enlarged(draw, data):
    """Finite, and so large that one mean ends the run."""
    times = draw.among(1e4, 1e6, 1e12, 1e30)
    return with_tensors(data, each(lambda value: (value * times).clamp(-3e38, 3e38), floating))


@kind(ANSWERS)
def largest_floats(draw, data):
    top = torch.finfo(torch.float32).max * draw.among(1, -1)
    return with_tensors(data, each(lambda value: torch.full_like(value, top), floating))


@kind(ANSWERS)
def one_number_enlarged(draw, data):
    sign = draw.among(1, -1)
    return with_tensors(data, one(draw, at_some_place(draw, sign * 1e30), floating))


@kind(ANSWERS)
def counts_below_zero(draw, data):
    return with_tensors(data, named(draw, "counts", at_some_place(draw, -float(draw.number(1, 10**6)))))


@kind(ANSWERS)
def counts_in_parts(draw, data):
    return with_tensors(data, named(draw, "counts", at_some_place(draw, draw.among(0.5, 1.001, 1e-30))))


@kind(ANSWERS)
def more_counted_than_there_are(draw, data):
    return with_tensors(data, named(draw, "counts", at_some_place(draw, draw.among(1e6, 1e9, 3e38))))


@kind(ANSWERS)
def classes_there_are_not(draw, data):
    value = draw.among(-1, 10, 1 << 40, -(1 << 63), (1 << 63) - 1)
    return with_tensors(data, named(draw, "classes", at_some_place(draw, value)))


@kind(ANSWERS)
def a_class_twice(draw, data):
    return with_tensors(data, named(draw, "classes", lambda value: value[:1].expand(len(value)).clone()))


@kind(ANSWERS)
def label_outside_its_range(draw, data):
    return with_tensors(data, named(draw, "label", at_some_place(draw, draw.among(-0.5, 1.5, 1e6))))


# --- reports --------------------------------------------------------------------------------------------


@kind(ANSWERS, EXAMINATIONS)
def steps_that_are_no_count(draw, data):
    return changed(data, steps=draw.among(-1, 1.5, "3", None, True, [1], 1e3, 10**30, {}))


@kind(ANSWERS)
def a_loss_that_is_not_finite(draw, data):
    return changed(
        data, losses={"loss": [draw.among(math.nan, math.inf, -math.inf, 1e39, -1e200), "float32"]}
    )


@kind(ANSWERS, EXAMINATIONS)
def numbers_that_are_none(draw, data):
    where = draw.among("losses", "metrics")
    wrong = draw.among("0.1", None, [0.1], True, {}, [[0.1, "float32"]])
    return changed(data, **{where: {"loss": [wrong, "float32"]}})


@kind(ANSWERS, EXAMINATIONS)
def numbers_of_no_type(draw, data):
    where = draw.among("losses", "metrics")
    return changed(data, **{where: {"loss": [0.1, draw.among("float8", "int64", "complex64", "", None, [])]}})


@kind(ANSWERS, EXAMINATIONS)
def numbers_without_form(draw, data):
    where = draw.among("losses", "metrics", "errors")
    return changed(data, **{where: draw.among([], 3, None, "loss", {"loss": 3}, {"loss": []}, {"loss": [1]})})


@kind(ANSWERS)
def thousands_of_losses(draw, data):
    return changed(data, losses={str(number): [0.1, "float32"] for number in range(10_001)})


@kind(ANSWERS)
def metrics_that_are_not_finite(draw, data):
    value = draw.among(math.nan, math.inf, -math.inf, 1e300)
    return changed(data, metrics={draw.among("bound 0 0", "x"): [value, "float64"]})


@kind(ANSWERS, EXAMINATIONS)
def names_of_numbers_that_cannot_be_shown(draw, data):
    name = draw.among("\x1b[2J", "x" * 5000, "\n")
    return changed(data, **{draw.among("losses", "metrics"): {name: [0.1, "float32"]}})


# --- examinations ---------------------------------------------------------------------------------------


def measured(data, change, ending="/correct"):
    """The reply with one metric changed."""
    metrics = note_of(data)["metrics"]
    name = next((name for name in metrics if name.endswith(ending)), None)
    return None if name is None else changed(data, metrics=metrics | {name: change(metrics[name])})


@kind(EXAMINATIONS)
def a_metric_missing(draw, data):
    metrics = note_of(data)["metrics"]
    gone = draw.among(*metrics)
    return changed(data, metrics={name: value for name, value in metrics.items() if name != gone})


@kind(EXAMINATIONS)
def a_metric_nobody_asked_for(draw, data):
    return changed(data, metrics=note_of(data)["metrics"] | {"model/test/spy": [0.5, "float64"]})


@kind(EXAMINATIONS)
def more_right_than_there_are(draw, data):
    return measured(data, lambda value: [value[0] * draw.among(1e6, 1e30) + 1e6, value[1]])


@kind(EXAMINATIONS)
def fewer_right_than_none(draw, data):
    return measured(data, lambda value: [-float(draw.number(1, 10**6)), value[1]])


@kind(EXAMINATIONS)
def right_in_parts(draw, data):
    return measured(data, lambda value: [draw.among(0.5, 1e-9, 2.25), value[1]])


@kind(EXAMINATIONS)
def right_not_a_number(draw, data):
    return measured(data, lambda value: [draw.among(math.nan, math.inf, -math.inf), value[1]])


@kind(EXAMINATIONS)
def a_loss_below_zero(draw, data):
    return measured(data, lambda value: [draw.among(-1.0, -1e300, -math.inf), value[1]], "/loss")


@kind(EXAMINATIONS)
def a_loss_beyond_all_bounds(draw, data):
    return measured(data, lambda value: [draw.among(1e101, 1.7e308), value[1]], "/loss")


@kind(EXAMINATIONS)
def tensors_beside_metrics(draw, data):
    spy = {draw.among("scores", "model/test/scores"): torch.zeros(draw.number(0, 9))}
    return Message(spy).encode({wire.KEY: json.dumps(note_of(data))})


# --- cards ----------------------------------------------------------------------------------------------


def told(data, part, **values):
    note = note_of(data)
    return changed(data, **{part: note[part] | values})


@kind(CARDS)
def samples_that_are_no_count(draw, data):
    value = draw.among(-1, 10**8 + 1, 10**30, 1.5, "7", None, True, [1], math.nan, math.inf)
    return told(data, "samples", **{draw.among("train", "validation", "test"): value})


@kind(CARDS)
def samples_of_no_known_part(draw, data):
    sizes = note_of(data)["samples"]
    return changed(data, samples=draw.among([], 3, None, {"train": 3}, sizes | {"spy": 1}))


@kind(CARDS)
def a_task_there_is_not(draw, data):
    return told(data, "task", kind=draw.among("diagnosis", "", None, 3, ["classification"], "__class__"))


@kind(CARDS)
def classes_out_of_bounds(draw, data):
    return told(data, "task", classes=draw.among(0, -1, 10**7, 10**30, 2.0, "10", None, True, math.inf, [10]))


@kind(CARDS)
def samples_of_no_shape(draw, data):
    shape = draw.among(
        [],
        [0],
        [-1],
        [1 << 40],
        [1 << 20] * 3,
        [1.5],
        ["8"],
        "188",
        8,
        None,
        [[1, 8, 8]],
        [1] * 9,
        [True, 8, 8],
    )
    return told(data, "task", input=shape)


@kind(CARDS)
def a_vocabulary_out_of_bounds(draw, data):
    return told(data, "task", vocabulary=draw.among(-1, 0, 10**12, "words", [], 1.5, True))


@kind(CARDS)
def an_image_out_of_bounds(draw, data):
    return told(data, "task", image=draw.among([1 << 20, 1 << 20], "image", 3, [-1], [0.5], [9, 9, 9]))


@kind(CARDS)
def a_task_with_more_to_tell(draw, data):
    return told(data, "task", **{draw.among("spy", "labels", "\x1b[2J"): draw.among(1, "x", [])})


@kind(CARDS)
def a_width_out_of_bounds(draw, data):
    if "width" not in note_of(data)["extra"]:
        return None
    return told(
        data, "extra", width=draw.among(0, -4, 1 << 40, 10**30, 16.0, "16", None, [16], True, math.nan)
    )


@kind(CARDS)
def classes_held_that_cannot_be(draw, data):
    if "classes_held" not in note_of(data)["extra"]:
        return None
    held = draw.among(
        [0, 0], [10], [-1], [0.5], ["0"], 3, None, "0123", [[0]], [*range(10), 0], [True], {"0": 1}
    )
    return told(data, "extra", classes_held=held)


@kind(CARDS)
def tensors_out_of_bounds(draw, data):
    if "names" not in note_of(data)["extra"]:
        return None
    wrong = draw.among(
        {"w": [-1]},
        {"w": [0]},
        {"w": [1 << 40]},
        {"w": [1 << 20, 1 << 20]},
        {"w": [1] * 50},
        {"w": 3},
        {"w": ["3"]},
        {"\x1b[2J": [3]},
        {"w" * 1000: [3]},
        {f"w{number}": [1] for number in range(20_001)},
        [1],
        None,
        "w",
    )
    return told(data, "extra", names=wrong)


@kind(CARDS)
def a_stem_out_of_bounds(draw, data):
    if "stem" not in note_of(data)["extra"]:
        return None
    return told(
        data, "extra", stem=draw.among([1 << 40], [-1], [1.5], "stem", 3, None, [1] * 9, [1 << 13] * 3)
    )


@kind(CARDS)
def a_field_there_is_not(draw, data):
    return told(
        data, "extra", **{draw.among("spy", "\x1b[2J", "labels", "__class__"): draw.among(1, "x", [])}
    )


@kind(CARDS)
def a_field_kept_back(draw, data):
    extra = note_of(data)["extra"]
    if not extra:
        return None
    gone = draw.among(*extra)
    return changed(data, extra={name: value for name, value in extra.items() if name != gone})


@kind(CARDS)
def fields_without_form(draw, data):
    return changed(data, extra=draw.among([], 3, None, "width"))


@kind(CARDS)
def the_card_of_nobody(draw, data):
    return changed(data, client=draw.among("9", "north", "", "../1", "1\n"))


def kinds():
    """Every kind, by name."""
    return {**CARDS, **ANSWERS, **EXAMINATIONS}
