"""Imports run one way and in no circle, and no package uses private names of another.

A *room* is a part of khot, a *package* a folder of modules; the operations of ``khot.kernels`` are packages in one
room.
"""

import ast
import functools
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LEVELS = {
    "_notes": -3,
    "_shapes": -3,
    "_torch_internals": -3,
    "_contents": -2,
    "_host": -2,
    "_refusals": -2,
    "_validation": -1,
    "kernels": 0,
    "_distributed": 1,  # passed to kernels as reductions that they do not know
    "_module": 2,
    "laws": 2,
    "relaxations": 2,
    "constraints": 3,
    "distributions": 4,
    "estimators": 5,
    "infer": 6,
    "losses": 6,
    "diagnostics": 6,
    "nn": 7,
    "sklearn": 8,
}
SHARED_BY_OPERATIONS = {
    "kernels",
    *(f"kernels.{shared}" for shared in ("cpu", "exact", "gpu", "links", "operators", "random_numbers")),
}
# Compiled functions that an operation offers to others.
FOR_OTHER_LOOPS = {"khot.kernels.selection.numba_counting", "khot.kernels.count.numba_table"}
BACKEND_LIBRARIES = ("triton", "numba")
DEVICES = {"khot.kernels.cpu": "numba", "khot.kernels.gpu": "triton"}  # rooms for what all files of a library share
# Private names of other libraries that are read from their objects, and why there is no other way.
FOREIGN = {
    "_replace": "of NamedTuple: documented, and underscored only to leave field names alone",
    "_validate_args": "torch.distributions: what a Distribution was made with, which subclasses hand on",
    "_jit_compile": "Pyro's HMC has no public name for its option",
    "_mask": "Pyro's MaskedDistribution has no public name for its mask",
    "_C": "torch: modes, transforms and keys that surround a call have no public name",
    "_TorchDispatchModeKey": "torch._C",
    "_len_torch_dispatch_stack": "torch._C",
    "_get_dispatch_mode": "torch._C",
    "_get_tracing_state": "torch._C",
    "_dynamo": "torch._C: whether the compiler watches a call",
    "_FrameAction": "torch._C._dynamo: marks the one function that Dynamo must not look at, in torch 2.7",
    "_FrameExecStrategy": "the same",
    "_torchdynamo_disable": "what torch.compiler.disable sets, without the import of the compiler",
    "_torchdynamo_disable_msg": "the same: the reason",
    "_disabled_torch_function_impl": "torch._C",
    "_dispatch_tls_local_include_set": "torch._C",
    "_dispatch_tls_local_exclude_set": "torch._C",
    "_ForceDispatchKeyGuard": "torch._C",
    "_set_fwd_grad_enabled": "torch.autograd.forward_ad: a switch without a public name",
    "_autograd": "torch._C",
    "_top_saved_tensors_default_hooks": "torch._C: hooks that surround a call have no public name",
    "_pop_saved_tensors_default_hooks": "torch._C",
    "_push_saved_tensors_default_hooks": "torch._C",
    "_current_graph_task_id": "torch._C: whether a backward pass is running, as torch's checkpoints ask for it",
    "_getvalue": "numba: the value of an array that an intrinsic makes, as its guide to extensions reads it",
    "_execution_engine": "torch.autograd: what is to be done at the end of a backward pass has no public name",
    "_CachingTorchDispatchMode": "torch.utils.checkpoint: the mode of a selective checkpoint, which has no name",
    "_get_current_dispatch_mode_stack": "torch.utils._python_dispatch",
    "_pop_mode": "torch.utils._python_dispatch",
    "_push_mode": "torch.utils._python_dispatch",
    "_current_level": "torch.autograd.forward_ad: whether forward mode is on",
    "_is_onnx_exporting": "torch.onnx: that it is at work, without the import of the whole exporter",
    "_is_all_true": "torch: the one reduction to a bool that has a batching rule",
    "_is_view": "torch: whether autograd takes a tensor for a view",
    "_version": "torch: how often a tensor was written into",
    "_unsafe_view": "torch.ops.aten: the same numbers as a tensor that is none",
    "_standard_gamma": "torch: the gamma draws that take a generator",
}
FILES = sorted((SOURCE / "khot").rglob("*.py"))


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_package(file: Path) -> bool:
    return file.name == "__init__.py"


