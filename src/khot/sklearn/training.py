"""Trains a gate and a predictor together: mini-batches, a price for kept features, early decisions, stopping."""

import copy
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.adam import adam

from khot.nn import KHotGate
from khot.relaxations import topk_mask

from .data import Data

LOOK_EVERY = 10  # steps between two looks at the inclusion probabilities and at the held-out loss
HURRY_AFTER = 100  # from this step on, every convergence check also sharpens the design
HURRY = 1.1  # the factor by which each check sharpens the logits
TURN = threading.RLock()  # fits in several threads of Python take turns: torch has one random state for all of them


class _Adam:
    """Adam with its usual settings as a function: a ``torch.optim.Adam`` imports torch's compiler, a second's work."""

    def __init__(self, parameters: Iterable[Tensor], rate: float) -> None:
        self.rate, self.parameters = rate, [p for p in parameters if p.requires_grad]
        self.means, self.squares = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.counts = [torch.zeros(()) for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Takes a step along the gradients, and removes them; parameters without one stay."""
        states = zip(self.parameters, self.means, self.squares, self.counts, strict=True)
        found = [(p, p.grad, *state) for p, *state in states if p.grad is not None]
        if found:
            parameters, grads, means, squares, counts = map(list, zip(*found, strict=True))
            # one loop over all parameters instead of ten operations each
            adam(
                parameters, grads, means, squares, [], counts, fused=True, amsgrad=False, beta1=0.9, beta2=0.999,
                lr=self.rate, weight_decay=0.0, eps=1e-8, maximize=False,
            )  # fmt: skip
        for p in self.parameters:
            p.grad = None


@dataclass
class Training:
    """Gate and predictor, and the settings of their training.

    Attributes:
        gate: Decides which features the predictor sees.
        predictor: Called with the features that the gate lets through, ``(rows, n)``.
        price: What each feature adds to the loss; relevant if their number is learned.
        curve: Training loss of each step, without the price.
        untrained_spread: The :func:`spread` of the draws before training.
    """

    gate: KHotGate
    predictor: Module
    price: float
    curve: list[float] = field(default_factory=list, init=False)
    untrained_spread: float = field(init=False)

    def __post_init__(self) -> None:
        self.untrained_spread = spread(self.inclusion_probabilities())

    def objective(self, data: Data) -> tuple[Tensor, Tensor]:
        """The loss, with a draw for each row, and the price of the mean number of features in a draw."""
        loss = data.loss(self.predictor(self.gate(data.x)))
        number = self.gate.k if self.gate.k is not None else torch.sigmoid(self.gate.logits).sum()
        return loss, torch.as_tensor(self.price * number, dtype=loss.dtype)

    def steps(self, data: Data, batch_size: int, rates: tuple[float, float]) -> Iterator[int]:
        """Takes a step of Adam for each number that it yields; ``rates`` are those of the predictor and of the gate.

        Raises:
            ValueError: If the loss is infinite or NaN.
        """
        parts = zip((self.predictor, self.gate), rates, strict=True)
        optimizers = [_Adam(part.parameters(), rate) for part, rate in parts]
        for batch in batches(data, batch_size):
            loss, cost = self.objective(batch)
            (loss + cost).backward()
            for optimizer in optimizers:
                optimizer.step()
            self.curve.append(loss.item())
            if not math.isfinite(self.curve[-1]):
                raise ValueError(
                    f"the loss was {self.curve[-1]} in step {len(self.curve)}: `learning_rate` is {rates[0]:g}, and a "
                    "smaller one may help"
                )
            yield len(self.curve)

    @torch.no_grad()
    def start_at(self, logits: Tensor, weights: Tensor) -> None:
        """Gives the gate these logits, and a linear predictor these weights."""
        self.gate.logits.copy_(logits)
        self.predictor.load_state_dict({"weight": weights, "bias": torch.zeros(len(weights))})

    def inclusion_probabilities(self) -> Tensor:
        return self.gate.law().mean.detach()

    def selected(self) -> Tensor:
        """The features of the k largest logits; for a learned number, those kept more often than not. Bool ``(n,)``."""
        logits = self.gate.logits.detach()
        return logits > 0 if self.gate.k is None else topk_mask(logits, self.gate.k) > 0

    def has_settled(self, tol: float) -> bool:
        r"""Whether nearly every draw is the same.

        Two conditions must hold: each inclusion probability is within ``tol`` of 0 or 1, and
        :math:`\sum_i \pi_i (1 - \pi_i)` is at most ``tol`` times its value before training. The first alone also holds
        for an untrained law, with all probabilities equal to k / n, if k / n is below ``tol`` or above 1 - ``tol``. The
        second alone may hold while one of many features is still undecided.
        """
        probs = self.inclusion_probabilities()
        is_near = bool((torch.minimum(probs, 1 - probs) <= tol).all())
        return is_near and spread(probs) <= tol * self.untrained_spread

    @torch.no_grad()
    def hurry(self) -> None:
        """Multiplies the distances of the logits from the threshold, which forces a decision between similar features.

        The threshold is midway between the smallest selected logit and the largest one that is not selected.
        """
        logits, k = self.gate.logits, self.gate.k
        if k is None:
            logits.mul_(HURRY)
        elif k < len(logits):
            last, first = logits.topk(k + 1).values[-2:]
            logits.sub_((last + first) / 2).mul_(HURRY)

    @torch.no_grad()
    def held_out_loss(self, data: Data) -> float:
        """The held-out loss with the selected features, including their price."""
        mask, predictor = self.selected(), self.predictor.eval()
        loss = data.loss(predictor(data.x * mask)) + self.price * mask.sum(dtype=torch.float32)
        predictor.train()
        return loss.item()


@contextmanager
def training_mode() -> Iterator[None]:
    """In this context, torch records gradients and computes on the CPU in the dtype of its tensors."""
    is_default = torch.get_default_device().type == "cpu"  # a device as a context slows down every call of torch
    device = nullcontext() if is_default else torch.device("cpu")
    with torch.inference_mode(False), torch.enable_grad(), device, torch.autocast("cpu", enabled=False):
        yield


@contextmanager
def threads_of_torch(number: int) -> Iterator[None]:
    """In this context, torch and khot's loops compute on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def spread(probs: Tensor) -> float:
    """How much draws with these inclusion probabilities vary: the sum of the variances of their entries."""
    probs = probs.double()
    return float((probs * (1 - probs)).sum())


class Best:
    """The state of modules with the lowest held-out loss so far, and the step at which it occurred.

    Args:
        modules: The modules in training.
        patience: Number of steps to wait for a better state.
    """

    def __init__(self, modules: Sequence[Module], patience: int) -> None:
        self.modules, self.patience, self.loss, self.step = modules, patience, math.inf, 0
        self.states: list[dict[str, Any]] = []

    def compare(self, loss: float, step: int) -> bool:
        """Whether to continue after this step."""
        if loss < self.loss or not self.states:
            self.loss, self.step = loss, step
            self.states = [copy.deepcopy(module.state_dict()) for module in self.modules]
        return step - self.step < self.patience

    def restore(self) -> None:
        """Restores the best state."""
        for module, state in zip(self.modules, self.states, strict=True):
            module.load_state_dict(state)


def batches(data: Data, size: int) -> Iterator[Data]:
    """Mini-batches, in a new order in each round; rows that do not fill a batch are left out of a round."""
    rows = len(data)
    while rows <= size:
        yield data
    while True:
        order = torch.randperm(rows)
        for start in range(0, rows - size + 1, size):
            yield data.rows(order[start : start + size])
