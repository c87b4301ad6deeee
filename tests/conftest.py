"""One thread for every test (more are slower on small models, and change bits), one device, one terminal."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch

from potluck.core.rng import Rng

os.environ["POTLUCK_PROGRESS"] = "0"  # in processes that tests start too
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so nohup does
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Tiny runs give advice by nature; tests of advice ask for it."""
    config.addinivalue_line("filterwarnings", "ignore::potluck.errors.PotluckAdvice")


def pytest_collection_finish() -> None:
    """What the imports have made stays to the end: the garbage collector need not go through it every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_key(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The key that seals run folders is made for these tests, in processes they start too."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files outlive a killed process without it, and no test cuts the power; the waits take minutes in sum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def from_one_random_state() -> Iterator[None]:
    """A test that draws weights draws the same ones alone, in any order and on any machine."""
    with Rng(0).as_default():
        yield


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are compared on the CPU; only what is marked `cuda` sees a GPU, in processes it starts too."""
    if request.node.get_closest_marker("cuda") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def on_a_plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is compared: it must not follow the width and colours of the terminal the tests run in."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