MODULES = {module_name(file) for file in FILES}
PACKAGES = {module_name(file) for file in FILES if is_package(file)}


def room(module: str) -> str:
    """The part of a module's name that has a level; "" for khot itself."""
    return [*module.split("."), ""][1]


def package(module: str) -> str:
    """The folder of a module below khot, or the module itself if it lies in no folder."""
    parts = module.split(".")[1:]
    return ".".join(parts if module in PACKAGES or len(parts) == 1 else parts[:-1])


def library_of(module: str) -> str | None:
    """The library that a backend's file is for, as its room or its name says: ``triton_forward``, ``tails_triton``."""
    for device, library in DEVICES.items():
        if f"{module}.".startswith(f"{device}."):
            return library
    name = module.split(".")[-1]
    return next(
        (library for library in BACKEND_LIBRARIES if library in (name.split("_")[0], name.split("_")[-1])), None
    )


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, str, int]]:
    """Yields (module, imported name or "", line) for every import below ``tree``; relative ones are made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")
            above = above[: len(above) - node.level + is_package] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                if f"{source}.{alias.name}" in MODULES:
                    yield f"{source}.{alias.name}", "", node.lineno
                else:
                    yield source, alias.name, node.lineno


def local_imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, module, is_package)


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``module`` imports against the rules, one line each."""
    tree, found = ast.parse(source), []
    local = set(local_imports(tree, module, is_package))
    for target, name, line in imports(tree, module, is_package):
        where = f"{module}:{line} imports {target} {name}".rstrip()
        library = target.split(".")[0]
        if library in BACKEND_LIBRARIES and library_of(module) != library:
            found.append(f"{where}: only {library}_* and *_{library} modules import {library}")
        if library != "khot":
            continue
        if module != "khot":
            found += [f"{where}: {why}" for why in crossings(module, target, name)]
        is_local, of_a_backend = (target, name, line) in local, library_of(target) is not None
        if is_local and not of_a_backend:
            found.append(f"{where} inside a function")
        if of_a_backend and not is_local and library_of(module) != library_of(target):
            found.append(f"{where} before its first call")
    return found


def crossings(module: str, target: str, name: str) -> Iterator[str]:
    """Why a module of khot may not import this from another one."""
    here, there = room(module), room(target)
    if not there:
        yield "khot itself only re-exports"
        return
    if there != here and LEVELS[there] >= LEVELS[here]:
        yield f"{there} is not below {here}"
    inside = [*target.split(".")[2:], name]
    if package(target) != package(module) and any(part.startswith("_") for part in inside):
        yield "a private name of another package"
    if here == there == "kernels" and not may_know(module, target):
        yield "operations know shared modules and the faces of other operations"


def may_know(module: str, target: str) -> bool:
    """Whether a module of ``khot.kernels`` may import another one: what is shared knows no operation."""
    here, there = package(module), package(target)
    if there in SHARED_BY_OPERATIONS or there == here:
        return True
    return here not in SHARED_BY_OPERATIONS and target in PACKAGES | FOR_OTHER_LOOPS


def test_imports_run_one_way():
    assert {room(module) for module in MODULES} - {""} <= set(LEVELS)
    assert [line for file in FILES for line in violations(file.read_text(), module_name(file), is_package(file))] == []


def circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle of modules that import each other, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def without_types(tree: ast.Module) -> ast.Module:
    """Without what only a type checker imports."""
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return tree


def test_no_modules_import_each_other():
    """Imports inside of functions count."""
    graph = {}
    for file in FILES:
        module, tree = module_name(file), without_types(ast.parse(file.read_text()))
        targets = {target for target, _, _ in imports(tree, module, is_package(file))}
        graph[module] = targets & MODULES - {module}
    assert circle(graph) == []


