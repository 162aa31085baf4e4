"""Feature selection as a scikit-learn estimator, by a gate that is trained together with a predictor.

This package needs scikit-learn, the extra ``khot[sklearn]``, and Pyro. Its names are not re-exported by ``khot``:
``from khot.sklearn import KHotSelector``.
"""

try:
    from .selector import KHotSelector
except ModuleNotFoundError as error:
    if error.name not in ("sklearn", "pyro"):
        raise
    message = f"khot.sklearn needs {error.name}: pip install scikit-learn pyro-ppl tqdm"
    raise ModuleNotFoundError(message, name=error.name) from error

__all__ = ["KHotSelector"]


def __dir__() -> list[str]:
    return __all__
