"""Names by which compiled and exported graphs refer to links, since a graph contains strings but no Python objects.

The name of a link is its value: the name of its class followed by its attributes, such as ``logistic`` or
``clipped_power(q=3)``. Any process that knows the class can make the same link from it, so that an exported program has
the same meaning everywhere.

A link that another process could not make gets a name that cannot exist there, rather than one that might refer to
something else: a class without a registered name goes by a number and a token of this process, and a link whose
attributes are not plain constants also by its identity.
"""

import ast
import uuid
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from khot._torch_internals import attribute_names, count_as_constant, is_exporting

if TYPE_CHECKING:
    from .base import Link

_THIS_PROCESS = uuid.uuid4().hex
_numbers = count()
_registered: "dict[str, type[Link]]" = {}
_others: "WeakValueDictionary[str, type[Link]]" = WeakValueDictionary()
_living: "WeakValueDictionary[int, Link]" = WeakValueDictionary()
_INFINITY = "1e999"  # infinity has no literal


def register(cls: "type[Link]", name: str | None) -> None:
    """Gives a class of links its name: ``name``, or by default a name that only this process understands."""
    cls.exportable = name is not None
    if name is None:
        cls.class_name = f"{cls.__module__}.{cls.__qualname__}@{_THIS_PROCESS}.{next(_numbers)}"
        _others[cls.class_name] = cls
        return
    if not isinstance(name, str):
        raise TypeError(f"`name` of a link must be a str, but got {name!r}")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"`name` of a link must be an identifier, or several joined by dots, but got {name!r}")
    if name in _registered and not _is_made_again(cls, _registered[name]):
        raise ValueError(f"`name` of a link must be unique, but {name!r} is the name of {_registered[name]!r}")
    cls.class_name = name
    _registered[name] = cls
    _make.cache_clear()


def _is_made_again(cls: type, before: type) -> bool:
    """Whether the same definition runs once more, as in a notebook cell or a module that is reloaded."""
    return (cls.__module__, cls.__qualname__) == (before.__module__, before.__qualname__)


def remember(link: "Link") -> None:
    """Makes this link known to :func:`find_link` for as long as it lives."""
    _living[id(link)] = link


@count_as_constant  # Dynamo cannot trace a weak dictionary
def _lives(identity: int) -> bool:
    return identity in _living


def name_of(link: "Link") -> str:
    """The name of a link; raises a ValueError if an exported program would need a portable name and the link has none.

    Dynamo traces this for links that are made inside a compiled function.
    """
    cls = type(link)
    # For entries of __dict__, Dynamo of torch 2.14 makes no guards: a graph would keep an attribute that has changed.
    values = [(name, _literal(getattr(link, name))) for name in attribute_names(link, cls.known_names)]
    odd = [attribute for attribute, value in values if value is None]
    if is_exporting():
        _check_exportable(cls, odd)
    if odd or cls.has_slots:
        identity = id(link)
        if not _lives(identity):
            raise ValueError(
                f"a link made inside a compiled function must have plain numbers, strings, None or tuples of them as "
                f"attributes, which those of {cls.__name__} are not: construct it outside"
            )
        return f"{cls.class_name}#{_THIS_PROCESS}.{identity}"
    if not values:
        return cls.class_name
    return cls.class_name + "(" + ", ".join([f"{attribute}={value}" for attribute, value in values]) + ")"


def _check_exportable(cls: "type[Link]", odd: list[str]) -> None:
    if not cls.exportable:
        raise ValueError(
            f"a link without a registered name cannot be part of an exported program: give its class one, "
            f'`class {cls.__name__}(Link, name="...")`'
        )
    if odd or cls.has_slots:
        raise ValueError(
            f"a link can be part of an exported program only if its attributes are plain numbers, strings, None or "
            f"tuples of them, which those of {cls.__name__} are not: {', '.join(odd) or '`__slots__`'}"
        )


def _literal(value: Any) -> str | None:
    """A value as Python source; None if this would not represent it completely."""
    if type(value) is tuple:
        parts = [_literal(part) for part in value]
        return None if None in parts else "(" + "".join([f"{part}, " for part in parts]) + ")"
    if value is None or type(value) in (bool, str):
        return repr(value)
    if type(value) not in (int, float) or value != value:
        return None
    return repr(as_constant(value)).replace("inf", _INFINITY)


def as_constant(number: float) -> float:
    """The number; to Dynamo, which must know what is hashed, a constant of the graph, even if it was an input."""
    return next(iter({number}))


def find_link(name: str) -> "Link":
    """The link of this name: an existing link that equals it, or a new one.

    Raises:
        ValueError: If the name is not known here.
    """
    _, identity, number = name.partition(f"#{_THIS_PROCESS}.")
    link = _living.get(int(number)) if identity else _make(name)
    if link is None:
        raise ValueError(f"the link {name} no longer exists")
    return link


@lru_cache(maxsize=256)
def _make(name: str) -> "Link":
    class_name, _, arguments = name.partition("(")
    cls = _registered.get(class_name) or _others.get(class_name)
    if cls is None:
        raise ValueError(
            f"no link is registered as {class_name!r} in this process. An exported program needs the modules that "
            f'define its links, `class MyLink(Link, name="...")`, to be imported before it runs.'
        )
    link = object.__new__(cls)
    if arguments:
        call = ast.parse(f"f({arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        vars(link).update({str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    return link
