"""Client steps as transactions: what stands, what is undone, what is answered again."""

from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from potluck.core.message import Message
from potluck.core.state import Report
from potluck.engine.protocol import Answer, Examination, Request, Stamp
from potluck.engine.transactions import Done, Record, opened, stored
from potluck.errors import StepFailed


def stamp(round_, exchange=1, accepted=0, attempt=1):
    return Stamp("experiment", round_, attempt, exchange, accepted)


def state(value):
    return {"model/w": torch.tensor(float(value))}


def value(state_):
    return None if state_ is None else state_["model/w"].item()


def do(record, at, add=1):
    """An exchange: add a number to the client's only weight, unless it was done before."""
    asked = Request("7", ("train",), Message(), at)
    repeated = record.open(asked)
    if repeated is not None:
        return repeated
    before, counters = record.start()
    after = state((value(before) or 0) + add)
    counters["steps"] = counters.get("steps", 0) + 1
    answer = Answer("7", Message({"w": after["model/w"]}), Report(steps=1))
    record.store(asked, Done(answer, after, counters))
    return answer


def test_an_accepted_round_becomes_the_base():
    record = Record()
    do(record, stamp(1))
    assert (value(record.base), value(record.start()[0])) == (None, 1)
    record.settle(1)
    assert (value(record.base), record.work) == (1, None)


def test_a_refused_round_leaves_no_trace():
    record = Record(base=state(5))
    do(record, stamp(2, accepted=1))
    record.settle(-1)
    assert (value(record.base), record.work) == (5, None)


def test_the_same_exchange_again_gives_the_stored_answer_and_trains_nothing():
    record = Record()
    first = do(record, stamp(1))
    assert do(record, stamp(1), add=100) is first
    assert value(record.start()[0]) == 1


def test_the_next_exchange_goes_on_where_the_last_one_ended():
    record = Record(base=state(5))
    do(record, stamp(3, 1))
    do(record, stamp(3, 2))
    assert value(record.start()[0]) == 7
    assert record.start()[1] == {"steps": 2}
    assert value(record.base) == 5


def test_counters_start_anew_in_a_new_round():
    record = Record()
    do(record, stamp(1))
    do(record, stamp(2, accepted=1))
    assert record.start()[1] == {"steps": 1}


def test_a_new_attempt_goes_back_to_the_base():
    record = Record(base=state(5))
    do(record, stamp(3, 1))
    do(record, stamp(3, 2))
    do(record, stamp(3, 1, attempt=2))
    assert value(record.start()[0]) == 6


def test_the_next_round_tells_whether_the_last_one_was_taken():
    for accepted, expected in ((3, 7), (2, 6)):
        record = Record(base=state(5))
        do(record, stamp(3, accepted=2))
        do(record, stamp(4, accepted=accepted))
        assert value(record.start()[0]) == expected


def test_an_older_exchange_of_the_round_is_refused_and_changes_nothing():
    record = Record()
    do(record, stamp(3, 2))
    with pytest.raises(StepFailed, match="exchange 1 of round 3 came after exchange 2"):
        do(record, stamp(3, 1))
    assert value(record.start()[0]) == 1


def test_counters_of_a_failed_exchange_do_not_stay():
    record = Record()
    do(record, stamp(1, 1))
    _, counters = record.start()
    counters["steps"] = 99
    assert record.start()[1] == {"steps": 1}


class TestWhatIsExamined:
    def test_while_the_round_is_open_its_work(self):
        record = Record(base=state(5))
        do(record, stamp(3, accepted=2))
        assert value(record.current(stamp(3, 0, accepted=2))) == 6

    def test_before_a_round_the_work_that_was_accepted_else_the_base(self):
        record = Record(base=state(5))
        do(record, stamp(3, accepted=2))
        assert value(record.current(stamp(4, 0, accepted=3))) == 6
        assert value(record.current(stamp(4, 0, accepted=2))) == 5
        assert value(record.current(stamp(3, 0, accepted=2, attempt=2))) == 5

    def test_a_client_that_was_never_touched(self):
        assert Record().current(stamp(1, 0)) is None

    def test_looking_changes_nothing(self):
        record = Record(base=state(5))
        do(record, stamp(3, accepted=2))
        work = record.work
        record.current(stamp(4, 0, accepted=2))
        assert record.work is work


