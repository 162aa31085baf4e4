"""Argument checks that the packages share: when a check runs, and how its error is worded."""

import math
import operator
from collections.abc import Iterable
from numbers import Integral, Real
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from ._contents import looks_at_contents
from ._refusals import refuse_trace
from ._torch_internals import is_recomputed, is_tracing


def check_strided(name: str, value: Any, *, are_scores: bool = False) -> None:
    """Checks that a tensor is neither sparse nor nested, as rows must have all their entries and equal lengths.

    Nor may it be of a floating-point dtype of 8 bits or fewer: these are for storage, and torch has no sums of them.
    Arguments of public functions of rows are checked where they come in, in :mod:`khot._distributed.boundary`.
    """
    if isinstance(value, Tensor):
        if value.dtype.itemsize == 1:
            _check_width(name, value)
        if not torch.compiler.is_compiling():
            if is_tracing():
                refuse_trace()
            if value.is_nested or value.layout is not torch.strided:
                refuse_layout(name, value, are_scores)


def _check_width(name: str, value: Tensor) -> None:
    if value.dtype.itemsize == 1 and value.is_floating_point():
        raise TypeError(
            f"`{name}` must have a floating-point dtype of 16 bits or more, but got {value.dtype}: pass {name}.float()"
        )


def refuse_layout(name: str, value: Tensor, are_scores: bool) -> None:
    """Raises a TypeError for a tensor that is sparse or nested, with the way to a dense one."""
    if value.is_nested:
        padding = "-torch.inf), which excludes the entries that it adds" if are_scores else "0.0)"
        raise TypeError(
            f"`{name}` must not be a nested tensor: pad its rows with torch.nested.to_padded_tensor({name}, {padding}"
        )
    if value.layout is not torch.strided:
        raise TypeError(f"`{name}` must be a dense tensor, but got the layout {value.layout}: pass {name}.to_dense()")


def check_floating(name: str, value: Any, *, are_scores: bool = False) -> None:
    """Checks for a dense tensor of a floating-point dtype in which torch computes."""
    check_strided(name, value, are_scores=are_scores)
    if not (isinstance(value, Tensor) and value.dtype in SOFTNESS_LIMITS):
        _refuse_type(name, value)


def _refuse_type(name: str, value: Any) -> None:
    """Raises a TypeError for what is not a tensor of a floating-point dtype in which torch computes."""
    _check_tensor(name, value)
    _check_width(name, value)
    advice = "" if value.is_complex() else f": pass {name}.float()"
    raise TypeError(f"`{name}` must have a floating-point dtype, but got {value.dtype}{advice}")


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        advice = f": pass torch.as_tensor({name})" if type(value).__name__ in ("list", "tuple", "ndarray") else ""
        raise TypeError(f"`{name}` must be a torch.Tensor, but got {type(value).__name__}{advice}")


def check_scores(x: Any, dim: Any, *, joint: bool = False) -> None:
    """:func:`check_rows` where the boundary of public functions of rows has not seen ``x``."""
    check_strided("x", x, are_scores=True)
    check_rows(x, dim, joint=joint)


def check_rows(x: Any, dim: Any, *, joint: bool = False) -> None:
    """Checks for a real floating-point tensor ``x`` with the axis ``dim``, or with several axes if ``joint``."""
    if not (isinstance(x, Tensor) and x.dtype in SOFTNESS_LIMITS):
        _refuse_type("x", x)
    if x.dim() == 0:
        raise ValueError("`x` must have at least one dimension, the ground set, but got a scalar")
    if joint and isinstance(dim, tuple):
        _check_axes(x, dim)
        return
    if type(dim) is not int and not is_int(dim):
        raise TypeError(f"`dim` must be an int{' or a tuple of ints' if joint else ''}, but got {dim!r}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"`dim` must be an int in [{-x.dim()}, {x.dim() - 1}] for `x` of shape {tuple(x.shape)}, but got {dim}"
        )


def _check_axes(x: Tensor, dim: tuple[Any, ...]) -> None:
    """Checks for one or more different axes of x."""
    if not all(map(is_int, dim)):
        raise TypeError(f"`dim` must be an int or a tuple of ints, but got {dim!r}")
    inside = all(-x.dim() <= axis < x.dim() for axis in dim)
    if not dim or not inside or len({axis % x.dim() for axis in dim}) < len(dim):
        raise ValueError(
            f"`dim` must name one or more axes in [{-x.dim()}, {x.dim() - 1}], each once, for `x` of shape "
            f"{tuple(x.shape)}, but got {dim}"
        )


