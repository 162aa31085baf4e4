"""The log joint density of a Pyro model, and its slopes, as functions of the values of the latent sites."""

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from khot._contents import can_look
from khot.estimators.wrapper import base_law
from khot.relaxations import topk_mask

from .sites import PRIOR_OVER_SIZE, KHotSite, State, Values
from .summed_out import SummedOut
from .swaps import Point


class LogJoint:
    """The log joint density that a Markov chain evaluates, and its slopes.

    Args:
        model: The model, in the plate of the chains if there is one.
        args: Its arguments.
        kwargs: Its keyword arguments.
        with_slopes: Whether the derivatives with respect to k-hot values are wanted; otherwise they are 0.

    Attributes:
        sites: The k-hot sites.
        transforms: Transforms of the continuous sites to unconstrained values.
    """

    def __init__(
        self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], with_slopes: bool
    ) -> None:
        self.model, self.args, self.kwargs, self.with_slopes = model, args, kwargs, with_slopes
        self.sites: list[KHotSite] = []
        self.transforms: dict[str, Any] = {}
        self._summed_out: SummedOut | None = None

    def sum_out(self, nesting: int) -> None:
        """Sums out the discrete sites that the model marks, to the left of this number of batch dimensions."""
        self._summed_out = SummedOut(self.model, nesting)

    def separable(self, site: KHotSite, params: Values) -> KHotSite:
        """The site in those of its plates whose rows stay independent after the marked sites are summed out."""
        if self._summed_out is None:
            return site
        with torch.no_grad(), pyro.validation_enabled(False):
            trace = self.trace(params)
            trace.compute_log_prob()
            self._summed_out.total(trace)
        return site.in_plates(site.plate_names & self._summed_out.plates_around(site, trace))

    def check_sizes(self, params: Values) -> None:
        """Checks that no size of a k-hot site depends on another site: it must be the same at other k-hot values."""
        if len(params) == 1 and self._summed_out is None:
            return
        cases = [params]
        if len(self.sites) > 1:
            ends = ([site.smallest for site in self.sites], [site.largest for site in self.sites])
            cases += [{**params, **self._elsewhere(params, sizes)} for sizes in ends]
        with torch.no_grad(), pyro.validation_enabled(False):
            for case in cases:
                self._check_sizes_of(self.trace(case))

    def _elsewhere(self, params: Values, sizes: list[Tensor]) -> Values:
        """Other values of the k-hot sites with these sizes, made of units that were out as far as possible."""
        pairs = ((params[site.name], site.name, size) for site, size in zip(self.sites, sizes, strict=True))
        return {name: topk_mask(-value, size).to(value.dtype) for value, name, size in pairs}

    def _check_sizes_of(self, trace: Any) -> None:
        for site in self.sites:
            design = base_law(trace.nodes[site.name]["fn"])
            for size, at_start in ((design.k, site.smallest), (design.largest_k, site.largest)):
                if can_look(size) and not bool((size == at_start).all()):
                    raise NotImplementedError(
                        f"KHotSwap needs a size of {site.name!r} that depends on no other site, but its `k` does: give "
                        f"it {PRIOR_OVER_SIZE}, whose log_prior may depend on other sites"
                    )

    def trace(self, params: Values) -> Any:
        """A run of the model with these values, in which its other sites are enumerated."""
        transforms = self.transforms
        values = {name: transforms[name].inv(x) if name in transforms else x for name, x in params.items()}
        given = poutine.condition(self._summed_out or self.model, data=values)
        return poutine.trace(given).get_trace(*self.args, **self.kwargs)

    def __call__(self, params: Values) -> State:
        """The state of a chain with these values."""
        leaves = {site.name: params[site.name].detach().requires_grad_(self.with_slopes) for site in self.sites}
        with torch.enable_grad(), pyro.validation_enabled(False):
            trace = self.trace({**params, **leaves})
            if len(params) > 1:
                self._check_sizes_of(trace)  # those values may be the first to show that a size depends on them
            trace.compute_log_prob()
            total: Any = trace.log_prob_sum() if self._summed_out is None else self._summed_out.total(trace)
        found: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if self.with_slopes and total.requires_grad:
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        log_joint = KHotSite.log_joint if self._summed_out is None else self._summed_out.of_blocks
        points = {}
        for site, d in zip(self.sites, found, strict=True):
            value = params[site.name]
            # Slopes only guide the proposals, so one that is not finite is replaced by 0.
            slope = torch.zeros_like(value) if d is None else d.nan_to_num(0, 0, 0)
            points[site.name] = Point(
                site.blocks(value), site.blocks(slope), log_joint(site, trace).detach(), site.sizes
            )
        return State(params, points)
