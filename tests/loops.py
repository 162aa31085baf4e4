"""One case for one claim that is checked with many values."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

most: int | None = None  # values that a test runs with in this run


def for_each(names: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the test runs with each of the values in turn, within one case; an error names the value.

    A quick run takes the first few of them.

    Args:
        names: Of arguments of the test, as in ``pytest.mark.parametrize``.
        values: Of the argument; of several, tuples.
    """
    split, values = [name.strip() for name in names.split(",")], list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            for value in values[:most]:
                given = dict(zip(split, [value] if len(split) == 1 else value, strict=True))
                try:
                    test(*args, **kwargs, **given)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"with {given}") from error

        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name not in split]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
