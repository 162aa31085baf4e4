"""The latent k-hot sites of a Pyro model: their names, their independent blocks, and their starting values."""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide.initialization import init_to_uniform
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor

from khot.distributions import ConditionalPoisson, PhantomUnit, SamplingDesign
from khot.distributions.base import is_half
from khot.distributions.sizes import size_of
from khot.estimators.wrapper import base_law, unrounded_law, wide
from khot.laws.size_prior import log_size_law

from .swaps import Point, Sizes

Values = dict[str, Tensor]

PRIOR_OVER_SIZE = "a prior over its size instead: ConditionalPoisson(logits=logits, k=(low, high, log_prior))"


@dataclass(frozen=True)
class KHotSite:
    """A k-hot site, and how its value splits into blocks that are swapped independently.

    Attributes:
        name: Name of the site.
        shape: Shape of its value, ``(*batch_shape, *event_shape)``.
        event_dim: Number of dimensions of ``event_shape``: 1, and more after ``to_event``.
        plates: Names of the plates whose rows are blocks, with their dimensions among those of the batch: -1, -2, ...
        smallest: The smallest number of ones of each row, ``shape[:-1]``.
        largest: The largest number of ones of each row.
    """

    name: str
    shape: Size
    event_dim: int
    plates: tuple[tuple[int, str], ...]
    smallest: Tensor
    largest: Tensor

    @classmethod
    def of(cls, trace: Any, name: str) -> "KHotSite":
        """The site, with those of its plates that contain all terms that can depend on it: itself and later terms."""
        node: Any = trace.nodes[name]
        later = terms_from(trace, name)
        plates = [
            (frame.dim, frame.name)
            for frame in node["cond_indep_stack"]
            if frame.vectorized and all(_has_rows(term, frame) for term in later)
        ]
        shape, design = node["value"].shape, base_law(node["fn"])
        _check_gaps(name, design)
        ends = (end.expand(shape[:-1]) for end in (design.k, design.largest_k))
        return cls(name, shape, node["fn"].event_dim, tuple(sorted(plates)), *ends)

    def in_plates(self, names: set[str]) -> "KHotSite":
        """The site with only these plates as blocks; without any plate, the whole value is one block."""
        return replace(self, plates=tuple(plate for plate in self.plates if plate[1] in names))

    @property
    def plate_names(self) -> set[str]:
        return {name for _, name in self.plates}

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes that the rows of each block may have, ``(blocks, rows)``."""
        smallest, largest = (
            self.blocks(end.unsqueeze(-1).expand(self.shape))[..., 0] for end in (self.smallest, self.largest)
        )
        return Sizes(smallest, largest)

    @cached_property
    def possible(self) -> Tensor:
        """Whether there is any swap in each block."""
        return self.sizes.possible(self.shape[-1])

    @cached_property
    def moves(self) -> bool:
        """Whether there is a swap in any block."""
        return bool(self.possible.any())

    @cached_property
    def moves_everywhere(self) -> bool:
        return bool(self.possible.all())

    @cached_property
    def most_swaps(self) -> int:
        """The largest number of swaps in a proposal: one if blocks have several rows, or rows several sizes."""
        size = self.sizes.low
        if size.shape[1] != 1 or self.sizes.vary or not self.moves:
            return 1
        return int(torch.minimum(size, self.shape[-1] - size)[self.possible].min())

    @cached_property
    def useful_swaps(self) -> float:
        """The mean number of swaps that lead from one of two independent, uniform vectors to the other; at least one.

        More of them tend to lead from a vector to its opposite and back.
        """
        size = self.sizes.low[self.possible].double()
        return 1.0 if self.most_swaps == 1 else max(1.0, float((size * (1 - size / self.shape[-1])).min()))

    @cached_property
    def _order(self) -> list[int]:
        """The axes of the value, with those of the plates first."""
        first = [len(self.shape) - self.event_dim + dim for dim, _ in self.plates]
        return [*first, *(axis for axis in range(len(self.shape)) if axis not in first)]

    def blocks(self, value: Tensor) -> Tensor:
        """A value as ``(blocks, rows, n)``."""
        if not self.plates:
            return value.reshape(1, -1, self.shape[-1])
        number = math.prod(self.shape[axis] for axis in self._order[: len(self.plates)])
        rows = math.prod(self.shape[axis] for axis in self._order[len(self.plates) : -1])
        return value.permute(self._order).reshape(number, rows, self.shape[-1])

    def unblocked(self, value: Tensor) -> Tensor:
        """The inverse of :meth:`blocks`."""
        if not self.plates:
            return value.reshape(self.shape)
        order = self._order
        back = sorted(range(len(order)), key=order.__getitem__)
        return value.reshape([self.shape[axis] for axis in order]).permute(back).contiguous()

    def log_joint(self, trace: Any) -> Tensor:
        """The sum, for each block, of the terms that can depend on it: this and later sites, in all of its plates."""
        dims, names = [dim for dim, _ in self.plates], self.plate_names
        parts = []
        for term in terms_from(trace, self.name):
            if names <= {frame.name for frame in term["cond_indep_stack"]}:
                log_prob = _log_prob(term)
                others = [axis for axis in range(log_prob.dim()) if axis - log_prob.dim() not in dims]
                parts.append((log_prob.sum(others) if others else log_prob).reshape(-1))
        return functools.reduce(operator.add, parts)


@dataclass(frozen=True)
class State:
    """Values of all latent sites; value, slope and log joint density of each k-hot site, in its blocks."""

    params: Values
    points: dict[str, Point]


class GivenKHot:
    """A model whose k-hot sites take the values currently stored here; unlike a closure it can be pickled."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self.values: Values = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with poutine.condition(data=self.values):
            return self.model(*args, **kwargs)


