"""The front door: calls from outside are checked against the signature that they meet.

A function under `@front_door()` refuses arguments that it does not have, and values of another kind than their
annotation names. What an annotation leaves open (lists, mappings, functions, choices) the function itself looks at,
as it can say more about it. `sys.exit` in code of the user's meanwhile would end the whole program, and
becomes a sentence that names the place.
"""

from __future__ import annotations

import functools
import inspect
import site
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import FrameType, NoneType, SimpleNamespace, TracebackType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from potluck.errors import ConfigError, PotluckError, RunError, nearest
from potluck.plugins import is_plugin_file

P = ParamSpec("P")
R = TypeVar("R")
LIBRARY = Path(__file__).parent
_NUMBERS: dict[Any, type] = {
    int: Integral,
    float: Real,
}  # True and False, which Python counts as both, are neither
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", Path: "a path"}
_SHOWN = 100  # characters of a wrong value


class OwnExit(SystemExit):
    """`sys.exit` in code of the user's, as another process tells of it: `place` says where."""

    def __init__(self, place: str) -> None:
        super().__init__(1)
        self.place = place


def front_door(
    error: type[PotluckError] = ConfigError,
    apart: Iterable[str] = (),
    other: Callable[..., str | None] = lambda *args, **values: None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that users call: a wrong call is one sentence, an `error`.

    The arguments that stand `apart` are left to the function, which can say more about them. `other` gets all
    arguments first, and says what to call instead if another function is meant.
    """

    def guard(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **values: P.kwargs) -> R:
            if instead := other(*args, **values):
                raise error(instead)
            try:
                given = signature.bind(*args, **values).arguments
            except TypeError as misfit:
                raise error(about_call(function, signature, misfit, values)) from None
            _check({name: given[name] for name in given if name not in apart}, _hints(function), error)
            try:
                return function(*args, **values)
            except SystemExit as end:
                raise _explained(end) from end

        return call

    return guard


# --- the signature --------------------------------------------------------------------------------------


def about_call(
    function: Callable[..., Any], signature: inspect.Signature, misfit: TypeError, values: Mapping[str, Any]
) -> str:
    """What is wrong with a call, and the argument that may be meant, or all there are."""
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    known = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    names = [one.name for one in known]
    stray = next((name for name in values if name not in names), None)
    if stray is not None and str(misfit).startswith("got an unexpected"):
        return f"{called}() has no argument {stray!r}; {nearest(stray, names)}"
    shown = ", ".join(map(_shown_parameter, known))
    return f"{called}(): {misfit}; it is called as {called}({shown})"


def _shown_parameter(one: inspect.Parameter) -> str:
    if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
        return f"**{one.name}" if one.kind is one.VAR_KEYWORD else f"*{one.name}"
    return one.name if one.kind is not one.KEYWORD_ONLY else f"{one.name}=…"


# --- the kinds of values --------------------------------------------------------------------------------


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The kinds of the arguments; what is returned may be of a library that is not loaded yet."""
    arguments = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=arguments), inspect.unwrap(function).__globals__)


def _check(given: Mapping[str, Any], hints: Mapping[str, Any], error: type[PotluckError]) -> None:
    for name, value in given.items():
        hint = hints.get(name, Any)
        if not fits(value, hint):
            kinds = " or ".join(dict.fromkeys(_words(hint)))
            raise error(f"{name}: give {kinds}, not {_shown(value)}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the kind that an annotation names; yes where that cannot be told."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if get_origin(hint) is tuple and inner[1:] == (...,):
        return isinstance(value, tuple) and all(fits(one, inner[0]) for one in value)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if hint is bool:
        return isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"  # numpy's own
    if hint is Any or not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return True
    return isinstance(value, hint)


def _words(hint: Any) -> Iterable[str]:
    """What to give, in words; that nothing is allowed, too, helps nobody."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        path = Path in inner
        for one in inner:
            yield from () if one is NoneType or (path and one is str) else _words(one)
    elif get_origin(hint) is tuple:
        yield "several in a tuple"
    else:
        name = getattr(hint, "__name__", str(hint))
        yield _WORDS.get(hint, f"an {name}" if name[:1] in "AEIOUaeiou" else f"a {name}")


def _shown(value: Any) -> str:
    """A value as a sentence shows it: by its kind, unless it is short."""
    plain = isinstance(value, str | int | float | bool | NoneType) or inspect.isclass(value)
    text = repr(value) if plain else ""
    kind = type(value).__name__
    return text if text and len(text) <= _SHOWN else f"an {kind}" if kind[:1] in "AEIOUaeiou" else f"a {kind}"


# --- the user's own code --------------------------------------------------------------------------------


def _explained(end: SystemExit) -> BaseException:
    """The sentence about code of the user's that would end the program; any other end stays as it is."""
    place = end.place if isinstance(end, OwnExit) else own_place(end.__traceback__)
    return end if place is None else RunError(about_exit(place))


def about_exit(place: str) -> str:
    """What is said of `sys.exit` in the user's own code."""
    return f"{place}: sys.exit ended the run in the middle; raise an error there, or take it out"


def own_place(trace: TracebackType | None) -> str | None:
    """The innermost place in code of the user's where an error passed; None if it met none."""
    found = None
    for frame, line in traceback.walk_tb(trace):
        if _is_own(frame):
            found = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return found


def _is_own(frame: FrameType) -> bool:
    """Whether a call is in a file that is neither this library's nor an installed one's, or typed at a prompt."""
    file, module = frame.f_globals.get("__file__"), frame.f_globals.get("__name__")
    if file is None:
        return module == "__main__" or is_plugin_file(str(module))
    return not is_installed(Path(file))


def is_installed(file: Path) -> bool:
    """Whether a file is one of this library's, of Python's or of an installed package's."""
    return any(folder in file.resolve().parents for folder in _installed())


@functools.cache
def _installed() -> tuple[Path, ...]:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return (LIBRARY, *(Path(place).resolve() for place in [*places, site.getusersitepackages()]))