def check_broadcasts(name: str, value: Tensor, x: Tensor, batch_shape: torch.Size) -> None:
    """Checks for a tensor of real numbers that broadcasts with the batch, without reading contents."""
    _check_width(name, value)
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`{name}` must be real, but got a tensor of dtype {value.dtype}")
    if value.device != x.device and value.dim() > 0:
        raise ValueError(f"`{name}` must be on the device of `x`, {x.device}, but is on {value.device}")
    try:
        value.expand(batch_shape)
    except RuntimeError:
        raise ValueError(
            f"`{name}` of shape {tuple(value.shape)} must broadcast to the batch shape {tuple(batch_shape)} "
            f"of `x` of shape {tuple(x.shape)}; expand `x` first for a larger batch"
        ) from None


def check_k(k: float | Tensor, x: Tensor, batch_shape: torch.Size, n: int) -> None:
    """Checks that ``k`` is a number in [0, n], or a tensor that broadcasts with the batch, without reading contents."""
    if isinstance(k, Tensor):
        check_broadcasts("k", k, x, batch_shape)
    elif not _is_number(k):
        raise TypeError(f"`k` must be a real number or a torch.Tensor, but got {type(k).__name__}")
    elif not 0 <= k <= n:
        raise ValueError(f"`k` must satisfy 0 <= k <= n, but got k={k} with n={n} (`x` of shape {tuple(x.shape)})")


_SINGLE, _DOUBLE = ((torch.finfo(dtype).tiny, torch.finfo(dtype).max) for dtype in (torch.float32, torch.float64))
# Smallest and largest softness for scores of these dtypes: the normal numbers of the dtype of the computation.
SOFTNESS_LIMITS = {torch.float64: _DOUBLE, **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), _SINGLE)}


def softness_error(name: str, value: float, dtype: torch.dtype) -> str:
    """The error message for a softness outside the :data:`SOFTNESS_LIMITS`."""
    if not 0 < value < math.inf:
        return f"`{name}` must be positive and finite, but got {value:g}"
    low, high = SOFTNESS_LIMITS[dtype]
    return f"`{name}` must lie in [{low:g}, {high:g}] for `x` of dtype {dtype}, but got {value:g}"


# Advice for a softness of 0 or -1, since torch.topk has the axis in this position.
DIM_IS_A_KEYWORD = "; the axis is the keyword `dim`, as in dim=-1"


def check_softness(
    name: str, value: float | Tensor, x: Tensor, batch_shape: torch.Size, *, advice: str = DIM_IS_A_KEYWORD
) -> None:
    """Checks a number against its limits, and the shape and dtype of a tensor, but not its contents.

    ``advice`` is appended to the error message for a number that is not positive.
    """
    if isinstance(value, Tensor):
        check_broadcasts(name, value, x, batch_shape)
        return
    if not _is_number(value):
        raise TypeError(f"`{name}` must be a real number or a torch.Tensor, but got {type(value).__name__}")
    number: Any = value  # a compiler's number stays symbolic; NumPy's scalars become Python's
    number = number if isinstance(number, (torch.SymInt, torch.SymFloat)) else float(number)
    low, high = SOFTNESS_LIMITS[x.dtype]
    if not low <= number <= high:
        raise ValueError(softness_error(name, float(number), x.dtype) + (advice if number <= 0 else ""))


def check_softness_contents(name: str, value: Tensor, dtype: torch.dtype) -> None:
    """Checks that all numbers of a tensor are within the limits for scores of this dtype."""
    low, high = SOFTNESS_LIMITS[dtype]
    wrong = value.detach()[~((value >= low) & (value <= high))]
    if wrong.numel():
        raise ValueError(softness_error(name, wrong[0].item(), dtype))


def size_advice(k: float | Tensor, unmasked: float) -> str:
    """Advice for a k above the number of unmasked entries of some row: pass one k for each row."""
    if isinstance(k, Tensor):
        k = k.max().item()
    if k <= unmasked:
        return ""
    return (
        f"; rows of different lengths need one k each, such as k=(x > -torch.inf).sum(-1).clamp(max={k:g}), which for "
        f"causal attention is k=torch.arange(1, n + 1).clamp(max={k:g})"
    )


def check_enough(x: Tensor, k: float | Tensor) -> None:
    """Checks that rows of x (..., n) have at least k entries that are not excluded by ``-inf``."""
    if x.numel() == 0:
        return
    unmasked = (x != -torch.inf).sum(-1)
    k = in_wide_dtype(k) if isinstance(k, Tensor) else k
    if not bool(((k >= torch.zeros_like(unmasked)) & (k <= unmasked)).all()):
        raise ValueError(
            f"`k` must satisfy 0 <= k <= n and not exceed the number of entries above -inf, at least "
            f"{int(unmasked.min())} with n={x.shape[-1]}, but got k={k}{size_advice(k, int(unmasked.min()))}"
        )


