"""Bounds on what a server may ask of a site, checked before data are loaded, models built or threads started.

They are far above what experiments need. Inside them a site may still be asked for much work; beyond them its
process would end, or be busy for days, whatever it has agreed to send.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from potluck.core.modest import MOST_WIDTH
from potluck.core.plain_values import printable
from potluck.deploy.wire import SAME_VERSION, Order
from potluck.engine.protocol import Request
from potluck.errors import ConfigError, StepFailed
from potluck.files import is_shallow

SENT = ("name", "method", "models", "training", "seed", "seeds")  # of the experiment, as a client needs it
TOLD = {
    "the welcome": ("potluck", "run", "experiment"),
    "experiment": (*SENT, "data", "engine", "partition", "metrics", "public"),
}
MOST_CLASSES = 1 << 18
MOST_SITES = 10_000
MOST_ROUNDS = 100_000
MOST_EPOCHS = 10_000
MOST_BATCH = 1 << 20
MOST_SEEN = 10**9  # samples a client trains on in a round, all epochs together
MOST_OPTION = 10**6  # any other number of an option: steps, samples
MOST_PIXELS = 1024  # any number of an augmentation
MOST_METRICS = 100
MOST_EXCHANGES = 100  # with one client in one attempt at a round
MOST_MODELS = 64  # different ones in `models.pool`
MOST_TENSORS = 50_000  # of all models that are built or copied while a site joins
LONGEST_TEXT = 1000  # letters of a name or a text; no list has more entries than there are sites
MOST_LISTED = 32  # steps or ways of measuring in one order
MOST_COUNTED = 10**9  # rounds, attempts, exchanges
MOST_STARTS = 10**15  # the number of a server's start, which comes from its clock
MOST_RUNS = 1000  # of which a site keeps records
PASSES = re.compile(r"(epochs|passes)$")  # options that count passes over data: all are drawn at once
FREE = re.compile(r"seed|memory")  # options that count neither work nor sizes
RUN = re.compile(r"[0-9A-Za-z]{1,64}")
NO_RUN = "what the server calls its run is no name of a run (1 to 64 letters and digits); give it one"
WORD = re.compile(r"\w[\w.+-]*")  # a text of an option: no path, module or repository
WEIGHTS = "weights"  # the option of a model that names a file, or a repository of the hub
TAKEN = {"data": ("augment",), "engine": ("threads", "precision"), "public": ("data", "samples")}


def check_welcome(offer: Any) -> None:
    """Refuse a welcome that is malformed, or asks for more than any experiment needs; types before values."""
    told = _block(offer, "the welcome")
    if not isinstance(told.get("run"), str) or not RUN.fullmatch(told["run"]):
        raise ConfigError(NO_RUN)
    values = _block(told.get("experiment"), "experiment")
    for where, block in (("the welcome", told), ("experiment", values)):
        _refuse_others(where, block, TOLD[where])
    if not is_shallow(values):
        raise ConfigError(f"the server's welcome cannot be read: it is nested too deeply; {SAME_VERSION}")
    _check_lengths(values, "experiment")
    blocks = {
        name: _block(values.get(name), name) for name in ("method", "training", "engine", "partition", "data")
    }
    models = _block(values.get("models", {}), "models")
    _most("engine.threads", blocks["engine"].get("threads"), max(64, 2 * (os.cpu_count() or 1)))
    _most("partition.classes", blocks["partition"].get("classes"), MOST_CLASSES)
    _long("partition.sites", blocks["partition"].get("sites"), MOST_SITES)
    _long("metrics", values.get("metrics", []), MOST_METRICS)
    _most("training.rounds", blocks["training"].get("rounds"), MOST_ROUNDS)
    if type(blocks["training"].get("rounds")) is not int:
        raise ConfigError(
            f"the server's welcome cannot be read: training.rounds must be a whole number; {SAME_VERSION}"
        )
    _check_training("training", blocks["training"])
    for client, own in _block(blocks["training"].get("per_client", {}), "training.per_client").items():
        _check_training(f"training.per_client.{client}", _block(own, f"training.per_client.{client}"))
    for where, block, most in (
        ("method", blocks["method"], MOST_OPTION),
        ("models", models, MOST_WIDTH),
        ("data", blocks["data"], MOST_PIXELS),
        ("public", values.get("public") or {}, MOST_OPTION),
    ):
        for key, number in _numbers(block, where):
            _most(key, number, MOST_EPOCHS if PASSES.search(key) else most)
    _check_taken(values)
    for where, inner in (*_inside(blocks["method"], "method"), ("models", models)):
        check_weights(inner, where)
    for where, block in (*blocks.items(), ("models", models)):
        if where != "partition":  # the names of clients are free
            check_words(block, where)


def check_words(value: Any, where: str) -> None:
    """Refuse a text that could name code, a file or a place elsewhere: a site loads nothing that a server names."""
    if isinstance(value, str) and ":" in value:
        raise ConfigError(
            f"the server's options name the function {value!r}; a site runs no code but its own: "
            "ask for an option without a function"
        )
    if isinstance(value, str) and not WORD.fullmatch(value):
        raise ConfigError(
            f"{where} is no plain word (letters, digits and . _ + -); a site takes no path and no repository from "
            "a server: ask for a plain name"
        )
    for key, inner in _inside(value, where):
        check_words(inner, key)


def check_weights(value: Any, where: str) -> None:
    """Refuse a model with weights from a file or the hub."""
    if isinstance(value, Mapping) and value.get(WEIGHTS) is not None:
        raise ConfigError(
            f"{where}.{WEIGHTS}: a site reads no file and fetches nothing that a server names; leave it out"
        )
    for key, inner in _inside(value, where):
        check_weights(inner, key)


def check_models(count: int) -> None:
    """Refuse a pool of more models than any experiment has; each may be built to learn its size."""
    if count > MOST_MODELS:
        raise ConfigError(
            f"the server's models.pool has {count:,} different models; this site goes up to "
            f"{MOST_MODELS}: ask for fewer"
        )


def check_work(epochs: int, samples: int) -> None:
    """Refuse a round in which a client would train on too many samples; its own number is known by now."""
    if epochs * samples > MOST_SEEN:
        raise ConfigError(
            f"training.epochs: {epochs:,} times this client's samples are more than {MOST_SEEN:,} in a round; "
            "ask for fewer epochs"
        )


def check_repeats(repeats: Mapping[str, int]) -> None:
    """Refuse a method that would ask for a step more often in a round than any record takes."""
    for step, times in repeats.items():
        if times > MOST_EXCHANGES:
            raise ConfigError(
                f"the method would ask for {step} {_short(times)} times in a round; this site goes up to "
                f"{MOST_EXCHANGES}: ask for larger public batches or fewer passes"
            )


def check_order(order: Order) -> None:
    """Refuse an order with more parts than any method has, or with numbers that count nothing."""
    stamp = getattr(order, "stamp", None)
    counted = (stamp.round, stamp.attempt, stamp.exchange) if stamp is not None else (0,)
    if max(map(abs, counted)) > MOST_COUNTED:
        raise StepFailed(
            f"an order counts rounds, attempts or exchanges beyond {MOST_COUNTED:,}; {SAME_VERSION}"
        )
    if stamp is not None and abs(stamp.incarnation) > MOST_STARTS:
        raise StepFailed(
            f"an order is of a start of the server numbered beyond {MOST_STARTS:,}; {SAME_VERSION}"
        )
    if isinstance(order, Request):
        if len(order.steps) > MOST_LISTED or not isinstance(order.purpose, str) or len(order.purpose) > 100:
            raise StepFailed(f"an order names {len(order.steps):,} steps; name at most {MOST_LISTED}")
        return
    modes, metrics = (getattr(order, name, ()) for name in ("modes", "metrics"))
    if len(modes) > MOST_LISTED or len(metrics) > MOST_METRICS:
        raise StepFailed(
            f"an order asks for {len(modes):,} measurements with {len(metrics):,} metrics; ask for at most "
            f"{MOST_LISTED} with {MOST_METRICS}"
        )


def _check_training(where: str, values: Mapping[str, Any]) -> None:
    _most(f"{where}.epochs", values.get("epochs"), MOST_EPOCHS)
    _most(f"{where}.batch_size", values.get("batch_size"), MOST_BATCH)


def _block(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"the server's welcome cannot be read: {where} must be a block of keys with values; {SAME_VERSION}"
        )
    return value


def _most(where: str, value: Any, most: int) -> None:
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return  # its type is checked with the experiment
    if not -most <= value <= most:
        raise ConfigError(
            f"the server asks for {where}: {_short(value)}; this site goes up to {most:,}: ask for less"
        )


def _long(where: str, value: Any, most: int) -> None:
    if isinstance(value, list | tuple) and len(value) > most:
        raise ConfigError(
            f"the server names {len(value):,} {where}; this site goes up to {most:,}: ask for less"
        )


def _check_lengths(value: Any, where: str) -> None:
    """Refuse a text, list or block that is longer than any experiment has, wherever it stands."""
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ConfigError(
            f"the server's {where} has {len(value):,} letters; this site reads {LONGEST_TEXT:,}: "
            "ask for a shorter one"
        )
    if isinstance(value, Mapping | list):
        _long(f"entries in {where}", [*value], MOST_SITES)
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_lengths(key, f"name in {where}")
            _check_lengths(inner, f"{where}.{key}")


def _check_taken(values: Mapping[str, Any]) -> None:
    """Refuse keys beyond those that a site takes: data, devices and trackers are its own."""
    taken = [(where, values.get(where) or {}, known) for where, known in TAKEN.items()]
    taken.append(("public.data", _block(values.get("public") or {}, "public").get("data") or {}, ("name",)))
    for where, block, known in taken:
        _refuse_others(where, _block(block, where), known)


def _refuse_others(where: str, block: Mapping[str, Any], known: Sequence[str]) -> None:
    other = next((key for key in block if key not in known), None)
    if other is not None:
        place = other if where == "the welcome" else f"{where}.{other}"
        raise ConfigError(
            f"the server's welcome names {printable(place, 200)}, which a site takes from no server; "
            "ask for a welcome without it"
        )


def _inside(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The values in a block or list, by their full keys."""
    if isinstance(value, Mapping):
        yield from ((f"{where}.{key}", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((where, inner) for inner in value)


def _numbers(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """The numbers of a block that count work or sizes, by their full keys."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not FREE.search(str(key)):
                yield from _numbers(inner, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, where)
    else:
        yield where, value


def _short(value: float) -> str:
    text = (
        f"{value:,}"
        if abs(value) < 10**18
        else f"{value:.0e}"
        if isinstance(value, float)
        else "a huge number"
    )
    return text
