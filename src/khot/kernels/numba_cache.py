"""Where compiled loops are kept between processes: a folder of the user's, ``NUMBA_CACHE_DIR`` if that is set.

numba has a cache of its own, which looks at the file of the function alone: it misses an edit of a function that this
one calls from another file, and takes a function made by a factory (a loop for one link) for new in every process. Here
an entry is found by the function's name and the ``variant`` that the factory made of it, and is valid while the sources
of all numba backends, and the versions of numba and NumPy, are what they were.
"""

import functools
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.misc.appdirs import AppDirs

PACKAGE = Path(__file__).parent


def kept_on_disk(dispatcher: Any, variant: str = "") -> Any:
    """The same compiled function, whose machine code later processes find on disk."""
    dispatcher._cache = _Cache(dispatcher.py_func, variant) if _folder() else NullCache()
    return dispatcher


@functools.cache
def source_stamp() -> str:
    """What machine code depends on besides the machine."""
    found = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, np.__version__)).encode())
    for path in sorted(PACKAGE.rglob("*numba*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


@functools.cache
def _folder() -> Path | None:
    """The folder for this installation; None, with a warning, if it cannot be written."""
    base = os.environ.get("NUMBA_CACHE_DIR") or AppDirs("khot", appauthor=False).user_cache_dir
    path = Path(base) / f"khot_{hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:16]}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        _warn_once(error)
        return None
    return path


@functools.cache
def _warn_of(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _warn_once(error: OSError) -> None:
    _warn_of(
        f"khot compiles its CPU loops anew in every process, since it cannot keep them ({type(error).__name__}: "
        f"{error.strerror or error}); set NUMBA_CACHE_DIR to a folder that can be written"
    )


class _Locator:
    """Where numba's cache shall look; the names of its methods are numba's."""

    def __init__(self, variant: str) -> None:
        self.variant = variant

    def ensure_cache_path(self) -> None:
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(_folder())

    def get_source_stamp(self) -> str:
        return source_stamp()

    def get_disambiguator(self) -> str:
        return hashlib.sha256(self.variant.encode()).hexdigest()[:16]


class _Implementation(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any], variant: str) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(variant)
        module = function.__module__.replace(".", "_")
        self._filename_base = self.get_filename_base(f"{module}.{function.__qualname__}", sys.abiflags)


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any], variant: str) -> None:
        self._impl_class = functools.partial(_Implementation, variant=variant)  # type: ignore[assignment]
        self._variant = variant
        super().__init__(function)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return sig, codegen.magic_tuple(), self._variant

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(error)
