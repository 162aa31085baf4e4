"""One thread for all tests, and which of them are slow because of what they are given."""

import pytest
import torch

torch.set_num_threads(1)  # their tensors are small, and threads that wait for each other cost more than they do


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a member that calls itself slow is slow."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(getattr(value, "slow", False) for value in parameters):
            item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("khot")
    group.addoption("--fuzz-rows", type=int, default=0, help="rows of the long fuzz tests, instead of a few thousand")
    group.addoption("--fuzz-seed", type=int, default=10**6, help="seed of the rows of the long fuzz tests")
