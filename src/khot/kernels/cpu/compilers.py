"""Two compilers of our own, for functions that only compiled functions call.

:class:`PartCompiler` compiles them once, together with their callers. numba compiles every function to machine code by
itself, and then again as part of the module of each of its callers: a function at the bottom of five levels, five
times. Here a function stays LLVM code until the loop over rows that contains it is optimised as a whole. This saves a
third of the compilation time.

:class:`ApartCompiler` promises that what the function writes overlaps no other array. Without this, a loop that writes
and sums has two versions of machine code, which add in different orders, and uses the slow one if arrays are close
together. Then the last digits of a result depend on where in memory its tensors happen to be.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, register_pass
from numba.core.typed_passes import AnnotateTypes


class _PartLibrary(JITCodeLibrary):
    """A function as LLVM code. numba prescribes the names of the methods."""

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Does nothing: no machine code needs the environment, which is for errors with values of a call."""

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None:
        """Does nothing: the code that links this part optimises it."""

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
    """numba's ``pipeline_class`` for functions that become part of their callers."""

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_LibraryOfAPart, AnnotateTypes)  # the last pass before LLVM code is generated
        passes.finalize()
        return [passes]


class ApartCompiler(CompilerBase):
    """numba's ``pipeline_class`` for functions whose array arguments share no memory that is written."""

    def define_pipelines(self) -> list[Any]:
        self.state.flags.noalias = True
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]
