"""What designs say about a relaxation that makes no inclusion probabilities, and about pathwise samples."""

import pytest
import torch

from khot import ConditionalPoisson, Pivotal, Sampford, log_sigmoid_topk, sigmoid_topk, successive_softmax_topk

LOGITS = torch.tensor([[3.0, 1.0, 0.2, -1.0, 0.5], [8.0, 0.0, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize("design_class", [Pivotal, Sampford])
@pytest.mark.parametrize(
    "relaxation",
    [log_sigmoid_topk, successive_softmax_topk, lambda x, k, t: torch.sigmoid(x)],
    ids=["log", "ss", "own"],
)
def test_relaxation_must_give_inclusion_probabilities(design_class, relaxation):
    with pytest.raises(ValueError, match=r"each row of what `relaxation` .* returns must lie in \[0, 1\] and sum to"):
        design_class(logits=LOGITS, k=3, relaxation=relaxation).sample()


def test_relaxation_is_not_looked_at_under_transforms_and_without_validation():
    mean = torch.func.vmap(lambda row: Pivotal(logits=row, k=3, validate_args=True).mean)(LOGITS)
    torch.testing.assert_close(mean, sigmoid_topk(LOGITS, 3))
    Pivotal(logits=LOGITS, k=3, relaxation=log_sigmoid_topk, validate_args=False).mean  # noqa: B018


def test_sums_that_are_no_integer_are_pointed_to_the_phantom_unit():
    with pytest.raises(ValueError, match="sum 1.5 .*PhantomUnit"):
        Pivotal(probs=torch.tensor([0.5, 0.5, 0.5]))


def test_rsample_says_what_to_do():
    with pytest.raises(NotImplementedError, match="wrap it by an estimator, as in khot.StraightThrough"):
        ConditionalPoisson(logits=LOGITS, k=3).rsample()