def test_a_circle_is_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """What a module defines: functions, classes, variables, and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@functools.cache
def own() -> dict[str, set[str]]:
    """The private names that each package defines."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for file in FILES:
        names[package(module_name(file))] |= set(filter(is_private, private_names(tree_of(file))))
    return names


def reaches(source: str, module: str) -> list[str]:
    """Private attributes that ``module`` reads from other objects than itself and that its package does not define."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr) or is_own_object(node.value):
            continue
        if node.attr not in own()[package(module)] and node.attr not in FOREIGN:
            found.append(f"{module}:{node.lineno} reads {ast.unparse(node)}")
    return found


def is_own_object(node: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``, whose private attributes a subclass may know."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_unflatten_is_called_as_a_function():
    """The method is one in Python, which compilers trace under a default device, and do not support."""
    texts = {file.name: file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")}
    assert [name for name, text in texts.items() if ".unflatten(" in text.replace("torch.unflatten(", "")] == []


def annotations_of(function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg) and node.annotation:
            yield node.annotation
    if function.returns:
        yield function.returns


def test_functions_made_in_a_graph_quote_unions():
    """Compilers evaluate the annotations of a function within a function, and that of torch 2.9 knows no unions."""
    rooms = ("distributions", "estimators", "laws", "nn", "relaxations", "kernels/count")
    found = [
        (file.name, inner.name)
        for room in rooms
        for file in (SOURCE / "khot" / room).rglob("*.py")
        for outer in ast.walk(tree_of(file))
        if isinstance(outer, ast.FunctionDef)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and inner is not outer
        for annotation in annotations_of(inner)
        if any(isinstance(node, ast.BinOp) for node in ast.walk(annotation))
    ]
    assert found == []


def test_only_kernels_leave_types_out():
    lax = {module_name(file) for file in FILES if "# mypy:" in file.read_text()}
    assert {library_of(module) for module in lax} <= {"triton", "numba"}


def test_private_attributes_stay_in_their_package():
    """Only private names of other libraries in a list are read, and each name in the list is read somewhere."""
    assert [line for file in FILES for line in reaches(file.read_text(), module_name(file))] == []
    read = {node.attr for file in FILES for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute)}
    assert set(FOREIGN) <= read


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("khot.infer", "def f(design):\n    return design._shared_k", 1),
        ("khot.distributions.a", "other._shared_k", 0),
        ("khot.estimators.a", "self._shared_k, super()._shared_k, cls._shared_k", 0),
        ("khot.estimators.a", "tuple._replace(x=1), x.__dict__", 0),
    ],
)
def test_what_counts_as_reaching(module, source, found):
    assert len(reaches(source, module)) == found


def test_violations_are_found():
    for module, source in (
        ("khot.kernels.a", "from khot.relaxations import sigmoid_topk"),
        ("khot.kernels.a", "from khot._distributed.shards import Shards"),
        ("khot.relaxations.a", "from khot.constraints import k_hot"),
        ("khot.relaxations.a", "from .. import constraints"),
        ("khot.distributions.a", "from khot import sigmoid_topk"),
        ("khot.distributions.a", "from khot.relaxations.sigmoid import _solve"),
        ("khot.distributions.a", "def f():\n    from khot.relaxations import sigmoid_topk"),
        ("khot.kernels.a", "import triton"),
        ("khot.kernels.a", "from .cpu.loops import kernel"),
        ("khot.kernels.gpu.a", "import numba"),
        ("khot.kernels.a", "from .a_triton import launch"),
        ("khot.kernels.order.a", "from ..isotonic.exact import block_sums"),
        ("khot.kernels.order.a", "from ..exact.rows import _private"),
        ("khot.kernels.exact.rows", "from ..isotonic import isotonic"),
    ):
        assert violations(source, module) != [], source


def test_allowed_imports_pass():
    for module, source in (
        ("khot.estimators.a", "from khot.distributions import Pivotal\nfrom khot._validation import check_size"),
        ("khot.distributions.a", "from ._b import c\nfrom khot.distributions._b import _d"),
        ("khot.kernels.a", "def f():\n    from .a_triton import launch"),
        ("khot.kernels.cpu.a", "import numba"),
        ("khot.kernels.order.triton_forward", "import triton\nfrom ..gpu.tools import launch"),
        ("khot.kernels.order.a", "from ..isotonic import isotonic\nfrom ..links.base import Link\nfrom .b import _c"),
    ):
        assert violations(source, module) == [], source


def run_python(code: str) -> None:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_relaxations_work_without_pyro_and_triton():
    run_python("""
        import sys

        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name in ("pyro", "triton"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Absent())

        import torch, khot, khot.kernels, khot.relaxations
        x = torch.zeros(4, requires_grad=True)
        y = khot.sigmoid_topk(x, 2)
        assert y.tolist() == [0.5] * 4
        y.sum().backward()
        try:
            with khot.kernels.backend("triton"):
                khot.sigmoid_topk(x, 2)
        except RuntimeError as error:
            assert "Triton is not installed" in str(error), error
        else:
            raise AssertionError("the backend 'triton' ran without Triton")
        assert "sigmoid_topk" in dir(khot) and all(hasattr(khot, name) for name in dir(khot))

        for name in ("ConditionalPoisson", "StraightThrough", "distributions"):
            try:
                getattr(khot, name)
            except ModuleNotFoundError as error:
                assert "pip install pyro-ppl" in str(error), error
            else:
                raise AssertionError(f"khot.{name} came without Pyro")
    """)


FIRST_MAPS = """
import khot, khot.kernels, khot.relaxations
khot.sigmoid_topk(x, 2).square().sum().backward()
khot.log_lapsum_topk(x, torch.tensor(2.5), torch.tensor(0.3, requires_grad=True)).sum().backward()
khot.sparse_topk_magnitude(x, 2).sum().backward()
khot.soft_rank(x).square().sum().backward()
khot.sorted_transport_topk(x, 2).square().sum().backward()
"""

FIRST_DESIGNS = """
import khot
members = [khot.Brewer, khot.ConditionalPoisson, khot.GumbelTopK, khot.ParetoSampling, khot.Pivotal, khot.Sampford]
for member in (*members, khot.Systematic):
    design = khot.StraightThrough(member(logits=x, k=torch.tensor([2]), validate_args=True), "none")
    value = design.rsample()
    (design.log_prob(value) + value.square().sum(-1)).sum().backward()
