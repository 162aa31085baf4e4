"""Markov chains on k-hot latent sites, for ``pyro.infer.mcmc``."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.mcmc import HMC
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from khot._validation import check_function, checked_count, checked_share

from .chains import ADVICE, PLATE, Acceptance, InChains
from .log_joint import LogJoint
from .paths import Path, PathLength
from .sites import GivenKHot, KHotSite, Latents, Start, State, Values, latent_sites, nesting_of
from .swaps import Move, Proposals, log_ratio

MAX_TRIES = 100  # draws from the prior until one has a finite log joint density, as in Pyro's HMC
TRIALS = 4  # swaps that test whether the rows of a plate are independent, as the plate promises


class KHotSwap(MCMCKernel):
    r"""Metropolis-Hastings on the k-hot latent sites of a model, with gradient-informed swaps of two units.

    This is a kernel for ``pyro.infer.mcmc.MCMC`` that leaves the posterior exactly invariant. A step visits all
    sites. At each it proposes to remove one unit from a k-hot vector and to add another one. The derivative of the log
    joint density with respect to the vector favours swaps to more probable vectors; these proposals are mixed with
    uniform ones (``khot.infer.swaps`` has the formulas). A step costs one evaluation of the log joint density and its
    gradient, and O(n) more. With a :class:`~khot.ConditionalPoisson` that has a range of sizes, some of the moves add
    or remove a unit. The guide to MCMC on k-hot sites has an example of each of the following.

    **Continuous sites** alternate with the k-hot ones, updated by a kernel for the model in which these are given:
    ``continuous=NUTS``, or ``continuous=lambda given: NUTS(given, max_tree_depth=5)``.

    **Other discrete sites**, such as an indicator of outliers, are summed out if the model marks them with
    ``infer={"enumerate": "parallel"}``; ``infer_discrete`` gives their posterior from the samples.

    **Plates.** If the log joint density factorises over the rows of a plate, each row has its own swap, accepted
    independently. For this, the k-hot site and all later sites of the model must be in the plate, so sites outside all
    plates, such as priors of scales, belong before it. Otherwise, and over batch dimensions that ``to_event`` turns
    into one event, a step swaps units of a single row, chosen with the same weights.

    **Chains in a batch.** ``KHotSwap(model, chains=64)`` moves 64 chains at once, each with its own start, in one
    evaluation of the log joint density. The model has to be written as for ``vectorize_particles=True``: values get one
    more batch dimension on the left, so ``(inputs * x).sum(-1)`` works and ``inputs @ x`` does not. ``MCMC`` then has
    ``chains`` times its ``num_chains`` in ``get_samples(group_by_chain=True)``. The first dimension of
    ``initial_params`` is the chain. A continuous kernel moves the continuous sites of all chains together, with one
    step size, and accepts for all of them at once, so long trajectories of many chains are slow.

    **Which gradient.** The log joint density is differentiated at the k-hot vector as if it were real-valued. A wrong
    gradient reduces the acceptance rate but never exactness. Without a gradient (a model that tests ``x > 0``, a design
    whose ``log_prob`` has none) all swaps are uniform.

    Any design of a fixed size with a ``log_prob`` can be a prior, and so can ConditionalPoisson with a range of sizes,
    but not ``PhantomUnit``, whose sizes may change with its probabilities. Every swap must lead to a vector of positive
    probability; if a design has only few of these, as ``Systematic`` does, a chain may not reach all of them.

    Args:
        model: Pyro model with at least one latent k-hot site and a fixed set of sites.
        continuous: For latent sites that are not k-hot: ``HMC`` or ``NUTS``, or a function that makes such a kernel for
            the model with its k-hot sites given. Not with ``jit_compile``, which would bake in the first k-hot values.
        uniform_share: Share u of uniform swaps among the proposals, in [0, 1]; with 1 no gradient is computed.
        swaps_per_step: How often a step visits the k-hot sites.
        swaps_per_proposal: Number of swaps that are proposed together and accepted or rejected together; by default, it
            is adapted during warm-up. It is 1 if the size is not fixed, and if rows do not factorise. A tenth of the
            proposals are single swaps in any case, so that a chain reaches all vectors.
        chains: Number of chains in a batch; None for one chain, for a model that takes no further dimension.

    Raises:
        TypeError: In ``setup``, if ``continuous`` gives no HMC or NUTS kernel, or a discrete site is neither a design
            of a fixed size nor marked for enumeration.
        ValueError: In ``setup``, if the model has no k-hot site, has continuous ones without ``continuous``, is not
            written for ``chains``, or no start of positive density is found.
        NotImplementedError: In ``setup``, if the model subsamples, a design has no ``log_prob``, or ``continuous`` is
            compiled, or a prior over sizes excludes one between others; there or in a later step, if a design has a
            size that depends on another latent site.

    References:
        [1] Zanella (2020), "Informed proposals for local MCMC in discrete spaces", JASA 115(530).
        [2] Grathwohl, Swersky, Hashemi, Duvenaud, Maddison (2021), "Oops I took a gradient", ICML.

    Example:
        >>> import pyro
        >>> from pyro.infer import MCMC
        >>> def model():
        ...     x = pyro.sample("x", ConditionalPoisson(logits=torch.zeros(4), k=2))
        ...     pyro.factor("gain", 50 * x[0])
        >>> mcmc = MCMC(KHotSwap(model), num_samples=5, warmup_steps=20, disable_progbar=True)
        >>> mcmc.run()
        >>> mcmc.get_samples()["x"][:, 0]
        tensor([1., 1., 1., 1., 1.])
    """

    initial_params: Values | None = None  # k-hot values as they are, others unconstrained

    def __init__(
        self,
        model: Callable[..., Any],
        continuous: Callable[[Callable[..., Any]], MCMCKernel] | None = None,
        *,
        uniform_share: float = 0.1,
        swaps_per_step: int = 1,
        swaps_per_proposal: int | None = None,
        chains: int | None = None,
    ) -> None:
        check_function("model", model, "the arguments of MCMC.run")
        if continuous is not None:
            if isinstance(continuous, MCMCKernel):
                raise TypeError(
                    f"`continuous` must be a kernel class or a function of the model, but got a kernel, {continuous!r}"
                )
            check_function("continuous", continuous, "the model with its k-hot sites given, such as NUTS")
        checked_share("uniform_share", uniform_share)
        self.model, self.continuous = model, continuous
        self.uniform_share = float(uniform_share)
        self.swaps_per_step = checked_count("swaps_per_step", swaps_per_step)
        self.swaps_per_proposal = (
            None if swaps_per_proposal is None else checked_count("swaps_per_proposal", swaps_per_proposal)
        )
        self.chains = None if chains is None else checked_count("chains", chains)
        self.transforms: dict[str, Any] | None = None  # of samples: for the continuous sites, and to group by chain
        self._reset()

    def _reset(self) -> None:
        self.initial_params = None
        self._inner: HMC | None = None
        self._state: State | None = None
        self._sites: list[KHotSite] = []
        self._last: Values = {}  # the values that the previous step returned
        self._step = 0
        self._acceptance: dict[str, Acceptance] = {}
        self._lengths: dict[str, PathLength] = {}

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        self._warmup_steps, self._args, self._kwargs = warmup_steps, args, kwargs
        self._state, self._step, self._inner, self._last = None, 0, None, {}
        self._in_chains = None if self.chains is None else InChains(self.model, self.chains)
        self._given = GivenKHot(self._in_chains or self.model)
        trace, latents, given = self._start(dict(self.initial_params or {}))
        params = {name: trace.nodes[name]["value"].detach() for name in latents.khot}
        self._sites = [KHotSite.of(trace, name) for name in latents.khot]
        self._acceptance = {name: Acceptance() for name in latents.khot}
        self._log_joint = LogJoint(self._given.model, args, kwargs, self.uniform_share < 1)
        if latents.continuous:
            params |= self._setup_inner(params, {name: given[name] for name in latents.continuous if name in given})
        if latents.enumerated:
            self._log_joint.sum_out(nesting_of(trace))
        self.initial_params = params
        self._log_joint.sites = self._sites
        self._log_joint.check_sizes(params)
        self._sites = self._log_joint.sites = [self._in_blocks(site, params) for site in self._sites]
        self._lengths = {site.name: self._first_length(site) for site in self._sites}
        self.transforms = transforms = self._log_joint.transforms
        if self._in_chains is not None:
            self.transforms = {
                name: self._in_chains.by_chain(name, transforms.get(name), value) for name, value in params.items()
            }

    def _first_length(self, site: KHotSite) -> PathLength:
        """The number of swaps in a proposal before warm-up, which adapts it unless the user gave it."""
        if self.swaps_per_proposal is None:
            return PathLength(site.useful_swaps)
        return PathLength(site.most_swaps, min(self.swaps_per_proposal, site.most_swaps))

    def _start(self, given: Values) -> tuple[Any, Latents, Values]:
        """A run of the model, its latent sites, and the given values in the shape of the plate of the chains."""
        if self._in_chains is None:
            trace = self._first_trace(given)
            latents = latent_sites(trace)
            self._check_sites(latents, given)
            return trace, latents, given
        wrong = {name: tuple(x.shape) for name, x in given.items() if x.shape[:1] != (self.chains,)}
        if wrong:
            raise ValueError(f"`initial_params` must start with the dimension of {self.chains} chains, but got {wrong}")
        of_chains = ({name: values[chain] for name, values in given.items()} for chain in range(self._in_chains.number))
        traces = list(map(self._first_trace, of_chains))
        latents = latent_sites(traces[0])
        self._check_sites(latents, given)
        self._in_chains.learn(traces[0])
        names = [*latents.sampled, *latents.enumerated]
        trace = self._in_chains.trace_of(traces, names, *self._args, **self._kwargs)
        return trace, latents, {name: self._in_chains.inside(name, value) for name, value in given.items()}

    def _first_trace(self, given: Values) -> Any:
        """A run of the model from its prior, with the given values, that has a finite log joint density."""
        model = InitMessenger(Start(given))(self.model)
        for _ in range(MAX_TRIES):
            with torch.no_grad(), pyro.validation_enabled(False):
                trace = poutine.trace(model).get_trace(*self._args, **self._kwargs)
                latent_sites(trace)  # its errors are more helpful than those of a log_prob
                trace.compute_log_prob()
            if math.isfinite(float(trace.log_prob_sum())):
                return trace
        raise ValueError(
            f"none of {MAX_TRIES} draws of the prior has a finite log joint density: give `initial_params` to MCMC"
        )

    def _check_sites(self, latents: Latents, given: Values) -> None:
        rest = latents.continuous
        if not latents.khot:
            raise ValueError("`model` must have a latent k-hot site, a sampling design that is not observed")
        if rest and self.continuous is None:
            raise ValueError(f"`continuous`, such as NUTS, must be given for the sites {rest}, which are not k-hot")
        unknown = sorted({*given} - {*latents.sampled})
        if unknown:
            raise ValueError(f"`initial_params` has values for {unknown}, but the latent sites are {latents.sampled}")
        missing = sorted({*rest} - {*given})
        if missing and len(missing) < len(rest):
            raise ValueError(
                f"`initial_params` must have values of all continuous sites or none, but has none of {missing}"
            )

    def _setup_inner(self, params: Values, given: Values) -> Values:
        """Makes the kernel of the continuous sites, and returns their unconstrained values."""
        assert self.continuous is not None
        self._given.values = dict(params)
        inner = self.continuous(self._given)
        if not isinstance(inner, HMC):
            raise TypeError(f"`continuous` must return an HMC or NUTS kernel, but returned {inner!r}")
        if inner._jit_compile:
            raise NotImplementedError("`continuous` must not use jit_compile, which would bake in the k-hot values")
        if given:
            inner.initial_params = given
        inner.setup(self._warmup_steps, *self._args, **self._kwargs)
        self._inner, self._log_joint.transforms = inner, inner.transforms
        return dict(inner.initial_params)

    def _in_blocks(self, site: KHotSite, params: Values) -> KHotSite:
        """The site, split into as many independent blocks as possible, at least one for each chain."""
        site = self._log_joint.separable(site, params)
        if self._factorises(site, params):
            return site
        site = site.in_plates({PLATE} if self._in_chains else set())
        if self._in_chains and not (site.plates and self._factorises(site, params)):
            raise ValueError(f"{ADVICE}; the log joint density mixes the chains of {site.name!r}")
        return site

    def _factorises(self, site: KHotSite, params: Values) -> bool:
        """Whether swaps in some blocks change the log joint density of no other block, tested in a few random cases.

        In each case the blocks of one half are swapped. A random numbering and its binary digits make the halves, so
        any two of up to 16 blocks are in different halves at least once.
        """
        value = site.blocks(params[site.name])
        if len(value) == 1:
            return True
        # The log joint density is that of the blocks to be tested.
        self._log_joint.sites = [site if other.name == site.name else other for other in self._sites]
        number = torch.randperm(len(value), device=value.device)
        digits = min(TRIALS, (len(value) - 1).bit_length())
        halves = ((number >> trial % digits) % 2 == 0 for trial in range(TRIALS))
        return all(self._swaps_stay_apart(site, params, value, half) for half in halves)

    def _swaps_stay_apart(self, site: KHotSite, params: Values, value: Tensor, half: Tensor) -> bool:
        proposals = Proposals.of(value, torch.zeros_like(value), site.sizes)
        swapped = torch.where(site.possible[:, None, None], proposals.draw(1.0).of(value), value)
        mixed = torch.where(half[:, None, None], swapped, value)
        here, there, found = (
            self._log_joint({**params, site.name: site.unblocked(x)}).points[site.name].log_joint
            for x in (value, swapped, mixed)
        )
        tolerance = torch.finfo(here.dtype).eps ** 0.5
        return torch.allclose(found, torch.where(half, there, here), rtol=tolerance, atol=tolerance, equal_nan=True)

    def cleanup(self) -> None:
        if self._inner is not None:
            self._inner.cleanup()
        self._reset()

    def end_warmup(self) -> None:
        if self._inner is not None:
            self._inner.end_warmup()

    def logging(self) -> "OrderedDict[str, str]":
        means = [mean.value() for mean in self._acceptance.values()]
        shown = OrderedDict([("acc. swaps", f"{torch.cat(means).mean():.3f}")])
        if self._inner is not None:
            shown |= self._inner.logging()
        return shown

    def diagnostics(self) -> dict[str, Any]:
        inner = {} if self._inner is None else self._inner.diagnostics()
        rates = {name: mean.value().tolist() for name, mean in self._acceptance.items()}
        if self.chains is None:
            rates = {name: rate[0] for name, rate in rates.items()}
        lengths = {name: length.mean for name, length in self._lengths.items()}
        return {**inner, "acceptance rate of swaps": rates, "swaps per proposal": lengths}

    def sample(self, params: Values) -> Values:
        if self._step == self._warmup_steps:
            self._acceptance = {name: Acceptance() for name in self._acceptance}
        self._step += 1
        for _ in range(self.swaps_per_step):
            for site in self._sites:
                params = self._swap(site, params)
        return dict(params) if self._inner is None else self._move_continuous(self._inner, params)

    def _move_continuous(self, inner: HMC, params: Values) -> Values:
        khot = {site.name: params[site.name] for site in self._sites}
        if any(value is not self._last.get(name) for name, value in params.items()):
            self._given.values = khot
            inner.clear_cache()  # its potential energy belongs to other values
        rest = {name: value for name, value in params.items() if name not in khot}
        self._last = {**khot, **inner.sample(rest)}
        return dict(self._last)

    def _swap(self, site: KHotSite, params: Values) -> Values:
        """Proposes a swap in each block of a site."""
        possible = site.possible
        if not site.moves:
            return params
        state, length, share = self._at(params), self._lengths[site.name].draw(), self.uniform_share
        here = state.points[site.name]
        move: Move = here.proposals.draw(share) if length == 1 else Path.draw(here, length, share)
        value = move.of(here.value)
        if not site.moves_everywhere:
            value = torch.where(possible[:, None, None], value, here.value)
        proposed = self._log_joint({**params, site.name: site.unblocked(value)})
        probability = log_ratio(move, here, proposed.points[site.name], share).clamp(max=0).exp()
        if not site.moves_everywhere:
            probability = probability * possible
        accepted = torch.rand_like(probability) < probability
        self._acceptance[site.name].add(probability, possible, self.chains or 1)
        if self.swaps_per_proposal is None and self._step <= self._warmup_steps:
            self._lengths[site.name].adapt(float(probability.sum() / possible.sum()), length)
        if not accepted.any():
            return params
        if len(accepted) > 1:
            proposed = self._mixed(site, accepted, proposed, state)
        self._state = proposed
        return proposed.params

    def _mixed(self, site: KHotSite, accepted: Tensor, proposed: State, old: State) -> State:
        """The proposed state in the accepted blocks of a site, and the old one elsewhere."""
        mixed = proposed.points[site.name].mixed(accepted, old.points[site.name])
        params = {**old.params, site.name: site.unblocked(mixed.value)}
        if len(self._sites) > 1 and any(other.plate_names != {PLATE} for other in self._sites):
            return self._log_joint(params)  # slopes of other sites may depend on several blocks
        return State(params, {name: point.mixed(accepted, old.points[name]) for name, point in proposed.points.items()})

    def _at(self, params: Values) -> State:
        """The log joint density and its slopes at these values, computed again if anything has changed."""
        state = self._state
        if state is None or any(params[name] is not value for name, value in state.params.items()):
            state = self._state = self._log_joint(params)
        return state
