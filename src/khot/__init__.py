"""Learning with k-hot vectors (choose k of n) in PyTorch and Pyro.

A relaxation turns scores into inclusion probabilities, a sampling design turns these into k-hot vectors, and an
estimator carries gradients back to the scores. Any relaxed mask can parametrise any design, and most estimators support
all designs.

The public names are those that the subpackages list in their ``__all__``. Everything that is built on Pyro is imported
at first use, so that ``import khot`` and the relaxed maps need torch only.
"""

from difflib import get_close_matches
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from khot import constraints, losses, relaxations
from khot.losses import *
from khot.relaxations import *

if TYPE_CHECKING:
    from khot import diagnostics, distributions, estimators, infer, nn, sklearn
    from khot.diagnostics import *
    from khot.distributions import *
    from khot.estimators import *
    from khot.infer import *

_BUILT_ON_PYRO = ("diagnostics", "distributions", "estimators", "infer")
_BY_NAME = ("nn", "sklearn")  # not in `__all__`, as `from khot import *` would hide torch's nn, and scikit-learn
_ELSEWHERE = {
    "KHotSelector": "sklearn",
    "capped_simplex": "constraints",
    "k_hot": "constraints",
    "ranking": "constraints",
}

try:
    __version__ = metadata.version("khot")
except metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0+unknown"


def _load(package: str, wanted: str) -> ModuleType:
    try:
        return import_module(f"khot.{package}")
    except ModuleNotFoundError as error:
        if error.name != "pyro":
            raise
        message = f"khot.{wanted} needs Pyro, as designs and estimators do: pip install pyro-ppl"
        raise ModuleNotFoundError(message, name="pyro") from error


def _public_names(*subpackages: str) -> list[str]:
    """The subpackages that need torch only and these ones, with the names they list; `constraints` is used by name."""
    packages = [losses, relaxations, *(_load(name, wanted="__all__") for name in subpackages)]
    listed = [name for package in packages for name in package.__all__]
    return sorted({*listed, "constraints", "losses", "relaxations", *subpackages})


def _places() -> dict[str, str]:
    """Maps each public name in lower case to its place, such as "khot.nn.TopK"."""
    packages = [losses, relaxations, *(_load(package, wanted="__all__") for package in _BUILT_ON_PYRO)]
    places = {name: f"khot.{name}" for package in packages for name in package.__all__}
    places |= {name: f"khot.nn.{name}" for name in import_module("khot.nn").__all__}
    places |= {name: f"khot.{package}.{name}" for name, package in _ELSEWHERE.items()}
    return {name.lower(): place for name, place in places.items()}


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _BY_NAME:
            return import_module(f"khot.{name}")
        if name in _BUILT_ON_PYRO:
            return _load(name, wanted=name)
        if name == "__all__":
            return _public_names(*_BUILT_ON_PYRO)
        if not name.startswith("_"):
            home = "nn" if name in import_module("khot.nn").__all__ else _ELSEWHERE.get(name)
            if home is not None:
                raise AttributeError(
                    f"module 'khot' has no attribute {name!r}, which is in khot.{home}: from khot.{home} import {name}"
                )
            for package in _BUILT_ON_PYRO:
                module = _load(package, wanted=name)
                if name in module.__all__:
                    return getattr(module, name)
            similar = get_close_matches(name.lower(), places := _places(), n=1)
            if similar:
                raise AttributeError(f"module 'khot' has no attribute {name!r}: did you mean {places[similar[0]]}?")
        raise AttributeError(f"module 'khot' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names that can be imported: ``inspect.getmembers`` and completion in a shell try all of them."""
    try:
        names = _public_names(*_BUILT_ON_PYRO)
    except ModuleNotFoundError:  # no Pyro
        return sorted([*_public_names(), "nn"])
    return sorted([*names, *(name for name in _BY_NAME if name == "nn" or find_spec("sklearn"))])
