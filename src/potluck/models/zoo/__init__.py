"""The named models, one file per family; importing one registers its models."""

from potluck.models.zoo import (  # noqa: F401
    cnn,
    dense,
    efficientnet,
    googlenet,
    hf,
    mobilenet,
    pairs,
    resnet,
    small,
    text,
    transformer,
)