class Start:
    """Where chains begin: at given k-hot vectors or draws from the prior, and elsewhere as HMC does by default."""

    def __init__(self, given: Values) -> None:
        self.given = given

    def __call__(self, site: dict[str, Any]) -> Tensor:
        name, fn = site["name"], site["fn"]
        if not is_khot(fn) or name not in self.given:
            return fn().detach() if fn.support.is_discrete else init_to_uniform(site)
        value = self.given[name]
        if value.shape != fn.shape() or not fn.support.check(value).all():
            raise ValueError(
                f"`initial_params` must have k-hot vectors of shape {tuple(fn.shape())} under {fn.support} for "
                f"{name!r}, but got {value}"
            )
        return value.to(base_law(fn).parameter.dtype)


def possible_sizes(design: ConditionalPoisson) -> Tensor:
    """Whether each size from low to high is possible, ``(*batch, sizes)``, for a design with a prior over its size."""
    return log_size_law(design.logits, size_of(design)) > -torch.inf


def excluded_between(design: SamplingDesign) -> int | None:
    """A size that some row excludes while it allows smaller and larger ones; None if there is none."""
    if not isinstance(design, ConditionalPoisson) or design.log_prior is None:
        return None
    possible = possible_sizes(design)
    counts = possible.long()
    between = (counts.cumsum(-1) > 0) & (counts.flip(-1).cumsum(-1).flip(-1) > 0)
    gaps = (between & ~possible).nonzero()
    return size_of(design).low + int(gaps[0, -1]) if len(gaps) else None


def _check_gaps(name: str, design: SamplingDesign) -> None:
    """Checks that a chain, which changes a size by one, can get from each possible size to all others."""
    if (size := excluded_between(design)) is not None:
        raise NotImplementedError(
            f"KHotSwap changes the size of {name!r} by one, but its prior excludes size {size} and allows smaller and "
            "larger ones: give it a finite log_prior, and drop the samples of that size. If log_prior is fixed, the "
            "others have the posterior that you want"
        )


def is_khot(fn: Any) -> bool:
    """Whether a law is a sampling design whose sizes do not change with its probabilities."""
    return isinstance(base_law(fn), SamplingDesign) and not isinstance(base_law(fn), PhantomUnit)


def _log_prob(term: Any) -> Tensor:
    """The log-probability of a site, at least in float32: for a design in a half type, before it is rounded."""
    log_prob, fn = term["log_prob"], term["fn"]
    if is_half(log_prob.dtype) and is_khot(fn):
        log_prob = scale_and_mask(unrounded_law(fn).log_prob(term["value"]), term["scale"], term["mask"])
    return wide(log_prob)


def total_log_prob(trace: Any) -> Tensor:
    """The log joint density of a trace, with the terms and their sum at least in float32."""
    return functools.reduce(operator.add, (_log_prob(term).sum() for term in terms_from(trace)))


def terms_from(trace: Any, name: str | None = None) -> list[Any]:
    """The sites, all or from this one onwards, that contribute to the log joint density, in the model's order."""
    nodes = list(trace.nodes.values())
    later = nodes if name is None else nodes[list(trace.nodes).index(name) :]
    return [
        node
        for node in later
        if node["type"] == "sample" and not site_is_subsample(node) and not node["infer"].get("_deterministic")
    ]


def nesting_of(trace: Any) -> int:
    """The number of batch dimensions of the sites of a trace."""
    return max(len(term["fn"].batch_shape) for term in terms_from(trace))


def _has_rows(term: Any, plate: Any) -> bool:
    """Whether a term is in this plate, with one entry for each of its rows."""
    shape = term["log_prob"].shape
    inside = any(frame.name == plate.name for frame in term["cond_indep_stack"])
    return inside and len(shape) >= -plate.dim and shape[plate.dim] == plate.size


class Latents(NamedTuple):
    """Names of the latent sites of a model."""

    khot: list[str]
    continuous: list[str]
    enumerated: list[str]  # discrete sites to be summed out

    @property
    def sampled(self) -> list[str]:
        return [*self.khot, *self.continuous]


def latent_sites(trace: Any) -> Latents:
    """The latent sites of a trace.

    Raises:
        TypeError: If there are discrete sites that are neither k-hot nor marked for enumeration.
        NotImplementedError: If rows are subsampled.
    """
    found = Latents([], [], [])
    for name, node in trace.iter_stochastic_nodes():
        fn = node["fn"]
        if site_is_subsample(node):
            if fn.subsample_size is not None and fn.subsample_size < fn.size:
                raise NotImplementedError(f"MCMC needs all rows, but the plate {name!r} subsamples")
        elif is_khot(fn):
            found.khot.append(name)
        elif isinstance(base_law(fn), PhantomUnit):
            raise TypeError(
                f"KHotSwap is for designs of fixed sizes, but {name!r} is a PhantomUnit; for a random size, use "
                "ConditionalPoisson(logits=logits, k=(low, high))"
            )
        elif not fn.support.is_discrete:
            found.continuous.append(name)
        elif fn.has_enumerate_support and node["infer"].get("enumerate") == "parallel":
            found.enumerated.append(name)
        else:
            raise TypeError(
                f"KHotSwap moves sampling designs and, with `continuous`, continuous sites, but {name!r} has the "
                f'distribution {fn}; infer={{"enumerate": "parallel"}} sums such a site out. '
                f"If it is the size of a k-hot site, give that site {PRIOR_OVER_SIZE}"
            )
    return found
