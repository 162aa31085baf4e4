"""A guide of independent conditional Poisson designs for the k-hot sites of a model."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroParam
from pyro.ops.tensor_utils import periodic_repeat
from torch import Tensor
from torch.distributions import constraints

from khot._contents import can_look
from khot._notes import feels_between_vertices
from khot._validation import check_function, checked_real
from khot.distributions import ConditionalPoisson, PhantomUnit, Pivotal, SamplingDesign, Systematic
from khot.distributions.base import unrounded
from khot.distributions.sizes import size_of
from khot.estimators import ReinMax
from khot.estimators.wrapper import base_law, check_estimator, wide
from khot.kernels.threshold import solve_threshold

from .sites import excluded_between, is_khot, possible_sizes

Estimator = Callable[[SamplingDesign], TorchDistribution]
DRAWS = 100  # rows that test whether the prior allows all that the guide can draw


class _Site(NamedTuple):
    """The settings of a site's guide besides its logits."""

    size: Any  # as `k` of ConditionalPoisson
    dtype: torch.dtype
    event_dim: int
    plates: tuple[str, ...]

    def law(self, logits: Tensor, wrap: Estimator | None) -> TorchDistribution:
        design = ConditionalPoisson(logits=logits.to(self.dtype), k=self.size)
        law: TorchDistribution = design if wrap is None else wrap(design)
        return law.to_event(self.event_dim - 1)


