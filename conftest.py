"""Names that the examples in docstrings use without importing them."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    import torch

    import khot

    for name in khot.__all__:
        try:
            doctest_namespace[name] = getattr(khot, name)
        except ModuleNotFoundError:  # needs Pyro, as do its examples
            continue
    doctest_namespace["torch"] = torch