def in_wide_dtype(size: Tensor) -> Tensor:
    """A tensor of sizes in a dtype that can add and compare them: integers in int64, half types in float32.

    In torch, ``k * 10`` overflows for a tensor k of 8 bits, and unsigned integers of more bits cannot be compared.
    """
    if size.is_complex() or size.dtype in (torch.bool, torch.int64):
        return size
    return size.to(torch.promote_types(size.dtype, torch.float32) if size.is_floating_point() else torch.int64)


def expanded(name: str, value: Tensor, batch_shape: torch.Size) -> Tensor:
    check_strided(name, value)
    try:
        return value.expand(batch_shape)
    except RuntimeError:
        message = f"`{name}` must broadcast to the batch shape {tuple(batch_shape)}, but got shape {tuple(value.shape)}"
        raise ValueError(message) from None


def as_int(number: Any) -> Any:
    """A NumPy integer as Python's; an int stays as it is, because a compiler would take its index as a constant."""
    if type(number) is int:
        return number
    return operator.index(number) if isinstance(number, Integral) else number


def checked_shape(name: str, shape: Any) -> torch.Size:
    """A tuple, list or Size of ints >= 0 as a Size; sizes of a traced or compiled tensor are not checked."""
    if isinstance(shape, tuple) and not shape:
        return torch.Size()
    try:
        size = torch.Size(map(as_int, shape))
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a tuple of non-negative ints, but got {shape!r}") from None
    if any(type(length) is int and length < 0 for length in size):
        raise ValueError(f"`{name}` must be a tuple of non-negative ints, but got {shape!r}")
    return size


def checked_expansion(shape: Any, value: Tensor, batch_shape: torch.Size) -> torch.Size:
    """A new batch shape for ``value`` of shape ``batch_shape + (...)``, after a check that it broadcasts to it."""
    new = checked_shape("batch_shape", shape)
    try:
        value.expand(new + value.shape[len(batch_shape) :])
    except RuntimeError:
        raise ValueError(
            f"`batch_shape` must be a shape that {tuple(batch_shape)} expands to, but got {tuple(new)}"
        ) from None
    return new


def checked_positive(name: str, value: Any, batch_shape: torch.Size, *, advice: str = "") -> float | Tensor:
    """A positive finite number as it is, or a tensor expanded to the batch shape, without reading its contents.

    ``advice`` is appended to the error message for a number that is not positive.
    """
    if isinstance(value, Tensor):
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"`{name}` must be real, but got a tensor of dtype {value.dtype}")
        return expanded(name, value, batch_shape)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a real number or a tensor, but got {value!r}")
    number = float(value)  # NumPy's numbers count as real numbers, too
    if not 0 < number < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, but got {value}{advice if number <= 0 else ''}")
    return number


def checked_count(name: str, value: Any) -> int:
    """An integer of at least 1, as a Python int."""
    count = checked_int(name, value)
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, but got {value}")
    return count


def check_generator(generator: Any, device: torch.device | None = None) -> None:
    """Checks that ``generator`` is None, or is for this device; for meta tensors any generator is accepted."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` must be a torch.Generator or None, but got {generator!r}")
    if device is not None and device.type not in (generator.device.type, "meta"):
        raise ValueError(f"`generator` must be on the device of the draws, {device}, but is on {generator.device}")
    if not torch.compiler.is_compiling() and is_recomputed():
        raise RuntimeError(
            "a `generator` has moved on when an activation checkpoint runs its block again, so the gradient would be "
            "that of another draw: draw before the block, or use torch's default generator, which is reset"
        )


def is_int(value: Any) -> bool:
    """Whether this is an integer of Python, NumPy or a compiler; a bool does not count."""
    return type(value) is int or (isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool))


def _is_number(value: Any) -> bool:
    """Whether this is a real number of Python, NumPy or a compiler; a bool does not count."""
    if type(value) in (int, float):
        return True
    return isinstance(value, (Real, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def checked_int(name: str, value: Any, what: str = "an int") -> int:
    """An integer of Python, NumPy (including zero-dimensional arrays) or a compiler, but not a tensor."""
    if isinstance(value, bool):
        raise TypeError(f"`{name}` must be {what}, but got the bool {value}")
    if isinstance(value, (int, torch.SymInt)):
        return cast(int, value)
    if isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be {what}, but got a {type(value).__name__}")
    return checked_index(name, value, what)


def checked_integer(name: str, value: Any) -> int | Tensor:
    """An int, or an integer tensor as int64, as not all integer types can be compared; the contents are not read."""
    if not isinstance(value, Tensor):
        return checked_int(name, value, "an int or an integer tensor")
    check_strided(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"`{name}` must be an int or an integer tensor, but got a tensor of dtype {value.dtype}")
    return value.long()


def checked_index(name: str, value: Any, what: str = "an int") -> int:
    """Anything that Python accepts as an int: its own, NumPy's, or an integer tensor with one element."""
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"`{name}` must be {what}, but got {value!r}") from None


