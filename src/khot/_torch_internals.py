"""All parts of torch that khot uses without a promise of stability, in one place, where new releases are handled."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function, forward_ad
from torch.jit._trace import is_tracing as is_tracing
from torch.nn import Parameter
from torch.utils import _python_dispatch, checkpoint

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_C: Any = torch._C  # the functions that set the state of a trace are not annotated
_AUTOGRAD = _C._autograd
_KEYS = torch._C._TorchDispatchModeKey
_TRACERS = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)
# The state of torch's dispatcher for code that is neither traced nor transformed.
_EAGER = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _count_as_constant(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: Dynamo runs this function while tracing and bakes in the result.

    Like ``torch.compiler.assume_constant_result``, which takes a second or two to import the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# Transforms of torch.func


def for_transforms() -> AbstractContextManager[Any]:
    """A context for calls of transforms of torch.func, outside inference mode, where those of torch 2.6 are wrong.

    They work on tensors made in that mode, too. What they return is to be called in such a context as well. Hooks for
    saved tensors, as an activation checkpoint sets them, are suspended, because the transforms refuse to run with them.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    if torch.is_inference_mode_enabled():
        return _outside_inference_mode()
    return nullcontext() if _last_hooks(False) is None else _without_hooks()


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


# The hooks for saved tensors that were set last; None if there are none, or if torch, before 2.8, hides them.
_shows_hooks = hasattr(_AUTOGRAD, "_top_saved_tensors_default_hooks")
_last_hooks: Callable[[bool], Any] = _AUTOGRAD._top_saved_tensors_default_hooks if _shows_hooks else lambda _: None


@contextmanager
def _without_hooks() -> Iterator[None]:
    removed = []
    while (hooks := _last_hooks(False)) is not None:
        removed.append(hooks)
        _AUTOGRAD._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(removed):
            _AUTOGRAD._push_saved_tensors_default_hooks(*hooks)


# Whether a transform of torch.func, such as vmap or grad, has wrapped a tensor.
is_wrapped: Callable[[Tensor], bool] = functorch.is_functorch_wrapped_tensor


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, and what the transforms have wrapped, from the outside to the inside."""
    yield tensor
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
        yield tensor


def is_mapped(tensor: Tensor) -> bool:
    """Whether this tensor represents many tensors inside a vmap."""
    return any(map(functorch.is_batchedtensor, _layers(tensor)))


def may_differentiate(tensor: Tensor) -> bool:
    """Whether this tensor requires a gradient or carries a tangent, outside transforms of torch.func or in any of them.

    A vmap hides both: the tensor that it passes on says that it requires no gradient.
    """
    if torch.compiler.is_compiling():  # a compiler cannot unwrap tensors
        return tensor.requires_grad
    for x in _layers(tensor):
        may_carry = in_forward_mode() and not functorch.is_batchedtensor(x)
        if x.requires_grad or (may_carry and forward_ad.unpack_dual(x).tangent is not None):
            return True
    return False


def is_transformed() -> bool:
    """Whether this runs inside a transform of torch.func, in which a new tensor may be one of many, too."""
    return functorch.peek_interpreter_stack() is not None


# How many transforms of torch.func this runs in; None outside of them.
transform_level: Callable[[], int | None] = functorch.maybe_current_level


def leave_graph_if_differentiated() -> None:
    """Ends the graph that Dynamo is tracing inside of ``torch.func.grad`` or ``jvp``: eager code goes on.

    For functions whose derivatives would silently be zero there. With ``fullgraph=True`` torch raises an error.
    """
    if torch.compiler.is_compiling() and not {"Grad", "Jvp"}.isdisjoint(traced_transforms()):
        leave_graph()


def leave_graph() -> None:
    """Ends the graph that Dynamo is tracing: eager code goes on, or ``fullgraph=True`` raises."""
    from torch._dynamo import graph_break  # takes long; the compiler has imported it

    graph_break()


def traced_transforms() -> tuple[str, ...]:
    """The names of the transforms of torch.func that Dynamo traces around the caller, the innermost first."""
    top = functorch.peek_interpreter_stack()
    if not isinstance(top, functorch.CInterpreter):  # to Dynamo it is never None
        return ()
    from torch._functorch.pyfunctorch import coerce_cinterpreter  # takes long; the compiler has imported it

    innermost = coerce_cinterpreter(top)
    with innermost.lower():
        return (innermost.key().name, *traced_transforms())


if torch.__version__ < "2.7":
    traced_transforms = _count_as_constant(traced_transforms)


def runs_unwatched(forward_mode: bool = False) -> bool:
    """Whether no transform, tracer, dispatch mode or forward mode is active; must not be called under Dynamo.

    With ``forward_mode``, that may be active.
    """
    return (
        not torch._C._len_torch_dispatch_stack()
        and functorch.peek_interpreter_stack() is None
        and _C._get_tracing_state() is None
        and (forward_mode or forward_ad._current_level < 0)
    )


_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default  # looked up once


def no_view(x: Tensor) -> Tensor:
    """The same numbers as a tensor that users may write to; autograd forbids writes to views made inside a Function."""
    return cast(Tensor, _UNSAFE_VIEW(x, x.shape)) if x._is_view() else x


def version_of(x: Tensor) -> int | None:
    """How often x was written to; None if that is not counted, as in graphs and in inference mode."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def has_memory(argument: Any) -> bool:
    """Whether a function can read the memory of this tensor as its numbers; True for anything that is not a tensor.

    It cannot if the tensor is of a subclass, sparse, nested, without data, wrapped by a transform, or has the negative
    bit: the memory then contains the negated numbers until torch's dispatcher resolves it. Nor if it is on a device
    without float64, from which it is moved to the host first.
    """
    kind = type(argument)
    if kind is not Tensor and kind is not Parameter:
        return not isinstance(argument, Tensor)
    if functorch.maybe_get_level(argument) != -1 or functorch.is_legacy_batchedtensor(argument):
        return False
    return argument.layout is torch.strided and not (
        argument.is_nested or argument.is_meta or argument.is_mps or argument.is_neg()
    )


