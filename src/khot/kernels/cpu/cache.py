"""The place of compiled loops between processes: a folder of the user's, or ``KHOT_CACHE_DIR`` if that is set.

numba has its own cache, which only looks at the file of the function. It misses an edit of a function that is called
from another file, and considers a function made by a factory (a loop for one link) as new in every process. Here an
entry is found by the function's qualified name, which identifies what the factory made, in a folder for the state of
the sources of all numba backends and the versions of numba and NumPy.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.misc.appdirs import AppDirs

PACKAGE = Path(__file__).parents[1]


def kept_on_disk(dispatcher: Any) -> Any:
    """The same compiled function, with its machine code stored on disk for later processes."""
    dispatcher._cache = _Cache(dispatcher.py_func) if _folder() else NullCache()
    return dispatcher


@functools.cache
def source_stamp() -> str:
    """Everything that machine code depends on besides the machine."""
    found = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, np.__version__)).encode())
    paths = sorted({*PACKAGE.rglob("*numba*.py"), *PACKAGE.glob("cpu/**/*.py")})
    for path in paths or filter(Path.is_file, PACKAGE.parents):  # a package that was imported from a zip file
        found.update(path.read_bytes())
    return found.hexdigest()


def _base() -> Path:
    """``KHOT_CACHE_DIR``, else numba's variable or a folder of the user's.

    It is an absolute path, since the working directory may change before the next loop is compiled.

    Raises:
        RuntimeError: If there is no home directory, neither in the environment nor for this user.
    """
    if given := os.environ.get("KHOT_CACHE_DIR") or os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given).expanduser().absolute()
    usual = Path(AppDirs("khot", appauthor=False).user_cache_dir)
    return usual if usual.is_absolute() else Path.home() / ".cache" / "khot"


@functools.cache
def _folder() -> Path | None:
    """The folder for this installation; None, with a warning, if there is none and it cannot be made.

    It need not be writable: a container image may have been filled by another user.
    """
    environment = f"{PACKAGE} of {sys.prefix}"  # two environments may share a checkout
    try:
        installation = _base() / f"khot_{hashlib.sha256(environment.encode()).hexdigest()[:16]}"
        path = installation / source_stamp()[:16]
        if not path.exists():
            path.mkdir(parents=True, exist_ok=True)
            for other in installation.iterdir():  # never this folder or its parent: other processes may create them
                if other != path:
                    shutil.rmtree(other, ignore_errors=True)  # loops of older sources
    except (OSError, RuntimeError) as error:
        _warn_once(error)
        return None
    return path


@functools.cache
def _warn_of(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _warn_once(error: Exception) -> None:
    reason = getattr(error, "strerror", None) or error
    _warn_of(
        f"khot compiles its CPU loops again in every process, since it cannot cache them ({type(error).__name__}: "
        f"{reason}); set KHOT_CACHE_DIR to a writable folder"
    )


class _Locator:
    """Tells numba's cache where to look; numba prescribes the names of the methods."""

    def ensure_cache_path(self) -> None:
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(_folder())

    def get_source_stamp(self) -> str:
        return source_stamp()


class _Implementation(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator()
        full_name = f"{function.__module__}.{function.__qualname__}"
        version = f"py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}"
        self._filename_base = f"{function.__name__}-{hashlib.sha256(full_name.encode()).hexdigest()[:24]}.{version}"


class _Notice:
    """Tells a person at a terminal once, after two seconds of compilation in total, why a first call takes long."""

    def __init__(self) -> None:
        self.patience, self.start = 2.0, 0.0
        self.timer: threading.Timer | None = None

    def begin(self) -> None:
        self.end()
        if self.patience > 0 and not os.environ.get("KHOT_QUIET") and sys.stderr is not None and sys.stderr.isatty():
            self.timer, self.start = threading.Timer(self.patience, self._tell), time.monotonic()
            self.timer.daemon = True
            self.timer.start()

    def end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer, self.patience = None, self.patience - (time.monotonic() - self.start)

    def _tell(self) -> None:
        self.patience = 0.0
        sys.stderr.write(
            f"khot is compiling loops for this CPU, once; it keeps them in {_base()}. KHOT_QUIET=1 hides this line.\n"
        )


notice = _Notice()


class _Cache(FunctionCache):
    _impl_class = _Implementation

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except Exception:  # a file that was damaged, as by a power failure, can raise anything
            found = None
            with contextlib.suppress(OSError):
                self.flush()  # otherwise saving would read the damaged index again
        if found is None:
            notice.begin()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        notice.end()
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(error)