def check_positive_contents(name: str, value: Any) -> None:
    """Checks that a tensor, if its contents can be read, contains positive finite numbers; ignores anything else."""
    if isinstance(value, Tensor) and looks_at_contents(value):
        wrong = value.detach()[~((value > 0) & (value < math.inf))]
        if wrong.numel():
            raise ValueError(f"`{name}` must be positive and finite, but got {wrong[0].item():g}")


def checked_share(name: str, value: Any, *, above: str = "<=", below: str = "<=") -> float:
    """A number in [0, 1], after a check; "<" for ``above`` or ``below`` leaves out 0 or 1."""
    number = checked_real(name, value)
    if not 0 <= number <= 1 or (above == "<" and number == 0) or (below == "<" and number == 1):
        raise ValueError(f"`{name}` must satisfy 0 {above} {name} {below} 1, but got {value}")
    return number


def checked_real(name: str, value: Any, what: str = "a real number") -> float:
    """A real number of Python or NumPy, as Python's int or float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be {what}, but got {value!r}")
    return operator.index(value) if isinstance(value, Integral) else float(value)


def check_flag(name: str, value: Any, *, optional: bool = False) -> None:
    """Checks for True or False, Python's or NumPy's, or for None if that is the default."""
    if type(value).__name__ not in ("bool", "bool_") and not (optional and value is None):
        raise TypeError(f"`{name}` must be True or False{' or None' if optional else ''}, but got {value!r}")


def check_choice(name: str, value: Any, choices: Iterable[str], *, optional: bool = False) -> None:
    """Checks for one of a few strings, or for None if that is a choice, too."""
    if optional and value is None:
        return
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        *first, last = [*map(repr, choices), *(["None"] if optional else [])]
        raise ValueError(f"`{name}` must be {', '.join(first)} or {last}, but got {value!r}")


def described(value: Any, of: type) -> str:
    """A description of what was passed instead of an instance: its type, or a class that was not called."""
    if not isinstance(value, type):
        return type(value).__name__
    advice = f": pass an instance, {value.__name__}(...)" if issubclass(value, of) else ""
    return f"the class {value.__name__}{advice}"


def check_function(name: str, value: Any, signature: str) -> None:
    """Checks for a function; rejects tensors and distributions, although Pyro's distributions can be called."""
    if not callable(value) or isinstance(value, Distribution):
        raise TypeError(f"`{name}` must be a function of {signature}, but got {value!r}")


def name_init(cls: type) -> None:
    """Gives a class that inherits ``__init__`` a copy, so that Python's errors about its arguments name this class."""
    init: Any = getattr(cls.__init__, "__wrapped__", cls.__init__)  # type: ignore[misc]
    if "__init__" in vars(cls) or not isinstance(init, FunctionType):
        return
    copy = FunctionType(init.__code__, init.__globals__, init.__name__, init.__defaults__, init.__closure__)
    copy.__kwdefaults__, copy.__annotations__, copy.__doc__ = init.__kwdefaults__, init.__annotations__, init.__doc__
    copy.__module__, copy.__qualname__ = init.__module__, f"{cls.__qualname__}.__init__"
    setattr(cls, "__init__", copy)  # noqa: B010  # a type checker rejects an assignment


def check_value(value: Any) -> None:
    """Checks for a dense tensor of real numbers, which a law can score."""
    check_strided("value", value)
    _check_tensor("value", value)
    if value.is_complex():
        raise TypeError(f"`value` must be real, but got a tensor of dtype {value.dtype}")


def check_draw(name: str, value: Any, law: Distribution) -> None:
    """Checks for a floating-point tensor ``(*sample_shape, *batch_shape, *event_shape)`` of a law."""
    check_floating(name, value)
    shape = law.batch_shape + law.event_shape
    if value.dim() < len(shape) or value.shape[value.dim() - len(shape) :] != shape:
        wanted = ", ".join(map(str, ("...", *shape)))
        raise ValueError(f"`{name}` must have shape ({wanted}), but got {tuple(value.shape)}")