class Shelf(dict):
    """Records in a dictionary."""

    def record(self, client):
        return self.setdefault(client, Record())

    def peek(self, client):
        return self.get(client)


def request(at):
    return Request("7", ("train",), Message(), at)


def finished(value_):
    return Done(Answer("7", Message(), Report(steps=1)), state(value_), {"steps": 1})


class TestOpeningAndStoring:
    def test_a_request_starts_from_the_record_and_what_was_done_is_stored(self):
        shelf = Shelf()
        errand = opened(shelf, request(stamp(1)))
        assert (errand.state, errand.counters, errand.first) == (None, {}, True)
        done = finished(1)
        assert stored(shelf, errand.request, done) is done
        again = opened(shelf, request(stamp(1, 2)))
        assert (value(again.state), again.counters, again.first) == (1, {"steps": 1}, False)

    def test_a_request_that_was_done_gives_its_answer(self):
        shelf, done = Shelf(), finished(1)
        stored(shelf, request(stamp(1)), done)
        assert opened(shelf, request(stamp(1))) is done.answer

    def test_what_was_stored_belongs_to_the_server_of_that_start(self):
        shelf, at = Shelf(), Stamp("experiment", 1, 1, 1, 0, incarnation=1)
        stored(shelf, request(at), finished(1))
        assert value(opened(shelf, request(replace(at, exchange=2))).state) == 1
        assert opened(shelf, request(replace(at, incarnation=2))).state is None

    def test_an_examination_leaves_no_record(self):
        shelf, examination = Shelf(), Examination("7", None, stamp(1), ("model",))
        errand = opened(shelf, examination)
        assert (errand.state, errand.counters) == (None, {})
        stored(shelf, examination, Done(Answer("7", Message(), Report())))
        assert not shelf


class Federation(RuleBasedStateMachine):
    """A server that repeats requests, tries rounds again and takes only some of them.

    The client is right if, whenever it starts an exchange, it stands where the accepted rounds and this attempt's
    earlier exchanges have brought it. `told`: an engine at hand settles every round at once; a client far away
    learns it from the next stamp.
    """

    def __init__(self):
        super().__init__()
        self.record = Record()
        self.round, self.attempt, self.exchange, self.accepted = 1, 1, 0, 0
        self.expected_base, self.expected_work = 0, 0
        self.last = None

    @initialize(told=st.booleans())
    def choose(self, told):
        self.told = told

    def now(self):
        return stamp(self.round, self.exchange, self.accepted, self.attempt)

    @rule(gap=st.integers(1, 2), add=st.integers(1, 9))
    def ask(self, gap, add):
        """Exchanges a client is not asked in leave gaps in their numbers."""
        self.exchange += gap
        self.last = do(self.record, self.now(), add)
        self.expected_work += add
        assert self.last.up["w"].item() == self.expected_base + self.expected_work

    @precondition(lambda self: self.last is not None)
    @rule()
    def ask_again(self):
        assert do(self.record, self.now(), add=1000) is self.last

    @rule()
    def try_the_round_again(self):
        self.attempt, self.exchange, self.last, self.expected_work = self.attempt + 1, 0, None, 0

    @rule(taken=st.booleans())
    def end_the_round(self, taken):
        if taken and self.exchange:
            self.expected_base += self.expected_work
            self.accepted = self.round
        if self.told:
            self.record.settle(self.accepted if taken else -1)
        self.round, self.attempt, self.exchange = self.round + 1, 1, 0
        self.last, self.expected_work = None, 0

    @invariant()
    def what_is_examined_is_right(self):
        found = value(self.record.current(self.now()))
        assert (found or 0) == self.expected_base + self.expected_work


TestFederation = Federation.TestCase
TestFederation.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)
