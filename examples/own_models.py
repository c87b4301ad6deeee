"""Your own arrays, your own modules, a method against Local: python examples/own_models.py."""

from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import potluck

ROUNDS = 15


class Gated(nn.Module):
    """A module with a plain forward; Potluck finds its last layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(13, 24), nn.Linear(13, 24)
        self.out = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.value(x) * self.gate(x).sigmoid())


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 3))


def main() -> None:
    x, y = load_wine(return_X_y=True)
    common = {
        "data": potluck.from_arrays(StandardScaler().fit_transform(x), y, name="wine"),
        "partition": {"kind": "iid", "clients": 4},
        # Classes and functions rather than modules, so that the weights come from the seed; the last one by name.
        "models": [Gated, deep, "mlp-small"],
        "training": {"rounds": ROUNDS, "batch_size": 8, "optimizer": {"lr": 0.05}},
    }
    for method in ("local", {"name": "fedmrl", "small": "mlp-small", "d1": 16}):
        result = potluck.run(**common, method=method, name="wine")
        print(result)
        print(result.summary["accuracy"]["per_client"])


if __name__ == "__main__":
    main()
