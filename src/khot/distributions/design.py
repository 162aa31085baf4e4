"""The base of all sampling designs: laws on the k-hot vectors in {0, 1}ⁿ, every draw with exactly k ones.

Here is what they have in common: the two parametrisations, their checks, shapes, ``expand``, enumeration, and the
moments that follow from the first two orders of inclusion probabilities. A design adds its law.
"""

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike

from khot._contents import looks_at_contents
from khot._distributed.batch import SpreadBatch
from khot._distributed.placements import is_dtensor
from khot._torch_internals import is_tracing
from khot._tracing import overrides_functions, shape_of
from khot._validation import check_flag, check_function, checked_positive
from khot.constraints import k_hot
from khot.kernels.exact.small_numbers import log_odds
from khot.laws.kept import Kept
from khot.relaxations import sigmoid_topk
from khot.relaxations.hard import positions
from khot.relaxations.mask_log_odds import mask_log_odds

from ._arguments import broadcast_with_k, checked_param, checked_size, in_short, shapes_of
from .base import draw, is_half
from .checked import CheckedDesign
from .members import traced_through
from .rounding import unrounded

POSTERIOR_ADVICE = (
    "(Pyro's compute_marginals and sample_posterior give nothing but one logit for each k-hot vector, which no design "
    "can hold. There, sample the number of a vector, i ~ khot.infer.subset_categorical(design), and take "
    "khot.infer.subset_vector(i, n, k))"
)

Relaxation = Callable[[Tensor, Any, Any], Tensor]


