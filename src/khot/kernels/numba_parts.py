"""A way to compile functions that only compiled functions call: once, with what calls them.

numba makes machine code of every function by itself, and then, as part of the module of each of its callers, once
more: of the function at the bottom of five, five times. Here a function stays what LLVM reads until the loop over rows
that it is part of is optimised as a whole. This takes a third off the time to compile.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import AnnotateTypes


class _PartLibrary(JITCodeLibrary):
    """A function as LLVM reads it. The names of the methods are numba's."""

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """There is no machine code that could be told of the environment, which is for errors with values of a call."""

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """That is left to what links it."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=True)
class _LibraryOfAPart(LoweringPass):
    _name = "khot_library_of_a_part"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        state.library = _PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return False


class PartCompiler(CompilerBase):
    """numba's ``pipeline_class`` for such functions."""

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_LibraryOfAPart, AnnotateTypes)  # the last before LLVM's text is made
        passes.finalize()
        return [passes]
