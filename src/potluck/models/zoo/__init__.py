"""The registered models, one file per family; importing a file registers its models."""

from potluck.models.zoo import (  # noqa: F401
    cnn,
    dense,
    efficientnet,
    exits,
    googlenet,
    hf,
    mobilenet,
    pairs,
    resnet,
    small,
    text,
    transformer,
    window,
)
