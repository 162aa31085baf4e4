"""Names that the examples in docstrings use without importing them."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    import torch

    import khot

    for name in dir(khot):  # without Pyro, those that do not need it
        if not name.startswith("_"):
            doctest_namespace[name] = getattr(khot, name)
    doctest_namespace["torch"] = torch
