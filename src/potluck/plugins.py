"""The user's own code: plugin files and modules, and functions that an experiment or a site names."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from potluck.errors import ConfigError, PotluckError, kind_and_message
from potluck.files import read_bounded

LARGEST_CODE = 2 << 20  # bytes of a file that is only looked at

_PREFIX = (
    "potluck_plugin:"  # in sys.modules, before the full path: files of one name in two folders stay apart
)


class _Uncached(SourceFileLoader):
    """Compiles the file each time: no `__pycache__` in the user's folder, and no edit is missed."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load_plugin(name: str, folder: Path) -> ModuleType:
    """Import a module by name, or a file by its path, so that what it registers can be used."""
    is_file = (folder / name).is_file()
    if name.endswith(".py") and not is_file:
        raise ConfigError(f"plugins: there is no file {folder / name}; check the path")
    if not name.strip() or (is_file and not name.endswith(".py")):
        raise ConfigError(f"plugins: {name!r} is no Python file; name a .py file, or a module")
    try:
        return _import_file(folder / name) if is_file else _import_module(name, folder)
    except ModuleNotFoundError as error:
        beside = error.name == name and (folder / f"{name}.py").is_file()
        hint = f"; did you mean {name}.py?" if beside else ""
        raise ConfigError(f"plugins: {name} cannot be loaded: {_reason(error)}{hint}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code may raise anything
        raise ConfigError(f"plugins: {name} cannot be loaded: {_reason(error)}; fix the file") from error


def _import_module(name: str, folder: Path) -> ModuleType:
    """Import a module by its name; Python would also import any folder, to no effect."""
    if name.startswith((".", "/")) and (folder / name).is_dir():
        raise ConfigError("it is a folder; name a .py file")
    module = importlib.import_module(name)
    if getattr(module, "__file__", None) is None and hasattr(module, "__path__"):
        del sys.modules[name]
        raise ConfigError("it is a folder; name a .py file")
    return module


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"there is no file {error.filename}"
    if isinstance(error, SystemExit):
        return "it calls sys.exit; take that out, or keep it below: if __name__ == '__main__'"
    if isinstance(error, PotluckError):
        return str(error)
    return kind_and_message(error)


def listed(plugins: Any, wanted: str = "a list of files or modules, such as ['mine.py']") -> list[str]:
    """Plugins as a run folder names them, files by their whole paths; one may be given without a list."""
    names = [plugins] if isinstance(plugins, str | Path) else plugins
    if not isinstance(names, list | tuple) or not all(isinstance(one, str | Path) for one in names):
        raise ConfigError(f"plugins: give {wanted}, not {plugins!r}")
    return [str(Path(one).resolve()) if str(one).endswith(".py") else str(one) for one in names]


def module_name(plugin: str) -> str:
    """The name in `sys.modules` of a plugin: a module, or a file by its path."""
    return f"{_PREFIX}{Path(plugin).resolve()}" if plugin.endswith(".py") else plugin


def is_plugin_file(module: str) -> bool:
    """Whether a module is a plugin that was loaded from a file."""
    return module.startswith(_PREFIX)


def _import_file(file: Path) -> ModuleType:
    """Import a Python file; in one process it is run once.

    A file that was edited since is refused: its old code would run under the name of the new one.
    """
    key = module_name(str(file))
    if key in sys.modules:
        if _loaded_texts.get(key) not in (None, _texts(file)):
            raise ConfigError(
                "it, or a file that it imports, was edited after this process loaded it; start a new process (in a "
                "notebook: restart the kernel)"
            )
        sys.modules[key] = sys.modules.pop(key)  # `find_function` takes the file that was asked for last
        return sys.modules[key]
    texts = _texts(file)
    spec = spec_from_loader(key, _Uncached(key, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[key] = module_from_spec(spec)
    try:
        with _importable(file.resolve().parent):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(key, None)
        raise
    _loaded_texts[key] = texts
    return module


_loaded_texts: dict[str, str] = {}  # of a plugin file in sys.modules: a hash of what was loaded


def _texts(file: Path) -> str:
    """A hash of a file and of the files that it imports from its own folder."""
    files = (file, *imported_beside(file))
    return hashlib.sha256(b"".join(hashlib.sha256(one.read_bytes()).digest() for one in files)).hexdigest()


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """While a file is loaded it may import the files beside it, as a script may.

    A module that an earlier file imported from another folder is forgotten, so that each gets its own.
    """
    for name in [name for name, home in _beside.items() if home != folder]:
        del _beside[name]
        sys.modules.pop(name, None)
    known, writes = set(sys.modules), sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = writes
        _beside.update((name, folder) for name in set(sys.modules) - known if _is_in(name, folder))


_beside: dict[str, Path] = {}  # modules that plugin files imported from their own folder


def _is_in(name: str, folder: Path) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return not name.startswith(_PREFIX) and file is not None and folder in Path(file).resolve().parents


def imported_beside(file: Path, packages: bool = True) -> list[Path]:
    """The Python files that a file imports from its own folder or package, and what these import; none is run.

    Installed packages, and potluck itself, are known by their versions. Without `packages` only modules that lie in
    the folder itself are found, as earlier versions did.
    """
    look = _places if packages and not _is_installed(file) else _place_beside
    found: list[Path] = []
    waiting = [file]
    while waiting:
        importer = waiting.pop()
        for name, dots in _imports(importer):
            for path in look(name, dots, importer, file):
                if _is_file(path) and path not in (file, *found):
                    found.append(path)
                    waiting.append(path)
    return sorted(found)


def _is_installed(file: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    return library in file.parents or bool({"site-packages", "dist-packages"} & {*file.parts})


def _is_file(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a name that no file can have
        return path.is_file()
    return False


def _place_beside(name: str, dots: int, importer: Path, file: Path) -> Iterator[Path]:
    """Where a module lies if it is in the folder itself."""
    if not dots:
        yield file.parent / f"{name.partition('.')[0]}.py"


def _places(name: str, dots: int, importer: Path, file: Path) -> Iterator[Path]:
    """Where a module and the packages that it is in may lie; `dots` are those before its name."""
    words = name.split(".")
    if dots:
        homes = [*importer.parents][dots - 1 : dots]
        yield from (home / "__init__.py" for home in homes)
    else:
        own = [one.parent for one in file.parents if one.name == words[0] and (one / "__init__.py").is_file()]
        homes = [file.parent, *own] if words[0] != "potluck" else []
    for home in homes:
        for word in words:
            yield home / f"{word}.py"
            home = home / word
            yield home / "__init__.py"


def _imports(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, and every name from one, as it may be a module; each with its dots."""
    try:
        tree = ast.parse(read_bounded(file, LARGEST_CODE))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # whoever loads it will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, 0) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = f"{node.module}." if node.module else ""
            yield from ((home + one.name, node.level) for one in node.names)


def split_name(text: str) -> tuple[str, str]:
    """The home of a function (a file, module or library; empty: none) and its name there.

    Whoever checks such a text and whoever uses it must read it alike: both read it here.

    >>> split_name("rules.py:fade"), split_name("fade"), split_name("a:b.py:fade")
    (('rules.py', 'fade'), ('', 'fade'), ('a:b.py', 'fade'))
    """
    home, _, key = text.rpartition(":")
    return home, key


def home_of(text: str) -> str | None:
    """The file or module that the functions below import for a text; None if it names no function.

    What may be somebody else's code is asked for by this very rule before anything is imported.

    >>> home_of("rules.py:fade"), home_of("rules:fade"), home_of("fade")
    ('rules.py', 'rules', None)
    """
    home, key = split_name(text)
    return home if home and (key or home.endswith(".py")) else None


def load_function(name: str) -> Callable[..., Any]:
    """The function behind `file.py:function` or `module:function`."""
    home, key = split_name(name)
    if not home.endswith(".py"):
        return find_function(name)
    try:
        module = _import_file(Path(home))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code may raise anything
        raise ConfigError(f"{home} cannot be loaded: {_reason(error)}; fix the file") from error
    return _function(module, key, name, home)


def find_function(name: str) -> Callable[..., Any]:
    """The function behind `module:function`; a loaded plugin file is named without `.py`."""
    home = home_of(name)
    if home is None or home.endswith(".py"):
        raise ConfigError(f"{name!r} names no function; write module:function")
    return _function(_find_module(home), name.removeprefix(f"{home}:"), name, home)


def _find_module(name: str) -> ModuleType:
    files = [key for key in sys.modules if key.startswith(_PREFIX) and Path(key).stem == name]
    if files:
        return sys.modules[files[-1]]
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code may raise anything
        raise ConfigError(
            f"{name} cannot be imported ({type(error).__name__}: {error}); name its file under plugins"
        ) from error


def _function(module: ModuleType, key: str, name: str, home: str) -> Callable[..., Any]:
    function = getattr(module, key, None)
    if not callable(function):
        raise ConfigError(f"{name!r}: there is no function {key!r} in {home}; check the name")
    found: Callable[..., Any] = function
    return found
