"""Which members the page of a class lists: those that users call, also inherited ones, but no internal ones.

A class of `OF_PACKAGE` lists the members named there that it has, in this order. The page of any other class lists the
public members that it defines itself. For members that raise NotImplementedError, as `log_prob` of a design without
one, the page says so: they are tried on a small example of each class.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import Distribution

import api_pages
import khot

OF_DESIGNS = (
    "sample",
    "log_prob",
    "mean",
    "variance",
    "entropy",
    "mode",
    "pairwise_inclusion",
    "covariance_matrix",
    "enumerate_support",
)
OF_PACKAGE = {
    "khot.distributions": (
        *("rsample", *OF_DESIGNS),
        *("sample_indices", "size_probs", "to_khot", "from_scores", "wrapped", "support", "probs", "logits"),
    ),
    "khot.estimators": ("rsample", *OF_DESIGNS, "support", "step", "update", "state_dict", "load_state_dict"),
    "khot.nn": (
        *("mask", "select", "auxiliary_loss", "balance_loss", "z_loss", "update_bias", "to_jumprelu", "count"),
        *("kl", "law", "freeze", "unfreeze", "softness", "capacity"),
        *("value", "step", "state_dict", "load_state_dict", "reset_parameters"),
        *("values", "indices", "dead"),
    ),
    "khot.constraints": ("check",),
}
# Of modules and designs, described in their docstrings.
ATTRIBUTES = ("k", "largest_k", "log_prior", "capacity", "threshold", "cap", "density", "strength")
HIDE_NOTHING = {"khot.nn", "khot.distributions"}  # packages in which what is not listed has an underscore
CALLED_BY_TORCH = (
    *("forward", "extra_repr", "right_inverse"),
    *("expand", "infer_shapes", "arg_constraints", "has_rsample", "has_enumerate_support"),
)


def listed() -> dict[str, list[tuple[str, str]]]:
    """The members on the page of each class of these packages, each with its kind of directive."""
    return {
        f"{package}.{name}": [(_kind(getattr(cls, member)), member) for member in names if defines(cls, member)]
        for package, names in OF_PACKAGE.items()
        for name, cls in _classes(package)
    }


def _kind(member: Any) -> str:
    """The directive of autodoc that shows a member."""
    return "property" if isinstance(member, property) else "method" if callable(member) else "attribute"


def defines(cls: type, member: str) -> bool:
    """Whether a class has a member that is not merely torch's, except where every distribution has it."""
    if issubclass(cls, Distribution):
        return hasattr(cls, member) and (member != "rsample" or bool(cls.has_rsample))
    return any(member in vars(base) for base in cls.__mro__ if base.__module__.startswith("khot."))


def missing() -> dict[str, list[str]]:
    """The members of designs that each distribution does not even have as attributes."""
    package = "khot.distributions"
    return {
        f"{package}.{name}": [member for member in OF_DESIGNS if not hasattr(cls, member)]
        for name, cls in _classes(package)
    }


def expected(page: str) -> list[str]:
    """The members and attributes that the page of a class must have an entry for, or say that there is none."""
    package, _, name = page.rpartition(".")
    cls = dict(_classes(package)).get(name) if package in OF_PACKAGE else None
    if cls is None:
        return []
    if package == "khot.distributions":
        return list(OF_DESIGNS)
    arguments = inspect.signature(cls).parameters
    attributes = [name for name in ATTRIBUTES if name in arguments or name in vars(cls).get("__annotations__", {})]
    return [member for _, member in listed()[page]] + (attributes if package == "khot.nn" else [])


def unlisted() -> list[str]:
    """Public members that are on no page, because they are internal and lack an underscore."""
    return [
        f"{package}.{name}: {member} is public but not listed in docs/_extensions/members.py; is it internal?"
        for package in sorted(HIDE_NOTHING)
        for name, cls in _classes(package)
        for member in sorted({m for base in cls.__mro__ if base.__module__.startswith("khot.") for m in vars(base)})
        if not member.startswith("_") and member not in (*OF_PACKAGE[package], *ATTRIBUTES, *CALLED_BY_TORCH)
    ]


def _classes(package: str) -> list[tuple[str, type]]:
    """The classes that have their page in this package, and not in one that it borrows them from."""
    things = {name: getattr(api_pages.module(package), name) for name in api_pages.names()[package]}
    return [(n, thing) for n, thing in things.items() if inspect.isclass(thing) and api_pages.home_of(n) == package]


@functools.cache
def example(cls: type) -> Any:
    """A small distribution of this class."""
    logits = torch.zeros(4)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: cls(logits=logits, k=2),
        lambda: cls(logits=logits, k=2, temperature=1.0),
        lambda: cls(khot.ConditionalPoisson, logits=logits),  # PhantomUnit
        lambda: cls(khot.ConditionalPoisson(logits=logits, k=2)),  # an estimator
    )
    for make in makers:
        try:
            return make()
        except TypeError:
            continue
    raise TypeError(f"docs/_extensions/members.py does not know how to make a small {cls.__name__}")


@functools.cache
def refusal(cls: type, member: str) -> str | None:
    """What a member of `OF_DESIGNS` says if this class does not have it: the text of its error; otherwise None."""
    if not issubclass(cls, Distribution):
        return None
    design = example(cls)
    try:
        found = getattr(design, member)
        if callable(found):
            found(*((design.sample(),) if member == "log_prob" else ()))
    except NotImplementedError as error:
        return str(error)
    return None
