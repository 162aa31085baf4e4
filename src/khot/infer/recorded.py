"""Functions of tensors as the operations that they perform, recorded once and replayed without the code around them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from khot._torch_internals import writes_program

# Functions that hand the numbers of a tensor to Python, where a recording cannot follow; it refuses bool(x), int(x) and
# x.item() itself.
READERS = {Tensor.numpy: "numpy()", Tensor.tolist: "tolist()", Tensor.__array__: "numpy.asarray", torch.equal: "equal"}


class _RefusesReaders(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READERS and writes_program():  # not so in operators of one's own, such as loops of numba
            raise RuntimeError(f"{READERS[func]} reads the numbers of a tensor")
        return func(*args, **(kwargs or {}))


def record(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
    """The same function, valid as long as the code of the original would perform the same operations.

    What does not depend on the inputs is computed now.

    Raises:
        RuntimeError: If the function reads the numbers of a tensor, as in ``if x[0] > 0``, or draws random ones.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # imports SymPy

    with _RefusesReaders():
        program = make_fx(function)(*(x.detach().clone() for x in inputs))
    for node in program.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise RuntimeError(f"{node.target} draws random numbers")
    return _with_constants(program)


def _with_constants(program: GraphModule) -> GraphModule:
    """The same program, in which everything that does not depend on its inputs is a constant."""
    graph, changing, known = program.graph, _changing(program.graph), dict[Node, Any]()
    interpreter = Interpreter(program)
    for node in graph.nodes:
        if node not in changing and node.op != "output":
            args, kwargs = (map_arg(x, known.__getitem__) for x in (node.args, node.kwargs))
            known[node] = getattr(interpreter, node.op)(node.target, args, kwargs)
    for node in reversed(list(known)):
        if node.users:  # what is left of them, since those that are known have been erased
            constant = f"constant_of_{node.name}"
            program.register_buffer(constant, known[node])
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(constant))
        graph.erase_node(node)
    program.recompile()
    return program


def _changing(graph: Graph) -> set[Node]:
    """The nodes that depend on the inputs, and those that such a node writes to, with what they are made of."""
    changing: set[Node] = set()
    before = -1
    while before < len(changing):
        before = len(changing)
        for node in graph.nodes:
            if node.op == "placeholder" or not changing.isdisjoint(node.all_input_nodes):
                changing.add(node)
                changing.update(_with_sources(_written_by(node)))
    return changing


def _written_by(node: Node) -> Iterable[Node]:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = zip(schema.arguments, node.args, strict=False)
    return [x for argument, x in written if argument.is_write and isinstance(x, Node)]


def _with_sources(nodes: Iterable[Node]) -> set[Node]:
    found, waiting = set[Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