for member in (khot.ConditionalPoisson, khot.GumbelTopK, khot.Sampford):
    member(logits=x, k=2).log_prob(value.detach()).sum().backward()
relaxed = khot.RelaxedKHot(0.5, logits=x, k=2)
relaxed.log_prob(relaxed.rsample()).sum().backward()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "calls"),
    [("torch", FIRST_MAPS), ("torch, pyro", FIRST_DESIGNS)],
    ids=["relaxations", "designs"],
)
def test_first_calls_on_a_cpu_import_nothing_large(imported, calls):
    """Neither pyro, nor torch's compiler, which takes seconds and brings SymPy and Triton."""
    setup = f"import sys, {imported}\nbefore = set(sys.modules)\nx = torch.randn(3, 5, requires_grad=True)\n"
    check = """
        loaded = set(sys.modules) - before
        packages = {name.partition(".")[0] for name in loaded}
        assert not packages & {"pyro", "triton", "matplotlib", "sympy"}
        assert "scipy" not in packages or "numba" in packages  # which imports SciPy
        compiler = ("torch._dynamo", "torch._inductor", "torch.fx.experimental")
        assert not [name for name in loaded if name.startswith(compiler) or name.endswith("_triton") or ".gpu." in name]
    """
    run_python(setup + calls + textwrap.dedent(check))
