"""Python code by its name: `package.module:function`, or `file.py:function`. Only for names that the user typed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from anybit.common.text import did_you_mean, first_line
from anybit.errors import AnybitError, SpecError


def is_code(name: str) -> bool:
    """Tell whether a name is that of Python code.

    >>> is_code("paper.cifar10:load"), is_code("my_data.py:loaders"), is_code("digits"), is_code("C:/images")
    (True, True, False, False)
    """
    module, colon, attribute = name.rpartition(":")
    return bool(colon) and attribute.isidentifier() and (module.endswith(".py") or _dotted(module))


def _dotted(module: str) -> bool:
    return all(part.isidentifier() for part in module.split("."))


def by_name(name: str) -> Any:
    """Import a module, from the current folder too, or run a Python file, and return what it calls by that name.

    >>> by_name("math:sqrt")(9.0)
    3.0
    """
    module, _, attribute = name.rpartition(":")
    try:
        found = _from_file(Path(module)) if module.endswith(".py") else _imported(module)
    except ModuleNotFoundError as error:
        raise SpecError(f"{name}: there is no module {error.name!r} here; start from the folder that has it") from error
    except AnybitError:
        raise
    except Exception as error:
        raise SpecError(_own_error(name, error)) from error
    if not hasattr(found, attribute):
        hint = did_you_mean(attribute, vars(found))
        raise SpecError(f"{name}: {module} has no {attribute!r}{hint}")
    return getattr(found, attribute)


def called(name: str) -> Any:
    """Return what Python code makes when it is called without arguments; a value is returned as it is."""
    found = by_name(name)
    if not callable(found):
        return found
    try:
        return found()
    except AnybitError:
        raise
    except Exception as error:
        raise SpecError(_own_error(name, error)) from error


def _own_error(name: str, error: Exception) -> str:
    """Say what the user's own code raised, and at which line; a syntax error says that itself."""
    *_, last = traceback.extract_tb(error.__traceback__)
    own = last.filename != __file__ and not isinstance(error, SyntaxError)
    place = f" ({Path(last.filename).name}, line {last.lineno})" if own else ""
    return f"{name} fails with {type(error).__name__}: {first_line(error)}{place}; --debug shows more"


def _imported(module: str) -> Any:
    # The console script does not look into the current folder, `python -m` does. Last, so that nothing is hidden by it.
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module)


class _Fresh(importlib.machinery.SourceFileLoader):
    """Reads the source each time: bytecode counts as its own while size and second of the last change are the same."""

    def path_stats(self, path: Any) -> Any:
        """Leave bytecode alone, old and new."""
        raise OSError


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise SpecError(f"{path}: no such file; Python code is expected here")
    spec = importlib.util.spec_from_file_location(path.stem, path, loader=_Fresh(path.stem, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # a dataclass looks for its own module there
    spec.loader.exec_module(module)
    return module
