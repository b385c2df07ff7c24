"""Import users' losses (*targets*), and limit the time and the memory of their calls."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import operator
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

MEMORY_SHARE = 0.85
"""Share of the free memory that a case may use."""


class TargetError(ValueError):
    """A target cannot be loaded or called; the message says why.

    Attributes:
        died: whether its process died or was killed at the time limit.
    """

    def __init__(self, message: str, *, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


class Overtime(TargetError):
    """A target exceeded its time limit."""


class JaxLost(TargetError):
    """Jax is needed in a fork of a process that has used it, where it would wait forever."""


class NoCallFits(TargetError):
    """Every plausible call of a target raises an error. The message ends with a wrapper to copy."""


class TargetMisused(TargetError):
    """An option is missing or contradicts the target; the message names it."""


class _OutOfTime(BaseException):
    """Raised by the alarm. ``except Exception`` in a target does not catch it."""


def find(spec: str) -> Any:
    """Return the object that "package.module:attribute" or "file.py:attribute" names.

    Raises:
        TargetMisused: ``spec`` has another form.
        TargetError: the object does not exist, or its module cannot be imported.
    """
    name, _, attribute = spec.rpartition(":")
    if not name or not attribute:
        raise TargetMisused(f"{spec!r}: expected package.module:attribute or file.py:attribute")
    path = Path(name) if name.endswith(".py") else None
    if path and not path.is_file():
        raise TargetError(f"there is no file {name}")
    folder = str(path.resolve().parent if path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = _import_alone_or_in_package(path) if path else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        where = ""
        if isinstance(error, ModuleNotFoundError):
            where = f" (searched {Path.cwd()} and the installed packages)"
            where += _advice(str(error.name), path, attribute) if path else ""
        raise TargetError(f"{name} cannot be imported: {type(error).__name__}: {error}{where}") from None
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        near = get_close_matches(attribute, [key for key in vars(module) if not key.startswith("_")], 1)
        hint = "".join(f"; did you mean {key!r}?" for key in near)
        raise TargetError(f"{name} has no attribute {attribute!r}{hint}") from None
    except Exception as error:  # a module's __getattr__ may import
        raise TargetError(f"{name}: {attribute}: {type(error).__name__}: {error}") from None


def _advice(module: str, path: Path, attribute: str) -> str:
    """Return what to do about a module that a file imports and that is missing."""
    whole = path.resolve()
    for folder in whole.parents[1:-1]:
        place = folder / module.replace(".", "/")
        if place.is_dir() or place.with_suffix(".py").is_file():
            return f": {module} is in {folder}; run pairproof there, with {whole.relative_to(folder)}:{attribute}"
    # The message names no package: a misspelt name may be another package on PyPI.
    return "" if "." in module else ": install it, or copy the loss into a file of its own"


def _import_alone_or_in_package(path: Path) -> ModuleType:
    """Import a file; if an import in it fails, as a module of the packages whose folders contain it.

    The packages are those below the current folder or, if the file is elsewhere, those with an ``__init__.py``.
    """
    try:
        return import_file(path, "pairproof_target")
    except ImportError:
        whole = path.resolve()
        root = Path.cwd().resolve()
        if root not in whole.parents:
            root = next(folder for folder in whole.parents if not (folder / "__init__.py").exists())
        if root == whole.parent:
            raise
        # The folder of the file may contain a module with the name of a package.
        folder = str(whole.parent)
        sys.path[:] = [str(root), *(one for one in sys.path if one not in (folder, str(root)))]
        for name, module in [*sys.modules.items()]:
            if Path(getattr(module, "__file__", None) or root).parent == whole.parent:
                del sys.modules[name]
        return importlib.import_module(".".join(whole.relative_to(root).with_suffix("").parts))


def import_file(path: Path, prefix: str) -> ModuleType:
    """Import a Python file as a module whose name begins with a prefix."""
    name = f"{prefix}_{path.stem}_{abs(hash(str(path)))}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def described(error: BaseException) -> str:
    """Return the type and the message of an error; for a ``TargetError``, only the message.

    If reading them raises an exception, a fixed text is returned.
    """
    try:
        text = str(error)
        return text if isinstance(error, TargetError) else f"{type(error).__name__}: {text}"
    except BaseException:
        return "raised an exception whose name or message cannot be read"


def describe(spec: object) -> str:
    """Return a target's name as the user wrote it, or ``module:name`` of an object."""
    if isinstance(spec, str):
        return spec
    named: Any = spec if hasattr(spec, "__qualname__") else type(spec)
    return f"{getattr(named, '__module__', '?')}:{named.__qualname__}"


def copy_of(thing: Any) -> str:
    """Return the file of a target, and the version of its package if it has one."""
    plain = inspect.unwrap(thing) if inspect.isfunction(thing) else thing
    module = inspect.getmodule(plain) or inspect.getmodule(type(plain))
    package = sys.modules.get(module.__name__.partition(".")[0]) if module else None
    file, version = getattr(module, "__file__", None), getattr(package, "__version__", "")
    return ", ".join(filter(None, (file, f"version {version}" if version else "")))


@contextmanager
def within(limit: float | None) -> Iterator[None]:
    """Limit the time of the body to ``limit`` seconds.

    The limit needs alarm signals, so it applies only in the main thread and not on Windows. An alarm interrupts Python
    code, but not a native call that never returns.

    Raises:
        Overtime: the body takes too long.
        TargetError: the body tries to exit the process or raises another BaseException that is not an Exception.
            KeyboardInterrupt and GeneratorExit are raised unchanged.
    """
    seconds = math.inf if limit is None else limit
    alarmed = math.isfinite(seconds) and hasattr(signal, "setitimer")
    alarmed = alarmed and threading.current_thread() is threading.main_thread()

    def stop(*_: object) -> None:
        raise _OutOfTime

    def restore() -> None:
        if alarmed:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)

    if alarmed:
        handler = signal.signal(signal.SIGALRM, stop)
        # The alarm repeats every second, because the body may catch the first exception.
        timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            restore()
    except _OutOfTime:
        restore()
        raise Overtime(f"took longer than {seconds:g} s (--limit)") from None
    except SystemExit as error:
        raise TargetError(f"tried to exit the process: SystemExit({error.code!r})") from None
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # such as a panic in a library that is not written in Python
        raise TargetError(f"{type(error).__name__}: {error}".splitlines()[0]) from None


@contextmanager
def within_memory() -> Iterator[None]:
    """Limit the memory that the body may allocate; only on Linux.

    Raises:
        TargetError: the body needs more.
    """
    free = _free_memory()
    if free is None:
        yield
        return
    import resource

    allowed = int(MEMORY_SHARE * free)
    most = allowed + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise TargetError(f"needs more than the {allowed / 2**30:.2g} GiB of memory that a case may use") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _free_memory() -> int | None:
    """Return the free memory in bytes, if it is known."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.exists() else None
    return int(found[1]) * 1024 if found else None
