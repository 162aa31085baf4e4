"""A schedule for a number of a module, like torch's schedules for learning rates."""

from typing import Any

import torch

from khot._validation import check_choice, checked_count, checked_real

SHAPES = ("linear", "geometric")
STATE = ("start", "end", "steps", "shape", "whole", "last_step")


class Anneal:
    r"""Moves a number of a module from one value to another: softness, k, threshold, capacity or density.

    .. math:: v_t &= a + (b - a)\, t / T \quad\text{or} \\ v_t &= a^{1 - t / T}\, b^{t / T}, \quad t = 0, 1, \dots, T

    Use it like a scheduler of ``torch.optim.lr_scheduler``: it assigns the first value on construction and the next one
    at each :meth:`step`, and keeps the last one after ``steps`` calls. If the number and both ends are ints, as for the
    k of a hard mask, each value is rounded to the nearest int. A compiled module is compiled once more at the first
    change, and not again.

    Args:
        module: The module with the number, such as :class:`TopK`.
        name: Name of the number, such as ``"softness"``.
        end: Last value.
        steps: Number of calls of :meth:`step` until it is reached.
        start: First value; by default the current value of the module.
        shape: "linear" for equal differences, "geometric" for equal ratios, which suits a softness.

    Example:
        >>> from khot.nn import TopK
        >>> topk = TopK(2, softness=1.0)
        >>> schedule = Anneal(topk, "softness", end=0.01, steps=2, shape="geometric")
        >>> for _ in range(3):
        ...     schedule.step()  # after optimizer.step()
        ...     print(round(topk.softness, 4))
        0.1
        0.01
        0.01
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        end: float,
        steps: int,
        *,
        start: float | None = None,
        shape: str = "linear",
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"`module` must be a torch.nn.Module, but got {module!r}")
        if not hasattr(module, str(name)):
            raise TypeError(f"`name` must name a number of the module, but {type(module).__name__} has no {name!r}")
        self.module, self.name = module, name
        self.steps = checked_count("steps", steps)
        check_choice("shape", shape, SHAPES)
        self.shape = shape
        self.start = checked_real("start", _number_of(module, name) if start is None else start)
        self.end = checked_real("end", end)
        if shape == "geometric" and not (self.start > 0 and self.end > 0):
            raise ValueError(
                f"`start` and `end` must be positive for a geometric shape, but got {self.start} and {self.end}"
            )
        self.last_step = 0
        before = getattr(module, name)
        self.whole = all(isinstance(value, int) for value in (before, self.start, self.end))
        for value in (self.end, self.start):  # validates both ends early
            try:
                setattr(module, name, value)
            except (TypeError, ValueError):
                setattr(module, name, before)
                raise

    @property
    def value(self) -> float:
        """The value that the last step assigned."""
        if self.last_step == 0 or self.last_step >= self.steps:
            return self.start if self.last_step == 0 else self.end
        t = self.last_step / self.steps
        if self.shape == "linear":
            value = self.start + (self.end - self.start) * t
        else:
            value = self.start ** (1 - t) * self.end**t
        return round(value) if self.whole else value

    def step(self) -> None:
        """Assigns the next value."""
        self.last_step += 1
        setattr(self.module, self.name, self.value)

    def state_dict(self) -> dict[str, Any]:
        """The state without the module and the name. Modules do not save their numbers, so save this with the model."""
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes a schedule, and assigns the value that it had reached."""
        vars(self).update({name: state_dict[name] for name in STATE})
        setattr(self.module, self.name, self.value)

    def __repr__(self) -> str:
        shown = f"{type(self.module).__name__}, {self.name!r}, end={self.end}, steps={self.steps}, start={self.start}"
        return f"Anneal({shown}, shape={self.shape!r})"


def _number_of(module: torch.nn.Module, name: str) -> Any:
    """The number of a module, whether a Python number or a tensor with one element."""
    value = getattr(module, name)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, torch.Tensor):
        raise TypeError(f"`start` must be given, because the module's {name} is {value!r}")
    return value