class SamplingDesign(CheckedDesign):
    r"""A distribution over the k-hot vectors of length n; the base class, to which a subclass adds its law.

    Its parameter is either ``probs``, the inclusion probabilities :math:`\pi_i = P(x_i = 1)`, whose sum is k, or
    ``logits``, real scores of which ``probs = relaxation(logits, k, temperature)``, computed at first use. All results
    are differentiable in the parameter. Exact 0 and 1 in ``probs`` are legal: such units are drawn never and always.

    ``log_prob`` is ``-inf``, with zero gradient, outside of the support; with validation on, values there are errors.

    In Pyro a site is enumerated by ``infer={"enumerate": "parallel"}``; but one made of several latents by
    ``to_event(1)`` is not, and ``config_enumerate`` passes it over without a word: declare the rows independent by a
    plate instead. What asks for a Categorical, infer_discrete for one, takes :func:`~khot.subset_categorical`. Missing
    rows of data are left out by ``pyro.sample(..., obs=x, obs_mask=seen)``, ``seen`` of the batch shape.

    A subclass defines ``sample`` and what it has of ``_log_prob`` (of k-hot values: the rest is done here), ``entropy``
    and ``pairwise_inclusion``. From a ``_log_prob`` alone the last two are computed here, exactly, as sums over all
    C(n, k) vectors, if these are at most ``MAX_SUPPORT`` (1,000,000): that takes as many evaluations of ``_log_prob``.
    What a design lacks raises NotImplementedError and names the designs that have it. One whose logits are natural
    parameters overrides the lazy properties ``probs`` and ``logits``, each computed from the other; one that does not
    draw with the probabilities ``probs`` overrides ``mean``; one with a known mode overrides ``mode``. ``expand`` and
    copies work without further ado as long as every tensor among the attributes starts with ``batch_shape``.

    The parameter may be a ``torch.distributed.tensor.DTensor``, and so are the results. Each process then works on the
    rows that it has, and draws follow one seed, whatever the number of processes. Rows that are cut are gathered when
    the design is made, but those of order sampling and of :class:`~khot.ConditionalPoisson`: for these the guide "at
    scale" lists what sums and candidates give, and what gathers the rows when it is called.

    With a parameter in bfloat16 or float16 every result is the rounding of that in float32, and draws are the same. A
    sum of rounded probabilities is not a size: ``probs`` in these types need ``k`` unless rounding leaves no doubt.
    They are then taken for roundings of probabilities that sum to k.

    A design follows its parameter: after an optimizer step every result is that of a design made of the new contents.
    What its methods have in common, such as ``probs`` or a product tree, is computed once, at the first call that needs
    it, and again when the parameter, ``k`` or ``temperature`` has changed. A change is whatever alters an entry; on an
    accelerator, where to compare entries would mean to wait for it, every write but one into ``.data``. Tensors that a
    relaxation of your own holds are not looked at.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``; a relaxation may take ``-inf`` to exclude a unit and ``inf`` to include it.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape of the parameter, which it
            may extend, as an enumerated one does. Required with ``logits``; may be given with ``probs``, whose sum it
            must then equal up to rounding, and is required with long rows of them in a half type.
        relaxation: Map ``relaxation(logits, k, temperature)`` onto the capped simplex.
        temperature: Softness of the relaxation, a positive number or a tensor that broadcasts to the batch shape.
        validate_args: Whether to check the contents of tensors, as in all of torch.distributions. Shapes, dtypes and
            numbers are always checked.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.
    """

    size_varies = False  # whether draws of a row may differ in their number of ones, from `k` to `largest_k`
    _settings: ClassVar[tuple[str, ...]] = ()  # a subclass's own arguments, as `repr` shows them
    # The setting with which a design has all that its class defines; "" for any, None where it depends on another one.
    _complete_with: ClassVar[str | None] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._has_own_probs = cls._has_own_probs or "probs" in vars(cls)

    def __init__(
        self,
        probs: Tensor | None = None,
        logits: Tensor | None = None,
        k: int | Tensor | None = None,
        *,
        relaxation: Relaxation = sigmoid_topk,
        temperature: float | Tensor = 1.0,
        validate_args: bool | None = None,
    ) -> None:
        if (probs is None) == (logits is None):
            got = "neither: for" if probs is None else "both; the second position is `logits`: for"
            got += f" scores and a size, write {type(self).__name__}(logits=scores, k=2)"
            raise ValueError(f"expected exactly one of `probs` and `logits`, but got {got}")
        self.parameter_name = "logits" if probs is None else "probs"
        param = checked_param(self.parameter_name, logits if probs is None else probs)
        self.spread = SpreadBatch.of(self.parameter_name, param) if is_dtensor(param) else None
        if self.spread is not None:
            param = self.spread.lead if self._knows_parts else self.spread.whole_rows
        if k is None and probs is None:
            raise ValueError(
                f"`k`, the number of ones, is required with `logits`: write {type(self).__name__}(logits=logits, k=2). "
                f"{POSTERIOR_ADVICE}"
            )
        check_function("relaxation", relaxation, "(logits, k, temperature)")
        check_flag("validate_args", validate_args, optional=True)
        param, self.k, self.largest_k = self._sized(param, k)
        shape = shape_of(param)
        batch_shape, event_shape = shape[:-1], shape[-1:]
        setattr(self, self.parameter_name, param)
        self.kept = Kept()
        self._shared_k = None if k is None or isinstance(k, (Tensor, tuple)) else operator.index(k)
        self.relaxation = relaxation
        self.overridden = overrides_functions(param, temperature)
        self.temperature = checked_positive("temperature", temperature, batch_shape)
        self._check_rows_here = validate_args
        if self.spread is not None:
            validate_args = self._validate_spread(validate_args)
        super().__init__(batch_shape, event_shape, validate_args=validate_args)
        if is_tracing() and self.relaxes_logits:
            self.__dict__["probs"] = (
                self.probs
            )  # for the operations of a trace, as the relaxation may hold on to tensors

    def __repr__(self) -> str:
        shown = {self.parameter_name: self.parameter, "k": self.size}
        shown |= {name: getattr(self, name) for name in self._settings}
        return f"{type(self).__name__}({', '.join(f'{name}: {in_short(value)}' for name, value in shown.items())})"

    def _sized(self, param: Tensor, k: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The parameter with all dimensions of the batch, and the smallest and the largest number of ones of rows."""
        size = self._sums_of(param) if k is None else checked_size(k, param)
        if isinstance(k, Tensor):
            param, size = broadcast_with_k(self.parameter_name, param, size)
        return param, size, size

    @property
    def _is_rounded(self) -> bool:
        return self.spread is None and is_half(self.dtype)  # of a spread design that of the rows here has a twin

    def _parameter_in_float32(self) -> Tensor:
        return self.parameter.float() if self.parameter_name == "logits" else unrounded(self.parameter, self.k)

    @classmethod
    def infer_shapes(cls, **arg_shapes: Size) -> tuple[Size, Size]:
        return shapes_of(arg_shapes["probs"] if "probs" in arg_shapes else arg_shapes["logits"], arg_shapes)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return k_hot(self.size)

    @lazy_property
    @traced_through
    def probs(self) -> Tensor:
        """Inclusion probabilities that the design aims at."""
        probs = self.relaxation(self.logits, self.size, self.temperature)
        if self._validate_args and looks_at_contents(probs):
            name = getattr(self.relaxation, "__name__", repr(self.relaxation))
            self._check_probs(probs, f"what `relaxation` {name} returns", "it is no mask of inclusion probabilities")
        return probs

    @lazy_property
    def log_odds(self) -> Tensor:
        """Float64 log-odds of ``probs``, infinite for units that are certain; of scores also where ``probs`` round."""
        found = None
        if self.relaxes_logits and not torch.compiler.is_compiling():  # whose tracer does not know what has a link
            found = mask_log_odds(self.relaxation, self.logits, self.size, self.temperature)
        return log_odds(self.probs.double()) if found is None else found

    def _found(self, name: str) -> Tensor | None:
        """A lazy property that has been computed already, else None."""
        if name in self.__dict__ or torch.compiler.is_compiling():
            return self.__dict__.get(name)
        return self._derived_now().get(name)

    @lazy_property
    @traced_through
    def logits(self) -> Tensor:
        """Scores that ``probs`` were computed from."""
        raise AttributeError(f"this {type(self).__name__} was made from `probs` and has no `logits`")

    @property
    @traced_through
    def mean(self) -> Tensor:
        """Inclusion probabilities P(x_i = 1)."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        return self.mean * (1 - self.mean)

    def sample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """Draws k-hot vectors, ``sample_shape + batch_shape + (n,)``.

        Args:
            sample_shape: Shape of the independent draws.
            generator: Source of randomness on the device of the parameters, torch's default one if None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `sample`")

    def rsample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no rsample: wrap it by an estimator, as in khot.ReinMax(design), or in "
            "khot.StraightThrough(design), which takes every design"
        )

    def sample_indices(
        self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws as the k positions of the ones, in increasing order: ``sample_shape + batch_shape + (k,)``, long."""
        k = self._require_shared_k("sample_indices")
        value = draw(self, sample_shape, generator)
        return positions(value, k)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of values ``(*sample_shape, *batch_shape, n)``."""

        def first_units() -> Tensor:
            unit = torch.arange(self.event_shape[0], device=value.device)
            return (unit < self.k.unsqueeze(-1)).to(value.dtype)

        return self._log_prob_of_any(value, first_units)
