"""The kernels of the product tree under test, on leaves made from the scores of the other cases."""

from functools import partial

import torch
from torch import Tensor

from khot.kernels import backend
from khot.kernels.count import FOREST_LEVELS, reference_tree, roots_shape
from khot.kernels.count import pairs as pair_convolution
from khot.kernels.count.triton_draw import launch_draw
from khot.kernels.count.triton_forest import launch_forest
from khot.kernels.count.triton_pairs import pair_merge, pair_split
from tests.kernels.device import INTERPRETED
from tests.kernels.kernel_case import DOUBLE, Inputs, KernelCase, Outputs

SHAPES = [(5, 2), (3, 21), (1, 40), *([] if INTERPRETED else [(1, 90), (128, 1000), (2000, 10), (3, 1024)])]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Inputs:
    """Log-odds, k, and a second matrix of their shape."""
    generator = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=DOUBLE).to(dtype)
    return x, torch.randint(0, shape[1] + 1, shape[:1], generator=generator), grad


def leaves(x: Tensor, k: Tensor, levels: int) -> tuple[Tensor, Tensor, int, int]:
    """Leaves, k, bound and levels, at most those of a single tree."""
    n = x.shape[1]
    leaf, k = torch.sigmoid(torch.stack((-x, x)).double()).mT, k.clamp(1, max(1, n // 2)).long()
    return leaf, k, int(k.max()), min(levels, (n - 1).bit_length())


def along(leaf: Tensor, grad: Tensor) -> Tensor:
    """A tangent of the leaves, with other strides."""
    return torch.stack((grad.T.double(), leaf[0]))


def cotangent(leaf: Tensor, bound: int, levels: int) -> Tensor:
    counts, trees, rows = roots_shape(leaf, bound, levels)
    values = torch.linspace(-1, 1, counts * trees, dtype=leaf.dtype, device=leaf.device)
    return values.view(counts, trees, 1).expand(-1, -1, rows)


def tree_kernel(x: Tensor, k: Tensor, grad: Tensor, levels: int) -> Outputs:
    leaf, *plan = leaves(x, k, levels)
    g, u = cotangent(leaf, *plan[1:]), along(leaf, grad)
    return tuple(launch_forest(leaf, *plan, *more) for more in ((), (g,), (None, u), (g, u)))


def tree_reference(x: Tensor, k: Tensor, grad: Tensor, levels: int) -> Outputs:
    leaf, *plan = leaves(x, k, levels)
    g, u = cotangent(leaf, *plan[1:]), along(leaf, grad)
    roots, outsides = reference_tree.forest_roots(leaf, *plan), reference_tree.forest_outsides(leaf, g, *plan)
    return roots, outsides, *reference_tree.forest_bends(leaf, u, g, *plan, True)


def compile_tree(x: Tensor, k: Tensor, _: Tensor, levels: int) -> None:
    leaf = torch.stack((x, x)).mT
    plan = leaf, k.long(), x.shape[1] // 2, min(levels, (x.shape[1] - 1).bit_length())
    g = torch.empty(roots_shape(leaf, *plan[2:]), dtype=x.dtype)
    for more in ((), (g,), (None, leaf), (g, leaf)):
        launch_forest(*plan, *more)
    launch_draw(leaf, *plan[2:], torch.zeros(*g.shape[1:], 3, dtype=torch.long), None)


def compile_forest(x: Tensor, k: Tensor, _: Tensor) -> None:
    for levels in (5, 8, 10):
        compile_tree(x, k, _, levels)


def pairs(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, int]:
    """Children, a cotangent of a window of their parent, and the window's start."""
    children = torch.stack((x.T, grad.T), 1).double()
    g = children[: max(1, x.shape[1] - 1), 0]
    return children.unsqueeze(-1), g.unsqueeze(-1), x.shape[1] // 2


def pair_kernel(x: Tensor, k: Tensor, grad: Tensor) -> Outputs:
    children, g, start = pairs(x, grad)
    return pair_merge(children, start, len(g)), pair_split(g, children, start)


def pair_reference(x: Tensor, k: Tensor, grad: Tensor) -> Outputs:
    children, g, start = pairs(x, grad)
    with backend("torch"):
        return pair_convolution.merge(children, start, len(g)), pair_convolution.split(g, children, start)


def compile_pairs(x: Tensor, *_: Tensor) -> None:
    children = torch.stack((x.T, x.T), 1)
    pair_merge(children, 0, len(children))
    pair_split(children[:, 0], children, 3)


def trees() -> list[KernelCase]:
    whole, part = FOREST_LEVELS, 5
    return [
        KernelCase(
            "tree",
            partial(tree_kernel, levels=whole),
            partial(tree_reference, levels=whole),
            make,
            SHAPES,
            partial(compile_tree, levels=whole),
            [((rows, n), DOUBLE) for n in (10, 200, 1000) for rows in (64, 1000)],
            1e-11,
            (),
        ),
        KernelCase(
            "forest",
            partial(tree_kernel, levels=part),
            partial(tree_reference, levels=part),
            make,
            SHAPES[2:],
            compile_forest,
            [((64, 5000), DOUBLE)],
            1e-11,
            (),
        ),
        KernelCase(
            "pairs",
            pair_kernel,
            pair_reference,
            make,
            [(3, 21), (100, 5)],
            compile_pairs,
            [((2, 50), DOUBLE), ((200, 50), DOUBLE)],
            1e-11,
            (),
        ),
    ]
