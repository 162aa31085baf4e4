"""A tensor k may have any integer dtype, or a half type: its sums over rows neither overflow nor round.

The integers that 8 bits hold are few: rows have 300 units.
"""

import numpy as np
import pytest
import torch
from torch.distributions import biject_to, transform_to

import khot
from khot import constraints
from khot.nn import BatchTopK, ExpertChoice, TokenChoice, TopK, TopKMask, topk_attention
from tests.inputs import normal
from tests.loops import for_each
from tests.maps import RELAXATIONS
from tests.registry import DESIGNS, PERTURBED, RELAXED

UNITS, SIZES = 300, [100, 3, 120, 60]
DTYPES = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64]
LAWS = [(case.name, case.make) for case in (*DESIGNS, *PERTURBED) if "exact" not in case.name]
LAWS += [(case.public.__name__, lambda logits, k, case=case: case.public(0.5, logits, k)) for case in RELAXED]


def draw(law):
    torch.manual_seed(0)
    return law.rsample() if law.has_rsample else law.sample()


def attention(softness, **kwargs):
    def call(x, k):
        keys = normal(4, UNITS, 2, seed=1)
        query = keys[:, : k.numel()] if kwargs else normal(4, k.numel(), 2, seed=2)
        return topk_attention(query, keys, keys, k, softness=softness, **kwargs)

    return call


FUNCTIONS = {case.name: lambda x, k, case=case: case.map(x, k, 0.7) for case in RELAXATIONS}
FUNCTIONS |= {name: lambda x, k, make=make: draw(make(logits=x, k=k)) for name, make in LAWS}
FUNCTIONS |= {
    "topk_mask": khot.topk_mask,
    "topk_indices": lambda x, k: khot.topk_indices(x, 7, starts=k, lengths=k),
    "successive_softmax_topk": lambda x, k: khot.successive_softmax_topk(x, k[1]),
    "perturbed_topk": lambda x, k: khot.perturbed_topk(x, k, 0.1, 5, generator=torch.Generator().manual_seed(0)),
    "range": lambda x, k: draw(khot.ConditionalPoisson(logits=x, k=(k, 290))),
    "k_hot": lambda x, k: constraints.k_hot(k).check(khot.topk_mask(x, k.long())),
    "capped_simplex": lambda x, k: constraints.capped_simplex(k).check(khot.sigmoid_topk(x, k.long())),
    "ranking": lambda x, k: constraints.ranking(UNITS, k).check(khot.PlackettLuce(x, k.long()).mode),
    "transform_to": lambda x, k: transform_to(constraints.capped_simplex(k))(x),
    "biject_to": lambda x, k: biject_to(constraints.capped_simplex(k))(x),
    "subset_vector": lambda x, k: khot.subset_vector(torch.tensor(5), UNITS, k[1]),
    "TopK": lambda x, k: TopK(2)(x, k),
    "TopKMask_relaxed": lambda x, k: TopKMask(2, softness=0.5)(x, k),
    "BatchTopK": lambda x, k: BatchTopK(2)(x, k),
    "BatchTopK_one_k": lambda x, k: BatchTopK(2, softness=0.5)(x, k[2]),
    "ExpertChoice": lambda x, k: ExpertChoice(2)(x.mT, k),
    "TokenChoice": lambda x, k: TokenChoice(2)(x, k),
    "attention": attention(None),
    "attention_causal": attention(0.5, is_causal=True),
    "attention_masked": attention(None, attn_mask=torch.ones(4, UNITS, dtype=torch.bool)),
}


@for_each("name", FUNCTIONS)
@for_each("dtype", DTYPES)
def test_sizes(name, dtype):
    x, k = normal(4, UNITS), torch.tensor(SIZES)
    torch.testing.assert_close(FUNCTIONS[name](x, k.to(dtype)), FUNCTIONS[name](x, k))


@for_each("dtype", [torch.int64, *DTYPES])
def test_choices(dtype):
    law, choices = khot.PlackettLuce(normal(4, UNITS), 3), torch.tensor([100, 3, 120])
    torch.testing.assert_close(law.log_prob(choices.to(dtype)), law.log_prob(choices))
    assert law.to_khot(choices.to(dtype)).nonzero().flatten().tolist() == sorted(choices.tolist())


@for_each("dtype", [torch.bool, torch.int64, *DTYPES])
def test_whole_values_on_the_capped_simplex(dtype):
    rows = torch.tensor([[1, 1, 0], [1, 1, 1]]).to(dtype)
    for k in (2, torch.tensor(2)):
        constraint = constraints.capped_simplex(k)
        assert constraint.check(rows).tolist() == [True, False]
        assert constraint.holds(rows[0]) and not constraint.holds(rows)


def test_hard_data_of_a_relaxed_law():
    with pytest.raises(ValueError, match="hard data need a sampling design"):
        khot.RelaxedKHot(0.5, torch.zeros(3), 2).log_prob(torch.tensor([1, 1, 0]))


@for_each("name", ["BatchTopK_one_k", "attention_causal"])
def test_sizes_in_half_types_are_not_rounded_again(name):
    x, k = normal(5, UNITS), torch.full((UNITS,) if name == "attention_causal" else (3,), 282.0)
    torch.testing.assert_close(FUNCTIONS[name](x, k.bfloat16()), FUNCTIONS[name](x, k))


@for_each("name, make", [law for law in LAWS if law[0] != "RelaxedKHot"])
def test_k_is_an_array_without_axes(name, make):
    """NumPy's results of sums over all axes are such arrays."""
    assert torch.equal(draw(make(logits=normal(5), k=np.array(2))), draw(make(logits=normal(5), k=2)))