# Tracers and dispatch modes


def is_recorded(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, so that the tensor cannot be read, nor anything copied from the host."""
    return tensor.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_shape_only(tensor: Tensor) -> bool:
    """Whether this is a meta or a fake tensor."""
    *_, innermost = _layers(tensor)
    return innermost.is_meta or isinstance(innermost, FakeTensor)


def is_traced_by_mode() -> bool:
    """Whether a mode is active that runs without data or records a program."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def writes_program() -> bool:
    """Whether a mode records the operations that it sees."""
    return torch._C._get_dispatch_mode(_KEYS.PROXY) is not None


def overrides_torch_functions(kind: type) -> bool:
    """Whether a subclass of tensors replaces torch's functions with its own."""
    return kind.__torch_function__ is not torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]


_frames: Any = torch._C._dynamo.eval_frame


@_count_as_constant
def _swapped_frame_callback() -> Any:
    """Dynamo's callback for frames before torch 2.8, whose own function loses a reference to it at each call."""
    callback = _frames.set_eval_frame(None)
    _frames.set_eval_frame(callback)
    return callback


_frame_callback: Callable[[], Any] = _frames.get_eval_frame_callback
if torch.__version__ < "2.8":
    _frame_callback = _swapped_frame_callback
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(_swapped_frame_callback.__code__)
    else:
        _skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(_swapped_frame_callback.__code__, _skip)


@_count_as_constant  # Dynamo would otherwise start with the frame of this function
def is_watched_by_dynamo() -> bool:
    """Whether Dynamo traces the functions that are called here, or the caller at this moment."""
    if _frame_callback() is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    return dynamo is not None and getattr(getattr(dynamo, "tls", None), "current_tx", None) is not None


def mark_as_outside_graphs(function: F, reason: str) -> F:
    """Marks a function at whose calls graphs end, as ``torch.compiler.disable`` does, which imports the compiler.

    The function itself has to see to it that Dynamo does not watch what it calls, by :func:`outside_graphs`. Old
    versions of torch do not show the reason.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


def outside_graphs(function: Callable[..., R], *args: Any) -> R:
    """The result of a call that Dynamo does not watch."""
    from torch._dynamo import disable  # takes long; what watches has imported it

    found: R = disable(function)(*args)
    return found


def _torch_26_is_exporting() -> bool:
    """For torch 2.6 without such a function: its exporter sets this flag, and asks Dynamo for a program to export."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    translator = getattr(getattr(dynamo, "tls", None), "current_tx", None)
    return bool(getattr(torch.compiler, "_is_compiling_flag", False) or getattr(translator, "export", False))


_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _torch_26_is_exporting)


@_count_as_constant
def is_exporting() -> bool:
    """Whether ``torch.export`` is active."""
    return bool(_is_exporting())


def is_known(condition: bool) -> bool:
    """Whether a comparison of sizes holds for all sizes that an export allows."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import, except in an export

    return condition is True or (condition is not False and statically_known_true(condition))


@_count_as_constant
def writes_onnx() -> bool:
    """Whether ``torch.onnx.export`` traces this; torch's public function imports the whole exporter."""
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return flags is not None and bool(flags._is_onnx_exporting)


def eager_dispatcher() -> AbstractContextManager[Any]:
    """Restores the parts of the dispatcher that transforms need inside an operator."""
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(*_EAGER)
    return guard


# Forward mode


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    return forward_ad._current_level >= 0


def nested_forward_mode() -> AbstractContextManager[Any]:
    """Forward mode inside a ``jvp``, where torch switches it off."""
    return forward_ad._set_fwd_grad_enabled(True)


# Activation checkpoints


def is_recomputed() -> bool:
    """Whether a backward pass is running, in which an activation checkpoint runs its block once more."""
    return bool(_C._current_graph_task_id() != -1)


def after_backward(function: Callable[[], None]) -> None:
    """Calls the function at the end of the backward pass that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def outside_selective_checkpoints() -> AbstractContextManager[Any]:
    """A context for operations of the first pass alone, which the recomputation does not repeat.

    A selective activation checkpoint saves results in the order of the operations. It would count these ones, too.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    return _outside_selective_checkpoints()


@contextmanager
def _outside_selective_checkpoints() -> Iterator[None]:
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    first = next(
        (i for i, mode in enumerate(modes) if isinstance(mode, checkpoint._CachingTorchDispatchMode)), len(modes)
    )
    removed = [_python_dispatch._pop_mode() for _ in modes[first:]]
    try:
        yield
    finally:
        for mode in reversed(removed):
            _python_dispatch._push_mode(mode)


# Functions without a public name


def apply_untransformed(function: type[Function], *args: Any) -> Any:
    """``function.apply`` with all its arguments, outside transforms of torch.func.

    It skips the test for such transforms, and the search by ``inspect`` for missing arguments, which takes longer than
    a few operations on small tensors.
    """
    return super(Function, function).apply(*args)  # type: ignore[misc]


def all_true(condition: Tensor) -> bool:
    """Whether a condition holds everywhere; inside a vmap for the whole batch, by a batching rule."""
    return bool(torch._is_all_true(condition))
