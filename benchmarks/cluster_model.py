"""How long a round takes on a Ray cluster, on paper: states, messages and balance.

    python benchmarks/cluster_model.py                   8 and 64 GPUs, with figures measured on one machine

Every client of a round costs its home `seconds` of training and `at_home` seconds to pack and unpack what travels.
It costs the driver `at_driver` seconds, which is one process and takes one reply at a time. Both costs are a
constant and a rate per byte that comes back (the state, and what goes up). Homes on CPUs send each reply when it is
there, so the driver takes replies while others train; homes on GPUs play their share side by side and send it then.
`benchmarks/cluster.py --only model` compares these functions with rounds of up to eight imitated homes.
"""

from __future__ import annotations

from dataclasses import dataclass

from potluck.engine.ray.balance import shared_out


@dataclass(frozen=True)
class Cost:
    """Seconds that a reply takes: a constant, and a part for each byte."""

    constant: float
    per_byte: float

    def of(self, size: float) -> float:
        return self.constant + self.per_byte * size

    @classmethod
    def through(cls, one: tuple[float, float], other: tuple[float, float]) -> Cost:
        """The line through two measurements of bytes and seconds."""
        rate = (other[1] - one[1]) / (other[0] - one[0])
        return cls(max(one[1] - rate * one[0], 0.0), rate)


@dataclass(frozen=True)
class Cluster:
    """What a cluster costs; `network` is what the driver's machine takes in, in bytes per second."""

    homes: int
    at_driver: Cost
    at_home: Cost
    network: float = 2.5e9
    at_once: bool = True  # homes send their replies when their whole share is done, as on a GPU
    cores: float = float("inf")  # that the driver and all homes share; imitated machines have few

    def round_seconds(self, seconds: list[float], size: float) -> float:
        """A round of clients that train for so long and send so many bytes back."""
        shares = shared_out(
            range(len(seconds)), range(self.homes), lambda one: seconds[one], lambda one: None
        )
        trained = max(sum(seconds[one] for one in share) for share in shares.values())
        most = max(map(len, shares.values()))
        taken = len(seconds) * max(self.at_driver.of(size), size / self.network)
        packed = most * self.at_home.of(size)
        first = min(seconds) + self.at_home.of(size)
        if self.at_once:
            spread = trained + max(packed + self.at_driver.of(size), taken)
        else:
            last = min(self.homes, len(seconds)) * self.at_driver.of(size)
            spread = max(trained + packed + last, taken + first)
        return max(spread, len(seconds) * (self.at_driver.of(size) + self.at_home.of(size)) / self.cores)

    def on_one(self, seconds: list[float]) -> float:
        """The same round on one device, without a cluster."""
        return sum(seconds)


# Seconds of a driver and of a home for a reply, measured on imitated machines (docs/cluster.md).
AT_DRIVER = Cost(2.0e-3, 1.75e-9)
AT_HOME = Cost(2.4e-3, 1.6e-9)

# Bytes back from a client, and the seconds of one H200 for it in a full round, per epoch of 500 samples
# (docs/performance.md).
WORK = {
    "CNN, FedMRL": (7.0e6, 0.0021),
    "ResNet-18, prototypes": (45e6, 0.010),
    "ResNet-18, whole models": (90e6, 0.010),
}
EPOCHS = (1, 100, 2000)  # of 500 samples: 500, 50,000 and a million samples in a round
CLIENTS = 1000


def main() -> None:
    print(f"{CLIENTS} clients in a round, seconds on one GPU and on a cluster")
    print(f"{'client':26}{'samples':>12}{'one GPU':>12}{'8 GPUs':>12}{'64 GPUs':>12}")
    for name, (size, seconds) in WORK.items():
        for epochs in EPOCHS:
            each = [seconds * epochs] * CLIENTS
            cells = [Cluster(1, AT_DRIVER, AT_HOME).on_one(each)]
            cells += [Cluster(homes, AT_DRIVER, AT_HOME).round_seconds(each, size) for homes in (8, 64)]
            print(f"{name:26}{epochs * 500:12,}" + "".join(f"{cell:12,.1f}" for cell in cells))


if __name__ == "__main__":
    main()
