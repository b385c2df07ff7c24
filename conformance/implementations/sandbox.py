"""Where a target comes from, and what a call of it may take: its import, a limit of time, a limit of memory."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    try:
        if name.endswith(".py"):
            found: Any = _load_file(Path(name))
        else:
            _search(Path.cwd())
            found = importlib.import_module(name)
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        # No package is suggested for installation: a misspelt name may be anybody's on an index.
        missing = isinstance(error, ModuleNotFoundError)
        where = f" (python looks in {Path.cwd()} and where packages are installed)" if missing else ""
        raise TargetError(f"{name} cannot be imported: {type(error).__name__}: {error}{where}") from None
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TargetError(f"{name} has no {attribute}") from None
        except Exception as error:  # a module's __getattr__ may import
            raise TargetError(f"{name}: {attribute}: {type(error).__name__}: {error}") from None
    return found


def _load_file(path: Path) -> Any:
    """Import a file as `python file.py` would: registered, and with the modules beside it."""
    if not path.is_file():
        raise TargetError(f"no file {path}")
    name = f"pairproof_target_{path.stem}_{abs(hash(str(path.resolve())))}"
    _search(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def describe(spec: object) -> str:
    """Name a target: as the user did, or by its module and its name where the object itself was given."""
    if isinstance(spec, str):
        return spec
    named = spec if hasattr(spec, "__qualname__") else type(spec)
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', type(spec).__name__)}"


def copy_of(thing: Any) -> str:
    """Return the file that a target comes from, and its package's version where it has one."""
    plain = inspect.unwrap(thing) if inspect.isfunction(thing) else thing
    module = inspect.getmodule(plain) or inspect.getmodule(type(plain))
    version = getattr(sys.modules.get((module.__name__ if module else "").partition(".")[0]), "__version__", "")
    file = getattr(module, "__file__", None)
    return ", ".join(filter(None, (str(file) if file else "", f"version {version}" if version else "")))


@contextmanager
def within(limit: float | None) -> Iterator[None]:
    """Limit the seconds of what is inside, in the main thread of systems with alarms; elsewhere there is no limit.

    An alarm interrupts Python code. It does not interrupt a call of other code that never returns.

    Raises:
        TargetError: the time is up, or what is inside tries to end the process.
    """
    alarmed = limit is not None and math.isfinite(limit) and hasattr(signal, "setitimer")
    alarmed = alarmed and threading.current_thread() is threading.main_thread()

    def stop(*_: object) -> None:
        raise _OutOfTime

    def restore() -> None:
        if alarmed:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, handler)

    if alarmed:
        assert limit is not None
        handler = signal.signal(signal.SIGALRM, stop)
        # It rings again every second, in case the first exception is swallowed.
        timer = signal.setitimer(signal.ITIMER_REAL, limit, 1.0)
    try:
        try:
            yield
        finally:
            restore()
    except _OutOfTime:
        restore()
        raise TargetError(f"took longer than {limit:g} s (--limit)") from None
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

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + int(MEMORY_SHARE * free)
    bounds = [bound for bound in (most, before, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        gigabytes = MEMORY_SHARE * free / 2**30
        raise TargetError(f"wanted more memory than the {gigabytes:.2g} GiB that a case may take here") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _free_memory() -> int | None:
    """Return the bytes that are free; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
