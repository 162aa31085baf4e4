"""Cases of the laws of designs whose rows are cut: what sums over ranks make of the units that each of them holds."""

from functools import partial
from unittest.mock import patch

import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import khot
from khot.distributions import ConditionalPoisson, GumbelTopK, ParetoSampling
from khot.laws import conditional_poisson_parts
from tests.distributed.group import case
from tests.distributed.spread import R, S, compare, masked, mesh_of, spread
from tests.inputs import normal

BY_SUMS = [GumbelTopK, ParetoSampling, ConditionalPoisson, partial(ParetoSampling, adjust=None)]


@case
def laws_of_cut_rows():
    """Values and gradients of what sums give, against whole rows."""
    for n, design_class in [(7, c) for c in BY_SUMS] + [(1000, c) for c in BY_SUMS[:3]]:
        logits = normal(3, n)
        sizes = torch.tensor([2, n // 2, 1])
        value = khot.topk_mask(normal(2, 3, n, seed=2), sizes)
        design = design_class(logits=spread(logits, [S(1)]), k=sizes)
        assert design.works_on_parts("log_prob") and design.works_on_parts("mean")
        placements = [S(0), S(1)] if design_class is ParetoSampling else [S(1)]
        compare(lambda v, c=design_class, k=sizes, x=value: c(logits=v, k=k).log_prob(x), [logits], [placements])
        if design_class in BY_SUMS[1:3] or (n == 7 and design_class is GumbelTopK):
            y, _ = compare(lambda v, c=design_class, k=sizes: c(logits=v, k=k).mean, [logits], [placements])
            assert list(y.placements) == placements
    with patch.object(conditional_poisson_parts, "SLAB", 4):  # of so many units more are taken some at a time
        compare(lambda v: ConditionalPoisson(logits=v, k=2).entropy(), [normal(3, 10)], [[S(1)]])
    softness = torch.tensor([0.5, 1.0, 2.0]).double()
    relaxed = lambda v, t: ParetoSampling(logits=v, k=2, temperature=t).mean  # noqa: E731 - of two leaves
    compare(relaxed, [normal(3, 7), softness], [[S(1)], [R]])
    one_row, x = normal(7), khot.topk_mask(normal(7, seed=2), 2)
    compare(lambda v: GumbelTopK(logits=v, k=2).log_prob(x), [one_row], [[S(0)]])
    probs = lambda v: ParetoSampling(probs=khot.sigmoid_topk(v, 2)).mean  # noqa: E731 - of this place
    compare(probs, [normal(3, 7)], [[S(1)]])


@case
def limits_of_laws_of_cut_rows():
    """Certain units, no choice, impossible values, wide gaps, and rows with too little spread, which are gathered."""
    logits, n = masked(9), 9
    sizes = torch.tensor([[2, 3], [9, 4], [0, 3]])  # of row (1, 1) all that are possible
    value = khot.topk_mask(logits, sizes)
    impossible = khot.topk_mask(-logits, sizes)
    logits[2, 1, :3] += 2000.0
    apart = 30.0 * torch.arange(n).double().expand(3, 2, n)
    for design_class in BY_SUMS[:3]:
        for x in (value, impossible):
            compare(lambda v, c=design_class, x=x: c(logits=v, k=sizes).log_prob(x), [logits], [[S(2)]])
        for scores in (logits, apart) if design_class is GumbelTopK else [logits]:
            compare(lambda v, c=design_class: c(logits=v, k=sizes).mean, [scores], [[S(2)]])
    assert not GumbelTopK(logits=spread(apart, [S(2)]), k=3).works_on_parts("mean")


class Exchanged(TorchDispatchMode):
    """Shapes of the tensors that this process gives to collectives."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            tensors = torch.utils._pytree.tree_leaves(args)
            self.shapes += [tuple(v.shape) for v in tensors if isinstance(v, torch.Tensor)]
        return function(*args, **(kwargs or {}))


@case
def what_is_exchanged_of_cut_rows():
    """Few collectives, and never a tensor with an axis of the length of a row or of a part of it."""
    n, k = 1000, 20
    logits = normal(2, n)
    value = khot.topk_mask(normal(2, n, seed=2), k)
    most = {"sample": (9, 11, 0), "log_prob": (14, 32, 17), "mean": (90, 35, 16)}
    for place, design_class in enumerate(BY_SUMS[:3]):
        for name, limits in most.items():
            if limits[place] == 0:  # it gathers
                continue
            given, x = spread(logits, [S(1)], True), spread(value, [S(1)])
            with Exchanged() as exchanged, CommDebugMode() as counted:
                design = design_class(logits=given, k=k)
                y = design.sample() if name == "sample" else design.mean if name == "mean" else design.log_prob(x)
                if name != "sample" and (design_class, name) != (GumbelTopK, "mean"):  # whose backward takes seconds
                    y.to_local().sum().backward()
            assert counted.get_total_counts() <= limits[place], (design_class, name, counted.get_comm_counts())
            lengths = {length for shape in exchanged.shapes for length in shape}
            assert not lengths & {n, n // mesh_of(1).size()} and exchanged.shapes, (design_class, name, lengths)
