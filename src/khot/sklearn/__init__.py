"""Selection of features as a scikit-learn estimator, by a gate that learns together with a predictor.

Needs scikit-learn, the extra ``khot[sklearn]``, and Pyro. Not among the names of ``khot``:
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
