"""Two ways of our own to compile functions that only compiled functions call.

:class:`PartCompiler` compiles them once, with what calls them. numba makes machine code of every function by itself,
and then, as part of the module of each of its callers, once more: of the function at the bottom of five, five times.
Here a function stays what LLVM reads until the loop over rows that it is part of is optimised as a whole. This takes a
third off the time to compile.

:class:`ApartCompiler` promises that what the function writes overlaps no other array. Without that, a loop that writes
and sums has two machine codes, which add in different orders, and takes the slow one where arrays lie close together.
Then the last digits of a result depend on where in memory its tensors happen to lie.
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


class ApartCompiler(CompilerBase):
    """numba's ``pipeline_class`` for functions whose array arguments share no memory that is written."""

    def define_pipelines(self) -> list[Any]:
        self.state.flags.noalias = True
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]
