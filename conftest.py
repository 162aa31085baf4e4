"""Names that the examples in docstrings use without importing them."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    import torch

    import khot

    doctest_namespace.update(torch=torch, **{name: getattr(khot, name) for name in khot.__all__})
