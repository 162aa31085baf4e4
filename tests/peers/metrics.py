"""Losses of rank metrics beside scikit-learn's and torchmetrics' metrics, at a softness of 1e-4.

``python -m tests.peers.metrics`` prints the largest differences; it needs scikit-learn and torchmetrics.
"""

import sklearn
import torch
import torchmetrics
from sklearn.metrics import ndcg_score
from torch import Tensor
from torchmetrics.functional import retrieval as functional
from torchmetrics.retrieval import RetrievalRecall

from khot import topk_metric_loss
from tests.peers.table import compare

ROWS, ITEMS, SIZES, SOFTNESS = 100, 12, (1, 3, 10), 1e-4


def main() -> None:
    torch.manual_seed(0)
    scores = (torch.rand(ROWS, ITEMS).argsort(-1) + 1).double() / ITEMS  # positive, as torchmetrics' recall wants
    graded = torch.randint(0, 4, (ROWS, ITEMS))
    graded[:, 0] += 1  # scikit-learn counts rows without relevance, as a metric of 0
    binary = (graded > 2).long()
    for ties, x in (("", scores), (", ties", (3 * scores).round())):
        _compare_ndcg(ties, x, graded)
    for name, metric in (
        ("recall", functional.retrieval_recall),
        ("precision", functional.retrieval_precision),
        ("mrr", functional.retrieval_reciprocal_rank),
    ):
        expected = [_of_rows(lambda x, y, k=k, m=metric: m(x, y, top_k=k), scores, binary) for k in SIZES]
        _compare_metric(name, scores, binary, expected)
    assert not binary.any(-1).all()
    for k in SIZES:
        recall = RetrievalRecall(empty_target_action="skip", top_k=k)
        recall.update(scores.flatten(), binary.flatten(), torch.arange(ROWS).repeat_interleave(ITEMS))
        found = 1 - topk_metric_loss(scores, binary, k, "recall", SOFTNESS)
        compare("torchmetrics", torchmetrics, f"RetrievalRecall(skip), k = {k}", found, recall.compute(), 1e-6)


def _compare_ndcg(ties: str, x: Tensor, graded: Tensor) -> None:
    for k in SIZES:
        found = 1 - topk_metric_loss(x, graded, k, softness=SOFTNESS, reduction="none")
        by_rows = [ndcg_score(graded[[row]].numpy(), x[[row]].numpy(), k=k) for row in range(ROWS)]
        compare("scikit-learn", sklearn, f"ndcg_score, k = {k}{ties}", found, by_rows, 1e-6)
        of_rows = _of_rows(lambda x, y, k=k: functional.retrieval_normalized_dcg(x, y, top_k=k), x, graded)
        compare("torchmetrics", torchmetrics, f"retrieval_normalized_dcg, k = {k}{ties}", found, of_rows, 1e-6)


def _compare_metric(name: str, x: Tensor, binary: Tensor, expected: list[Tensor]) -> None:
    for k, of_rows in zip(SIZES, expected, strict=True):
        has_relevance = binary.any(-1)
        found = 1 - topk_metric_loss(x, binary, k, name, SOFTNESS, reduction="none")[has_relevance]
        compare("torchmetrics", torchmetrics, f"retrieval {name}, k = {k}", found, of_rows[has_relevance], 1e-6)


def _of_rows(metric, x: Tensor, relevance: Tensor) -> Tensor:
    return torch.stack([metric(*row) for row in zip(x, relevance, strict=True)])


if __name__ == "__main__":
    main()
