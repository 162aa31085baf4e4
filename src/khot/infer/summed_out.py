r"""Log joint densities in which discrete sites are summed out.

.. math:: \log p(x) = \log \sum_z p(x, z)

The sites z are those that a model marks by ``infer={"enumerate": "parallel"}``. Pyro enumerates each in its own
dimension to the left of all plates, and contracts the terms plate by plate, as ``TraceEnum_ELBO`` does.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from pyro import poutine
from pyro.ops.contract import contract_to_tensor
from pyro.ops.packed import unpack
from torch import Tensor

from khot.estimators.wrapper import wide

from .sites import KHotSite, terms_from


class SummedOut:
    """A model that enumerates its marked sites; unlike a closure it can be pickled.

    Args:
        model: A model, in the plate of the chains if there is one.
        nesting: Number of batch dimensions that its plates take.
    """

    def __init__(self, model: Callable[..., Any], nesting: int) -> None:
        self.model, self.nesting = model, nesting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with poutine.enum(first_available_dim=-1 - self.nesting):
            return self.model(*args, **kwargs)

    @staticmethod
    def total(trace: Any) -> Tensor:
        """The log joint density of all sites, from a trace with log-probabilities."""
        trace.pack_tensors()
        return _contracted(trace, terms_from(trace), frozenset())

    @staticmethod
    def plates_around(site: KHotSite, trace: Any) -> set[str]:
        """The plates that contain all terms that depend on a site; needs :meth:`total` first.

        An enumerated site outside a plate, such as a class that all rows have in common, makes its rows dependent.
        """
        plates = [{frame.name for frame in term["cond_indep_stack"]} for term in _terms_of(site, trace)]
        return set.intersection(*plates)

    @staticmethod
    def of_blocks(site: KHotSite, trace: Any) -> Tensor:
        """The sum, for each block of a site, of the terms that can depend on it; needs :meth:`total` first."""
        target = frozenset(trace.plate_to_symbol[name] for name in site.plate_names)
        return _contracted(trace, _terms_of(site, trace), target).reshape(-1)


def _terms_of(site: KHotSite, trace: Any) -> list[Any]:
    """The terms of a site and of later ones, and earlier ones that share enumerated sites with them or each other."""
    found = terms_from(trace, site.name)
    names = {term["name"] for term in found}
    earlier = [term for term in terms_from(trace) if term["name"] not in names]
    number = 0
    while number < len(found):
        number = len(found)
        shared = set().union(*(_enumerated_in(term, trace) for term in found))
        found += [term for term in earlier if shared & _enumerated_in(term, trace)]
        earlier = [term for term in earlier if not shared & _enumerated_in(term, trace)]
    return found


def _enumerated_in(term: Any, trace: Any) -> set[str]:
    return _enumerated(trace).intersection(term["packed"]["log_prob"]._pyro_dims)


def _enumerated(trace: Any) -> set[str]:
    """The symbols of the enumerated dimensions."""
    return {*trace.symbol_to_dim} - {*trace.plate_to_symbol.values()}


def _contracted(trace: Any, terms: list[Any], target: frozenset[str]) -> Tensor:
    """The logarithm of the sum over the enumerated dimensions, for each row of the plates of the target."""
    dtype = functools.reduce(torch.promote_types, (wide(term["packed"]["log_prob"]).dtype for term in terms))
    tree: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for term in terms:
        plates = frozenset(trace.plate_to_symbol[f.name] for f in term["cond_indep_stack"] if f.vectorized)
        packed = term["packed"]["log_prob"]
        log_prob: Any = packed.to(dtype, copy=True)
        log_prob._pyro_dims = packed._pyro_dims
        tree.setdefault(plates, []).append(log_prob)
    found = contract_to_tensor(tree, _enumerated(trace), target_ordinal=target)
    return unpack(found, trace.symbol_to_dim)
