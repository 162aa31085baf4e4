"""The base of all sampling designs: laws on the k-hot vectors in {0, 1}ⁿ, with exactly k ones in every draw.

This module contains what they have in common: the two parametrisations, their checks, shapes, ``expand``, enumeration,
and the moments that follow from first- and second-order inclusion probabilities. A design adds its law.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Size, Tensor
from torch.distributions import constraints
from torch.distributions.utils import lazy_property
from torch.types import _size as SizeLike

from khot._contents import looks_at_contents
from khot._validation import as_int, check_flag, check_function, checked_positive
from khot.constraints import k_hot
from khot.kernels.exact.small_numbers import log_odds
from khot.laws.kept import Kept
from khot.relaxations import sigmoid_topk
from khot.relaxations.hard import positions
from khot.relaxations.mask_log_odds import mask_log_odds

from ._arguments import broadcast_with_k, checked_param, checked_size, in_short, shapes_of
from .base import draw
from .checked import CheckedDesign
from .rounding import unrounded

POSTERIOR_ADVICE = (
    "(Pyro's compute_marginals and sample_posterior provide one logit for each k-hot vector, which no design can "
    "represent. With these, sample the number of a vector, i ~ khot.infer.subset_categorical(design), and use "
    "khot.infer.subset_vector(i, n, k))"
)

Relaxation = Callable[[Tensor, Any, Any], Tensor]


class SamplingDesign(CheckedDesign):
    r"""A distribution over the k-hot vectors of length n; the base class, to which each subclass adds its law.

    The parameter is either ``probs``, the inclusion probabilities :math:`\pi_i = P(x_i = 1)`, whose sum is k, or
    ``logits``, real scores from which ``probs = relaxation(logits, k, temperature)`` are computed at first use. All
    results are differentiable in the parameter. Exact 0 and 1 in ``probs`` are legal: such units are never or always
    drawn.

    ``log_prob`` is ``-inf``, with zero gradient, outside the support; with validation on, values there are errors.

    In Pyro, ``infer={"enumerate": "parallel"}`` enumerates a site. This does not work for a site made of several
    latents by ``to_event(1)``, which ``config_enumerate`` skips silently: declare the rows independent by a plate
    instead. For code that needs a Categorical, such as infer_discrete, use :func:`~khot.subset_categorical`. For
    missing rows of data, use ``pyro.sample(..., obs=x, obs_mask=seen)`` with ``seen`` of the batch shape.

    A subclass defines ``sample`` and, if it has them, ``_log_prob`` (for k-hot values only), ``entropy`` and
    ``pairwise_inclusion``. If it has only ``_log_prob``, this class computes the last two exactly as sums over all C(n,
    k) vectors, provided that there are at most ``MAX_SUPPORT`` (1,000,000); this takes one evaluation of ``_log_prob``
    per vector. Members that a design lacks raise NotImplementedError and name the designs that have them. A subclass
    whose logits are natural parameters overrides the lazy properties ``probs`` and ``logits``, each computed from the
    other; one that does not draw with the probabilities ``probs`` overrides ``mean``; one with a known mode overrides
    ``mode``. ``expand`` and copies work without further code if every tensor among the attributes starts with
    ``batch_shape``.

    Tensors are plain: for a ``torch.distributed.tensor.DTensor`` the guide "at scale" has a recipe.

    With a parameter in bfloat16 or float16 every result is that of float32, rounded, and draws are the same. A sum of
    rounded probabilities may not determine the size, in these types for k in the hundreds and in float32 for k of
    hundreds of thousands: ``probs`` then need ``k``, and are treated as roundings of probabilities that sum to k.

    A design follows its parameter: after an optimizer step every result is that of a design made from the new contents.
    Intermediate values that its methods share, such as ``probs`` or a product tree, are computed once, at the first
    call that needs them, and again when the parameter, ``k`` or ``temperature`` has changed. A change is any write that
    alters an entry. On an accelerator, where comparing entries would have to wait for the device, it is any write
    except one into ``.data``. Tensors that a relaxation of your own holds are not checked for changes.

    Args:
        probs: Inclusion probabilities ``(..., n)`` in [0, 1], each row with an integer sum.
        logits: Real scores ``(..., n)``; a relaxation may take ``-inf`` to exclude a unit and ``inf`` to include it.
        k: Number of ones, an int or an integer tensor that broadcasts with the batch shape of the parameter; it may
            extend that shape, as an enumerated k does. Required with ``logits``. With ``probs`` it is optional and must
            equal their sum up to rounding; it is required where rounding leaves a doubt, as said above.
        relaxation: Map ``relaxation(logits, k, temperature)`` onto the capped simplex.
        temperature: Softness of the relaxation, a positive number or a tensor that broadcasts to the batch shape.
        validate_args: Whether to check the contents of tensors, as everywhere in torch.distributions. Shapes, dtypes
            and numbers are always checked.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If both or neither of ``probs`` and ``logits`` are given, or shapes or values are out of range.
    """

    _settings: ClassVar[tuple[str, ...]] = ()  # arguments of a subclass, as `repr` shows them
    # The setting with which a design has everything its class defines; "" for any, None if it depends on another
    # design.
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
        if k is None and probs is None:
            raise ValueError(
                f"`k`, the number of ones, is required with `logits`: write {type(self).__name__}(logits=logits, k=2). "
                f"{POSTERIOR_ADVICE}"
            )
        check_function("relaxation", relaxation, "(logits, k, temperature)")
        check_flag("validate_args", validate_args, optional=True)
        param, *ends = self._sized(param, k)
        self._set_ends(*ends)
        shape = param.shape
        batch_shape, event_shape = shape[:-1], shape[-1:]
        setattr(self, self.parameter_name, param)
        self.kept = Kept()
        self._shared_k = None if k is None or isinstance(k, (Tensor, tuple)) else as_int(k)
        self.relaxation = relaxation
        self.temperature = checked_positive("temperature", temperature, batch_shape)
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    def __repr__(self) -> str:
        shown = {self.parameter_name: self.parameter, "k": self.size}
        shown |= {name: getattr(self, name) for name in self._settings}
        return f"{type(self).__name__}({', '.join(f'{name}: {in_short(value)}' for name, value in shown.items())})"

    def _sized(self, param: Tensor, k: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The parameter with all batch dimensions, and the smallest and the largest number of ones of each row."""
        size = self._sums_of(param) if k is None else checked_size(k, param)
        if isinstance(k, Tensor):
            param, size = broadcast_with_k(self.parameter_name, param, size)
        return param, size, size

    def _set_ends(self, k: Tensor, largest_k: Tensor) -> None:
        """Sets the smallest and the largest number of ones of each row."""
        self.k, self.largest_k = k, largest_k

    def _parameter_in_float32(self) -> Tensor:
        return self.parameter.float() if self.parameter_name == "logits" else unrounded(self.parameter, self.k)

    @classmethod
    def infer_shapes(cls, **arg_shapes: Size) -> tuple[Size, Size]:
        return shapes_of(arg_shapes["probs"] if "probs" in arg_shapes else arg_shapes["logits"], arg_shapes)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> constraints.Constraint:
        return k_hot(self.size)

    @lazy_property
    def probs(self) -> Tensor:
        """The target inclusion probabilities of the design."""
        probs = self.relaxation(self.logits, self.size, self.temperature)
        if self._validate_args and looks_at_contents(probs):
            name = getattr(self.relaxation, "__name__", repr(self.relaxation))
            self._check_probs(probs, f"what `relaxation` {name} returns", "it is not a mask of inclusion probabilities")
        return probs

    @lazy_property
    def log_odds(self) -> Tensor:
        """Float64 log-odds of ``probs``, infinite for certain units; accurate for scores even where ``probs`` round."""
        found = None
        if self.relaxes_logits:
            found = mask_log_odds(self.relaxation, self.logits, self.size, self.temperature)
        return log_odds(self.probs.double()) if found is None else found

    def _found(self, name: str) -> Tensor | None:
        """A lazy property that was computed already, or else None."""
        if name in self.__dict__:
            return self.__dict__.get(name)
        return self._derived_now().get(name)

    @lazy_property
    def logits(self) -> Tensor:
        """The scores from which ``probs`` were computed."""
        raise AttributeError(f"this {type(self).__name__} was made from `probs` and has no `logits`")

    @property
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
            generator: Source of randomness on the device of the parameters; by default torch's own.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `sample`")

    def rsample(self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has no rsample: wrap it in an estimator, such as khot.ReinMax(design), or "
            "khot.StraightThrough(design), which takes every design"
        )

    def sample_indices(
        self, sample_shape: SizeLike = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """The k positions of the ones of draws, in increasing order: ``sample_shape + batch_shape + (k,)``, long."""
        k = self._require_shared_k("sample_indices")
        value = draw(self, sample_shape, generator)
        return positions(value, k)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of values ``(*sample_shape, *batch_shape, n)``."""

        def first_units() -> Tensor:
            unit = torch.arange(self.event_shape[0], device=value.device)
            return (unit < self.k.unsqueeze(-1)).to(value.dtype)

        return self._log_prob_of_any(value, first_units)
