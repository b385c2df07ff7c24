"""Where a target comes from, and what a call of it may take: its import, a limit of time, a limit of memory."""

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
from pathlib import Path
from types import ModuleType
from typing import Any

MEMORY_SHARE = 0.85
"""Share of the free memory that a case may take: a loss that builds pairs by pairs must not exhaust the machine."""


class TargetError(ValueError):
    """A target that cannot be loaded or called; the message says what to do."""


class TargetMisused(TargetError):
    """An option contradicts the target, or an option is missing; the message says which."""


class _OutOfTime(BaseException):
    """Raised by the alarm. It is not an Exception, so that a target which catches those does not catch it."""


def find(spec: str) -> Any:
    """Return the object that "package.module:attribute" or "file.py:attribute" names.

    Raises:
        TargetError: it does not exist, or its module cannot be imported.
    """
    name, _, attribute = spec.rpartition(":")
    if not name or not attribute:
        raise TargetMisused(f"{spec!r}: expected package.module:attribute or file.py:attribute")
    path = Path(name) if name.endswith(".py") else None
    if path and not path.is_file():
        raise TargetError(f"no file {name}")
    folder = str(path.resolve().parent if path else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_file(path, "pairproof_target") if path else importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # No package is suggested for installation: a misspelt name may be anybody's on an index.
        missing = isinstance(error, ModuleNotFoundError)
        where = f" (python looks in {Path.cwd()} and where packages are installed)" if missing else ""
        raise TargetError(f"{name} cannot be imported: {type(error).__name__}: {error}{where}") from None
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        raise TargetError(f"{name} has no {attribute}") from None
    except Exception as error:  # a module's __getattr__ may import
        raise TargetError(f"{name}: {attribute}: {type(error).__name__}: {error}") from None


def import_file(path: Path, prefix: str) -> ModuleType:
    """Import one Python file by its path, registered under a name that begins with a prefix."""
    name = f"{prefix}_{path.stem}_{abs(hash(str(path)))}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def describe(spec: object) -> str:
    """Name a target: as the user did, or by its module and its name where the object itself was given."""
    if isinstance(spec, str):
        return spec
    named: Any = spec if hasattr(spec, "__qualname__") else type(spec)
    return f"{getattr(named, '__module__', '?')}:{named.__qualname__}"


def copy_of(thing: Any) -> str:
    """Return the file that a target comes from, and its package's version where it has one."""
    plain = inspect.unwrap(thing) if inspect.isfunction(thing) else thing
    module = inspect.getmodule(plain) or inspect.getmodule(type(plain))
    package = sys.modules.get(module.__name__.partition(".")[0]) if module else None
    file, version = getattr(module, "__file__", None), getattr(package, "__version__", "")
    return ", ".join(filter(None, (file, f"version {version}" if version else "")))


@contextmanager
def within(limit: float | None) -> Iterator[None]:
    """Limit the seconds of what is inside, in the main thread of systems with alarms; elsewhere there is no limit.

    An alarm interrupts Python code. It does not interrupt a call of other code that never returns.

    Raises:
        TargetError: the time is up, or what is inside tries to end the process.
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
        # It rings again every second, in case the first exception is swallowed.
        timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        try:
            yield
        finally:
            restore()
    except _OutOfTime:
        restore()
        raise TargetError(f"took longer than {seconds:g} s (--limit)") from None
    except SystemExit as error:
        raise TargetError(f"wanted to end the process: SystemExit({error.code!r})") from None
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # such as a panic of a library written in another language
        raise TargetError(f"{type(error).__name__}: {error}".splitlines()[0]) from None


@contextmanager
def within_memory() -> Iterator[None]:
    """Limit the memory that what is inside may map, where the system tells how much is free (Linux).

    Raises:
        TargetError: it needs more.
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
        raise TargetError(f"wanted more memory than the {allowed / 2**30:.2g} GiB that a case may take here") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _free_memory() -> int | None:
    """Return the bytes that are free; None where the system does not say."""
    info = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.exists() else None
    return int(found[1]) * 1024 if found else None
