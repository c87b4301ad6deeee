"""Networks of the Hugging Face libraries: settings, weights and LoRA.

Nothing of the libraries is imported before such a network is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from potluck.errors import ModelError, first_line
from potluck.hub import folder_of, library, loaded

# What the families, in several versions of the library, call the layers for queries and values.
LORA_TARGETS = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin")
WORD = re.compile(r"\w[\w.+-]*")  # such as an activation; the hub's repositories have a slash


def check_options(config: object, lora: object) -> None:
    """Refuse options of a wrong type, in one sentence."""
    if config is not None and not isinstance(config, Mapping):
        raise ModelError(f"config is {config!r}; give settings of the network and their values")
    if not isinstance(lora, int) or isinstance(lora, bool) or lora < 0:
        raise ModelError(f"lora is {lora!r}; give a rank, a whole number, or 0 for none")


def network_settings(family: str, weights: str | None, config: Mapping[str, Any] | None) -> Any:
    """The library's configuration of a network: that of the weights, or the family's with some values changed."""
    transformers = library("transformers")
    if weights is None:
        known = transformers.AutoConfig.for_model(family)
        for name, value in (config or {}).items():
            if str(name).startswith("_") or not hasattr(known, str(name)):
                raise ModelError(f"config: {family} has no setting {name!r}; leave it out")
            _check_setting(name, value, getattr(known, name))
        return _made(transformers.AutoConfig.for_model, family, **(config or {}))
    if config is not None:
        raise ModelError(
            "config is for networks without weights, as weights bring their own; leave out one of them"
        )
    folder = folder_of(weights)
    if folder is not None and not (folder / "config.json").is_file():
        raise ModelError(f"the folder {folder} has no config.json; give a folder that save_pretrained wrote")
    settings = loaded(transformers.AutoConfig.from_pretrained, weights)
    if settings.model_type != family:
        raise ModelError(
            f"the weights {weights} are those of a {settings.model_type}; give those of a {family}"
        )
    settings._attn_implementation = None  # its config.json may name code of the hub
    return settings


def _check_setting(name: str, value: Any, usual: Any) -> None:
    """Refuse all but numbers, and plain words where the library has a word: others can name code of the hub."""
    values = value if isinstance(value, list | tuple) else [value]
    if isinstance(usual, str):
        fits = isinstance(value, str) and WORD.fullmatch(value) is not None
    else:
        fits = all(one is None or isinstance(one, int | float) for one in values)
    if not fits:
        raise ModelError(f"config: {name} is {value!r}; give a value such as {usual!r}")


def _made(make: Any, *given: Any, **settings: Any) -> Any:
    """Call the library with settings of the user; what it says of them becomes one sentence."""
    try:
        return make(*given, **settings)
    except Exception as error:  # of many kinds, some of them the library's own
        raise ModelError(f"config: {first_line(error)}; correct that setting") from error


def make_network(settings: Any, weights: str | None) -> nn.Module:
    """The network without a pooling layer on top."""
    auto = library("transformers").AutoModel
    if weights is None:
        network: nn.Module = _made(auto.from_config, settings)
    else:
        network = loaded(auto.from_pretrained, weights, config=settings, use_safetensors=True)
    if getattr(network, "pooler", None) is not None:
        network.pooler = None  # type: ignore[assignment]
    return network.float()


def add_lora(network: nn.Module, rank: int) -> None:
    """Add LoRA to queries and values, and freeze everything else."""
    peft = library("peft")
    names = {name.rpartition(".")[2] for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    targets = sorted(names & set(LORA_TARGETS))
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), network)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name)


def network_width(settings: Any) -> int:
    """The width of the last hidden states; SegFormer has one width per stage."""
    widths = getattr(settings, "hidden_sizes", None)
    return int(widths[-1] if widths else settings.hidden_size)
