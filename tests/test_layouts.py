"""Everything that takes a tensor refuses sparse and nested ones and dtypes for storage, and says what to pass."""

import pytest
import torch
from torch.distributions import biject_to, transform_to

from khot import (
    ConditionalPoisson,
    KHotReparam,
    Pivotal,
    PlackettLuce,
    constraints,
    horvitz_thompson,
    isotonic_l2,
    permutahedron_projection,
    soft_count,
    soft_quantile,
    straight_through_value,
    subset_index,
    subset_vector,
    topk_cross_entropy,
    topk_threshold,
)
from khot.nn import ExpertChoice, JumpReLU, KHotGate, NMSparsity, TopK
from tests.maps import RELAXATIONS
from tests.modules import MODULES
from tests.registry import CONSTRAINTS, DESIGNS, ESTIMATORS, LOSSES, PERTURBED, RELAXED

X = torch.linspace(-1.0, 1.0, 32).view(4, 8)
LAYOUTS = {
    "coo": (X.to_sparse, "to_dense"),
    "csr": (X.to_sparse_csr, "to_dense"),
    "jagged": (lambda: torch.nested.nested_tensor([X[0], X[1, :5]], layout=torch.jagged), "to_padded_tensor"),
    "float8": (lambda: X.to(torch.float8_e4m3fn), "float8_e4m3fn"),
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


DESIGN = ConditionalPoisson(logits=X, k=2)
HOT = torch.zeros(4, 8).index_fill(-1, torch.tensor([1, 5]), 1.0)
RELAXED_LAWS = [case.public for case in RELAXED]
OTHERS = {("k", case.name): lambda z, case=case: case.map(X, z) for case in RELAXATIONS}
OTHERS |= {(case.softness, case.name): lambda z, case=case: case.map(X, 2, z) for case in RELAXATIONS}
OTHERS |= {("k", case.name): lambda z, case=case: case.make(logits=X, k=z) for case in DESIGNS + PERTURBED}
OTHERS |= {("value", case.name): lambda z, case=case: case.make(logits=X, k=2).log_prob(z) for case in DESIGNS}
OTHERS |= {("value", case.name): lambda z, case=case: case.wrap(DESIGN).log_prob(z) for case in ESTIMATORS}
OTHERS |= {("value", law.__name__): lambda z, law=law: law(0.5, logits=X, k=2).log_prob(z) for law in RELAXED_LAWS}
OTHERS |= {("k", law.__name__): lambda z, law=law: law(0.5, logits=X, k=z) for law in RELAXED_LAWS}
OTHERS |= {("temperature", law.__name__): lambda z, law=law: law(z, logits=X, k=2) for law in RELAXED_LAWS}
OTHERS |= {("target", case.name): lambda z, case=case: case.function(X, z) for case in LOSSES}
OTHERS |= {("k", case.public.__name__): lambda z, case=case: case.make(z) for case in CONSTRAINTS}
OTHERS |= {("value", case.public.__name__): lambda z, case=case: case.make(2).check(z) for case in CONSTRAINTS}
OTHERS |= {
    ("k", "PlackettLuce"): lambda z: PlackettLuce(X, z),
    ("value", "PlackettLuce"): lambda z: PlackettLuce(X, 2).log_prob(z),
    ("logits", "PlackettLuce"): lambda z: PlackettLuce(z, 2),
    ("upper", "k_hot"): lambda z: constraints.k_hot(1, z),
    ("x", "transform_to"): transform_to(constraints.capped_simplex(2)),
    ("u", "biject_to"): biject_to(constraints.capped_simplex(2)),
    ("y", "transform_to"): transform_to(constraints.capped_simplex(2)).inv,
    ("y", "biject_to"): biject_to(constraints.capped_simplex(2)).inv,
    ("probs", "design"): lambda z: Pivotal(probs=z),
    ("temperature", "design"): lambda z: Pivotal(logits=X, k=2, temperature=z),
    (r"k\[0\]", "range"): lambda z: ConditionalPoisson(logits=X, k=(z, 3)),
    (r"k\[2\]", "prior"): lambda z: ConditionalPoisson(logits=X, k=(1, 8, z)),
    ("value", "horvitz_thompson"): lambda z: horvitz_thompson(DESIGN, z, torch.ones(8)),
    ("y", "horvitz_thompson"): lambda z: horvitz_thompson(DESIGN, HOT, z),
    ("temperature", "KHotReparam"): lambda z: KHotReparam(temperature=z),
    ("value", "subset_index"): subset_index,
    ("index", "subset_vector"): lambda z: subset_vector(z, 8, 2),
    ("k", "subset_vector"): lambda z: subset_vector(0, 8, z),
    ("s", "isotonic"): isotonic_l2,
    ("w", "isotonic"): lambda z: isotonic_l2(X, z),
    ("w", "permutahedron"): lambda z: permutahedron_projection(X, z),
    ("points", "soft_count"): lambda z: soft_count(X, z),
    ("q", "soft_quantile"): lambda z: soft_quantile(X, z),
    ("hard", "straight_through_value"): lambda z: straight_through_value(z, X),
    ("soft", "straight_through_value"): lambda z: straight_through_value(X, z),
    ("p_k", "topk_cross_entropy"): lambda z: topk_cross_entropy(X, torch.zeros(4, dtype=torch.long), z),
    ("k", "topk_threshold"): lambda z: topk_threshold(X, z),
    ("k", "TopK"): lambda z: TopK(2, softness=0.5)(X, z),
    ("capacity", "ExpertChoice"): lambda z: ExpertChoice(2, softness=0.5)(X, z),
    ("k", "KHotGate"): lambda z: KHotGate(8, 2)(X, z),
    ("threshold", "JumpReLU"): JumpReLU,
    ("scores", "NMSparsity"): lambda z: NMSparsity(2, 4, softness=0.5, scores=z),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["coo", "float8", "nested"])
@pytest.mark.parametrize("argument", OTHERS, ids="-".join)
def test_layouts_of_other_arguments(argument, layout):
    make, cure = LAYOUTS[layout]
    with pytest.raises(TypeError, match=f"`{argument[0]}` must .*{cure}"):
        OTHERS[argument](make())


def test_the_padding_that_is_named_excludes_entries_of_scores_only():
    nested = LAYOUTS["nested"][0]()
    with pytest.raises(TypeError, match=r"to_padded_tensor\(logits, -torch.inf\), which excludes"):
        Pivotal(logits=nested, k=2)
    with pytest.raises(TypeError, match=r"to_padded_tensor\(probs, 0.0\)$"):
        Pivotal(probs=nested)
