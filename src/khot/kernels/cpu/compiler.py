"""numba's compiler without the work that khot's loops do not need, which is more than half of it.

numba optimises each function, generates machine code for it, and does so again for the functions that call it. A part
of a loop is only ever called by other parts, so it is kept as it was translated, and is optimised with the loop. The
translation leaves out numba's passes for parts of Python that no loop uses, such as closures and array expressions.
"""

import gc
from collections.abc import Callable
from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager

LEFT_OUT = {
    "DumpParforDiagnostics", "FindLiterallyCalls", "InlineClosureLikes", "InlineInlinables", "InlineOverloads",
    "LiteralPropagationSubPipelinePass", "LiteralUnroll", "MakeFunctionToJitFunction", "NopythonRewrites",
    "NoPythonSupportedFeatureValidation", "RewriteDynamicRaises", "WithLifting",
}  # fmt: skip


class _Passes(PassManager):
    """numba's passes for these loops, without its checks and records after each of them."""

    @classmethod
    def of(cls, state: Any) -> "_Passes":
        found, usual = cls("khot"), DefaultPassBuilder.define_nopython_pipeline(state)
        for step in usual.passes:
            if step[0].__name__ not in LEFT_OUT and step not in found.passes:
                found.passes.append(step)
        found.finalize()
        return found

    def _runPass(self, index: int, step: Any, state: Any) -> None:  # numba's name
        step.analysis = self._analysis
        step.run_initialization(state)
        step.run_pass(state)
        step.run_finalizer(state)


class _NoCode(JITCodeLibrary):
    """A part's translation, which is linked into its callers and has no address."""

    def _optimize_final_module(self) -> None: ...

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, env_name: str, env: Any) -> None:
        """Nothing: only errors use the environment of a function."""


class Part(CompilerBase):
    """Compiles a function that only compiled functions call."""

    def define_pipelines(self) -> list[Any]:
        self.state.library = _NoCode(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return [_Passes.of(self.state)]


class Apart(Part):
    """The same with the promise that what the function writes overlaps no other array.

    Without it, a loop that writes and sums has two versions of machine code, which add in different orders, and uses
    the slow one if arrays are close together. Then the last digits of a result depend on where in memory its tensors
    happen to be.
    """

    def define_pipelines(self) -> list[Any]:
        self.state.flags.noalias = True
        return super().define_pipelines()


class Loop(CompilerBase):
    """Compiles a loop and its parts."""

    def define_pipelines(self) -> list[Any]:
        return [_Passes.of(self.state)]

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compiles without collections of garbage, which take a seventh of the time and find next to nothing."""
        if not gc.isenabled():
            return super().compile_extra(func)
        gc.disable()
        try:
            return super().compile_extra(func)
        finally:
            if gc.get_freeze_count() == 0:  # the new objects count as old ones, or a collection would begin at once
                gc.freeze()
                gc.unfreeze()
            gc.enable()
