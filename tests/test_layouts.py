"""Sparse and nested tensors: an error that says what to give instead, from everything that takes scores."""

import pytest
import torch

from tests.maps import RELAXATIONS
from tests.modules import MODULES
from tests.registry import DESIGNS, LOSSES, PERTURBED

X = torch.linspace(-1.0, 1.0, 32).view(4, 8)
LAYOUTS = {
    "coo": (X.to_sparse, "to_dense"),
    "csr": (X.to_sparse_csr, "to_dense"),
    "jagged": (lambda: torch.nested.nested_tensor([X[0], X[1, :5]], layout=torch.jagged), "to_padded_tensor"),
    "nested": (lambda: torch.nested.nested_tensor([X[0], X[1, :5]]), "to_padded_tensor"),
}
TAKERS = {case.name: lambda x, case=case: case.map(x, 2) for case in RELAXATIONS}
TAKERS |= {case.name: lambda x, case=case: case.make(logits=x, k=2) for case in DESIGNS + PERTURBED}
TAKERS |= {f"loss_{case.name}": lambda x, case=case: case.function(x, case.targets(0, 2)) for case in LOSSES}
TAKERS |= {f"module_{case.name}": lambda x, case=case: case.call(case.make(), x) for case in MODULES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("taker", TAKERS)
def test_layouts_are_named_with_the_cure(taker, layout):
    make, cure = LAYOUTS[layout]
    with pytest.raises(TypeError, match=cure):
        TAKERS[taker](make())
