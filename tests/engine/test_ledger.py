"""The ledger: what was counted is what crossed."""

import torch

from potluck.core.message import Message
from potluck.engine.ledger import Ledger


def test_a_line_has_the_sizes_of_the_real_bytes():
    message = Message({"small": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, "counts": torch.zeros(4)})
    ledger = Ledger(5)
    ledger.add("7", "train", "up", "train", message)
    assert ledger.lines == [
        {
            "round": 5,
            "client": "7",
            "step": "train",
            "direction": "up",
            "purpose": "train",
            "scalars": 12,
            "bytes": len(message.encode()),
            "names": {"small": 8, "counts": 4},
        }
    ]


def test_an_empty_message_is_no_message():
    ledger = Ledger(1)
    ledger.add("7", "train", "down", "train", Message())
    assert ledger.lines == []
    ledger.add("7", "train", "down", "train", Message({"nothing": torch.zeros(0)}))
    assert [line["scalars"] for line in ledger.lines] == [0]
