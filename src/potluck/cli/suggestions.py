"""What is said about a command or an option that does not exist, and about an option that is given twice.

Also the help of arguments, which a combination of typer and click would leave out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from typer.core import TyperCommand, TyperGroup, TyperOption


class Commands(TyperGroup):
    """All commands; an unknown one is answered with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Typer names the nearest command in the sentence; click from 8.4 on would add it once more."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if "Did you mean" in getattr(error, "message", ""):
                error.possibilities = None  # type: ignore[attr-defined]
            raise


class Command(TyperCommand):
    """One command; for an unknown option that is a key of the experiment, the key is named.

    An option that takes one value is given once: otherwise the last would win without a word.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """A command whose arguments have their help: click from 8.5 on forgets what typer up to 0.20 tells it."""
        super().__init__(*args, **options)
        told = _help_by_name(inspect.unwrap(self.callback)) if self.callback is not None else {}
        one: Any
        for one in self.params:
            one.help = getattr(one, "help", None) or told.get(one.name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments."""
        try:
            self._refuse_twice(ctx, args)
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None)
            instead = self._instead(option) if option and hasattr(error, "possibilities") else None
            if instead is not None:
                error.message = f"No such option '{option}'; write {instead}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise

    def _refuse_twice(self, ctx: Any, args: list[str]) -> None:
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        options = [one for one in given if isinstance(one, TyperOption) and not one.multiple]
        for one in options:
            says_one_thing = one.is_flag and not one.secondary_opts
            if options.count(one) > 1 and not says_one_thing:
                ctx.fail(f"{one.opts[0]} is given twice, and only one would count: give it once.")

    def _instead(self, option: str) -> str | None:
        """What to write in place of an option: the same one in the plural, or a key of the experiment."""
        if any(f"{option}s" in one.opts for one in self.params):
            return f"{option}s"
        if not any(one.name == "overrides" for one in self.params):
            return None
        if option == "--plugin":
            return "plugins=[FILE.py]"
        key = key_named(option)
        return f"{key}=VALUE" if key is not None else None


def _help_by_name(command: Callable[..., Any]) -> dict[str, str]:
    """What the annotations of a command say about its arguments and options."""
    hints = get_type_hints(command, include_extras=True).items()
    return {name: note.help for name, hint in hints for note in get_args(hint)[1:] if hasattr(note, "help")}


def key_named(option: str) -> str | None:
    """The key of an experiment that an option such as `--rounds` or `--batch-size` may stand for."""
    from potluck.experiment import Experiment

    return _found(Experiment, option.lstrip("-").replace("-", "_"))


def _found(block: Any, leaf: str, above: str = "") -> str | None:
    """The first dotted key that ends in `leaf`, those of the block itself before those of blocks inside."""
    if leaf in block.model_fields:
        return f"{above}{leaf}"
    inner = ((name, field.annotation) for name, field in block.model_fields.items())
    blocks = ((name, kind) for name, kind in inner if hasattr(kind, "model_fields"))
    keys = (_found(kind, leaf, f"{above}{name}.") for name, kind in blocks)
    return next((key for key in keys if key is not None), None)
