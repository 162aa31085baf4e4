"""The names that the code of a class uses, among which a compiled graph finds the attributes of its objects."""

import inspect
from types import CodeType
from typing import Any

__all__ = ["names_in_code"]


def names_in_code(kind: type) -> tuple[str, ...]:
    """The names of all members of a class and of its bases, and all names in their functions, sorted.

    Among them are all attributes that these functions use.
    """
    names = {name for base in kind.__mro__ for name in base.__dict__}
    members = [_function_of(member) for base in kind.__mro__ for member in base.__dict__.values()]
    codes = [member.__code__ for member in members if hasattr(member, "__code__")]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return tuple(sorted(names))


def _function_of(member: Any) -> Any:
    """The function of a method, or of a property of any kind; any other member as it is."""
    found = (getattr(member, name, None) for name in ("fget", "wrapped", "func"))
    return inspect.unwrap(next((function for function in found if function is not None), member))