@feels_between_vertices
class AutoKHot(AutoGuide):
    r"""An autoguide for the k-hot sites of a model: independent conditional Poisson designs.

    .. math:: q(x) &= \prod_{\text{sites, rows}} q(x_r), \\ q(x_r) &\propto \exp \langle \theta_r, x_r \rangle
        \text{ on the support of } x_r

    Each row of each site has a :class:`~khot.ConditionalPoisson` with the size, or the range of sizes, that the site
    has in the model. Its logits :math:`\theta_r` are parameters. All latent sites of the model must be k-hot.
    Continuous sites need an autoguide of their own::

        guide = AutoGuideList(model)
        guide.append(AutoKHot(poutine.block(model, expose=["x"])))
        guide.append(AutoNormal(poutine.block(model, hide=["x"])))

    The estimator carries the gradient of a draw back to the logits; :class:`~khot.ReinMax` is the recommended one. With
    ``estimator=None`` the draws have no gradient. Pyro's ELBOs then use the score function, or sum over all k-hot
    vectors under ``config_enumerate(guide)`` and ``TraceEnum_ELBO``.

    The logits start at those of the prior, plus normal noise. If the prior is another design, the start is the
    conditional Poisson design with the same inclusion probabilities. Units that the prior excludes, or includes for
    certain, stay excluded or included, and so do the smallest and the largest sizes if a prior over sizes excludes
    them. The guide draws all other vectors of these sizes, so the ELBO would be minus infinity under a prior that
    excludes some of them, as ``Systematic`` does; this is an error. For a subsampled plate there are logits for all
    rows of the plate. The guide has the sizes that the model had at its first call. It has no ``median`` and no
    ``quantiles``, because k-hot vectors have no order; :meth:`designs` returns its designs, which ``mean`` and ``mode``
    summarise.

    Args:
        model: Pyro model whose latent sites are all sampling designs of a fixed size, or ConditionalPoisson with a
            range of sizes.
        estimator: Function that wraps each design; None for bare designs.
        init_scale: Standard deviation of the noise that is added to the initial logits, at least 0. It breaks ties
            between units that the prior and the likelihood treat alike.
        create_plates: A function of the model's arguments that returns its plates, as for Pyro's other autoguides.

    Raises:
        TypeError: At the first call, if a latent site is not k-hot.
        ValueError: At the first call, if the model has no latent k-hot site.
        NotImplementedError: At the first call, if the rows of a subsampled plate differ in their sizes, a plate is
            sequential, or a prior excludes vectors of the guide.

    Example:
        >>> import pyro
        >>> from pyro.infer import SVI, TraceMeanField_ELBO
        >>> def model():
        ...     x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
        ...     pyro.factor("gain", 3 * x[..., 0] + 2 * x[..., 3])
        >>> guide = AutoKHot(model)
        >>> svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceMeanField_ELBO())
        >>> for _ in range(100):
        ...     _ = svi.step()
        >>> guide.designs()["x"].mode
        tensor([1., 0., 0., 1.])
    """

    def __init__(
        self,
        model: Callable[..., Any],
        estimator: Estimator | None = ReinMax,
        *,
        init_scale: float = 0.1,
        create_plates: Callable[..., Any] | None = None,
    ) -> None:
        check_function("model", model, "the arguments of the guide")
        if estimator is not None:
            check_estimator("estimator", estimator)
        if create_plates is not None:
            check_function("create_plates", create_plates, "the arguments of the guide")
        if not 0 <= checked_real("init_scale", init_scale) < math.inf:
            raise ValueError(f"`init_scale` must be finite and at least 0, but got {init_scale}")
        super().__init__(model, create_plates=create_plates)
        self.estimator = estimator
        self._init_scale = float(init_scale)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        try:
            self._set_up_sites()
        except Exception:
            self.prototype_trace = None  # otherwise the next call would take the sites found so far for all sites
            raise

    def _set_up_sites(self) -> None:
        self.logits = PyroModule()
        self._sites: dict[str, _Site] = {}
        trace: Any = self.prototype_trace
        for name, node in trace.iter_stochastic_nodes():
            fn, frames = node["fn"], node["cond_indep_stack"]
            _check_law(name, fn)
            _check_support(name, node)
            design, start = base_law(fn), _start(base_law(fn))
            for frame in frames:
                if frame.full_size and frame.full_size != frame.size:
                    _check_one_size(name, frame.name, design)
                    start = periodic_repeat(start, frame.full_size, frame.dim - fn.event_dim).contiguous()
            start = start + self._init_scale * torch.randn_like(start)
            deep_setattr(self.logits, name, PyroParam(start, constraints.real, fn.event_dim))
            plates = tuple(frame.name for frame in frames)
            self._sites[name] = _Site(_size(design), design.dtype, fn.event_dim, plates)
        if not self._sites:
            raise ValueError("`model` must have a latent k-hot site, a sampling design that is not observed")

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws from the guide, in the plates of the model: a value for each site, by name."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, site in self._sites.items():
            with ExitStack() as stack:
                for plate in site.plates:
                    stack.enter_context(plates[plate])
                logits = attrgetter(name)(self.logits)  # inside its plates, which select the rows of the subsample
                result[name] = pyro.sample(name, site.law(logits, self.estimator))
        return result

    @torch.no_grad()
    def designs(self) -> dict[str, ConditionalPoisson]:
        """The current design of each site, for all rows of its plates, without its estimator and without a gradient.

        Raises:
            RuntimeError: If the guide has not been called yet and knows no sites.
        """
        if self.prototype_trace is None:
            raise RuntimeError("AutoKHot has no designs before its first call, which looks at the sites of the model")
        return {
            name: ConditionalPoisson(logits=attrgetter(name)(self.logits).detach().to(site.dtype), k=site.size)
            for name, site in self._sites.items()
        }

    def median(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        raise _no_order("median")

    def quantiles(self, quantiles: Any, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError."""
        raise _no_order("quantiles")


def _no_order(wanted: str) -> NotImplementedError:
    return NotImplementedError(
        f"AutoKHot has no {wanted}, because k-hot vectors have no order: guide.designs() has the design of each site, "
        "with the inclusion probabilities as `mean` and the most probable vector as `mode`"
    )


def _check_law(name: str, fn: Any) -> None:
    if isinstance(base_law(fn), PhantomUnit):
        raise TypeError(
            f"AutoKHot is for designs of fixed sizes, but {name!r} has the distribution {fn}; for random sizes use "
            "ConditionalPoisson(logits=logits, k=(low, high)), or write the guide of this site by hand"
        )
    if not is_khot(fn):
        raise TypeError(
            f"AutoKHot is for k-hot sites, but {name!r} has the distribution {fn}; combine it with a guide of the "
            "other sites: AutoGuideList, and AutoKHot(pyro.poutine.block(model, expose=[...])) of the k-hot ones"
        )


@torch.no_grad()
def _start(design: Any) -> Tensor:
    """Logits of the conditional Poisson law with the inclusion probabilities of a design, at least in float32."""
    if isinstance(design, ConditionalPoisson) and design.log_prior is not None:
        return _start_of_prior(design)
    if not isinstance(design, ConditionalPoisson):
        design = ConditionalPoisson(probs=wide(unrounded(design).mean), k=size_of(design))
    return wide(design.logits.detach()).clone()


def _start_of_prior(design: ConditionalPoisson) -> Tensor:
    """The logits, shifted so that the expected size under the range alone, without its prior, is about the same."""
    logits = wide(design.logits.detach())
    expected = design.mean.detach().sum(-1).clamp(min=0.5, max=design.event_shape[0] - 0.5)
    shift = solve_threshold(logits, expected)
    return logits - shift.unsqueeze(-1).to(logits.dtype).nan_to_num(0.0, 0.0, 0.0)


@torch.no_grad()
def _check_support(name: str, node: Any) -> None:
    """Checks that the prior of a site allows what the guide draws; for designs that depend on an order, by draws."""
    design, problem = base_law(node["fn"]), f"AutoKHot would have an ELBO of minus infinity at the site {name!r}"
    if (size := excluded_between(design)) is not None:
        raise NotImplementedError(
            f"{problem}: its prior excludes size {size} and allows smaller and larger ones; give it a finite log_prior"
        )
    if not isinstance(design, Pivotal | Systematic):
        return
    number = math.ceil(DRAWS / max(1, design.batch_shape.numel()))
    guide = ConditionalPoisson(logits=_start(design).to(design.dtype), k=size_of(design))
    value = guide.sample((number,), generator=torch.Generator(design.k.device).manual_seed(0))
    try:
        log_prob: Any = scale_and_mask(node["fn"].log_prob(value), mask=node["mask"])
    except NotImplementedError:  # an ELBO that needs the missing part raises this itself
        return
    if (log_prob == -torch.inf).any():
        raise NotImplementedError(
            f"{problem}: its prior {design} excludes vectors that have its size, so take one that allows all of them, "
            "such as ConditionalPoisson(probs=probs) with the same inclusion probabilities"
        )


def _ends(design: Any) -> tuple[Any, ...]:
    """The size of the rows, or the two ends of the possible ones, as ints if they are the same in all rows."""
    size = size_of(design)
    ends = size[:2] if isinstance(size, tuple) else (size,)
    if isinstance(design, ConditionalPoisson) and design.log_prior is not None:
        possible = possible_sizes(design).long()
        ends = (size.low + possible.argmax(-1), size.high - possible.flip(-1).argmax(-1))
    return tuple(_number(end) if isinstance(end, Tensor) else end for end in ends)


def _number(size: Tensor) -> int | Tensor:
    if can_look(size) and size.numel() and size.min() == size.max():
        return int(size.min())
    return size.clone()


def _size(design: Any) -> Any:
    ends = _ends(design)
    return ends if len(ends) == 2 else ends[0]


def _check_one_size(name: str, plate: str, design: Any) -> None:
    if any(isinstance(end, Tensor) for end in _ends(design)):
        raise NotImplementedError(
            f"AutoKHot needs the sizes of all rows, but the plate {plate!r} subsamples the rows of {name!r}, which "
            "differ in `k`"
        )
