"""Whether other libraries still do what the tables "what it really does" say; docs/coming_from.md has these tables.

    pip install scikit-learn jax onnx onnxscript onnxruntime entmax optax ott-jax numpyro
    pip install transformers torchmetrics samplics svy lightgbm xgboost pytrec-eval-terrier st-moe-pytorch stg
    pip install colt5-attention
    python benchmarks/peer_behaviour.py

A row is run if its package can be imported: sae-lens, dictionary-learning, softtorch, allRank and overcomplete
want environments of their own.
The rows of R's packages are not run here.
"""

import argparse
import contextlib
import functools
import io
import itertools
import json
import math
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

PAGE = Path(__file__).parents[1] / "docs" / "coming_from.md"
HEADER = "| what it really does | seen in | source | here, on the same input |"
IN_R = {"sampling", "BiasedUrn"}
CHECKS: dict[tuple[str, str], Callable[[], bool]] = {}


class Row(NamedTuple):
    """One behaviour, and the version in which it was seen."""

    behaviour: str
    package: str
    version: str


def rows() -> list[Row]:
    """The rows of all tables of the page."""
    found, inside = [], False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        inside = line == HEADER or (inside and line.startswith("|"))
        if inside and line != HEADER and not line.startswith("|---"):
            behaviour, seen_in = (cell.strip() for cell in line.split(" | ")[:2])
            found.append(Row(behaviour.removeprefix("| "), *seen_in.split(" ")))
    return found


def check(package: str, beginning: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Registers a function that tells whether the package does what the row with this beginning says."""

    def register(function: Callable[[], bool]) -> Callable[[], bool]:
        CHECKS[package, beginning] = function
        return function

    return register


def the_check(row: Row) -> Callable[[], bool] | None:
    """The check of a row, if there is one."""
    matching = [
        function
        for (package, beginning), function in CHECKS.items()
        if package == row.package and row.behaviour.startswith(beginning)
    ]
    assert len(matching) < 2, f"more than one check of: {row.behaviour}"
    return matching[0] if matching else None


def near(found: Any, *expected: float, by: float = 1e-3) -> bool:
    """Whether numbers are the expected ones."""
    values = torch.as_tensor(found, dtype=torch.float64).flatten()
    return bool((values - torch.tensor(expected, dtype=torch.float64)).abs().max() < by)


@check("torch", "`topk` does not keep")
def _() -> bool:
    few, many = (set(torch.ones(300).topk(k).indices.tolist()) for k in (3, 100))
    return few == {0, 1, 2} and min(many) > 150


@check("torch", "After a ReLU has left")
def _() -> bool:
    x = torch.zeros(300)
    x[7] = 1.0
    return set(x.topk(100).indices.tolist()) != {*range(100)}


@check("torch", "`torch.onnx.export` turns `multinomial")
def _() -> bool:
    import onnxruntime

    class Draw(torch.nn.Module):
        def forward(self, weights: torch.Tensor) -> torch.Tensor:
            return torch.multinomial(weights, 3, replacement=False)

    weights, file = torch.ones(2000, 8), io.BytesIO()
    torch.onnx.export(Draw().eval(), (weights,), dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    drawn = session.run(None, {session.get_inputs()[0].name: weights.numpy()})[0]
    return near(sum(len(set(row)) == 3 for row in drawn.tolist()) / 2000, 0.656, by=0.06)


@check("torch", "`torch.utils.checkpoint` restores")
def _() -> bool:
    from torch.utils.checkpoint import checkpoint

    generator, x = torch.Generator().manual_seed(0), torch.ones(100, requires_grad=True)
    y = checkpoint(lambda x: x * x * torch.rand(100, generator=generator).round(), x, use_reentrant=False)
    (slope,) = torch.autograd.grad(y.sum(), x)
    return bool(((slope != 0) != (y != 0)).any())


@check("torch", "`MultiheadAttention` gives a query without keys")
def _() -> bool:
    x, closed = torch.ones(1, 2, 4), torch.tensor([[False, False], [True, True]])
    attention = functools.partial(torch.nn.MultiheadAttention(4, 1, batch_first=True), x, x, x, attn_mask=closed)
    return bool(attention()[0][0, 1].isnan().all()) and not attention(need_weights=False)[0][0, 1].any()


@check("torch", "`WeightNormSparsifier(")
def _() -> bool:
    from torch.ao.pruning import WeightNormSparsifier

    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    sparsifier = WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4), zeros_per_block=2)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    return near((model[0].weight == 0).double().mean(), 0.25)


@check("jax", "`jax.lax.top_k` and ONNX Runtime")
def _() -> bool:
    import jax

    equal = jax.lax.top_k(jax.numpy.ones(300), 100)[1]
    special = jax.lax.top_k(jax.numpy.array([-0.0, 0.0, 1.0, math.nan]), 4)[1]
    return sorted(equal.tolist()) == [*range(100)] and special.tolist() == [3, 2, 1, 0]


@check("jax", "`jax.random.choice(replace=False")
def _() -> bool:
    import jax

    p = jax.numpy.array([0.5, 0.5, 0.0, 0.0, 0.0])
    return jax.random.choice(jax.random.key(0), 5, (3,), replace=False, p=p).tolist()[2] == 2


@check("scikit-learn", "`SelectKBest` keeps the last")
def _() -> bool:
    import numpy as np
    from sklearn.base import BaseEstimator
    from sklearn.feature_selection import SelectFromModel, SelectKBest

    class Equal(BaseEstimator):
        def fit(self, X: Any, y: Any) -> Any:
            self.feature_importances_ = np.ones(5)
            return self

    X, y = np.zeros((20, 5)), np.zeros(20)
    last = SelectKBest(lambda X, y: np.ones(5), k=2).fit(X, y).get_support(indices=True)
    first = SelectFromModel(Equal(), max_features=2, threshold=-np.inf).fit(X, y).get_support(indices=True)
    return last.tolist() == [3, 4] and first.tolist() == [0, 1]


@check("softtorch", "The k soft indices")
def _() -> bool:
    import softtorch

    return near(softtorch.topk(torch.arange(6.0), 3)[1].sum(-2).max(), 1.089)


@check("softtorch", "The scale of the scores")
def _() -> bool:
    import softtorch

    narrow, wide = (softtorch.topk(x, 3)[1] for x in (torch.arange(6.0), 100 * torch.arange(6.0) + 7))
    return bool((narrow - wide).abs().max() < 1e-4)


@check("entmax", "`entmax_bisect` at `alpha=1`")
def _() -> bool:
    import entmax

    x, alpha = torch.tensor([1.0, 2.0, 4.0]), torch.tensor(1.0, requires_grad=True)
    y = entmax.entmax_bisect(x, alpha)
    (slope,) = torch.autograd.grad(y[0], alpha)
    return near(y.detach(), 1 / 3, 1 / 3, 1 / 3) and bool(slope.isnan())


@check("optax", "The default noise of `make_perturbed_fun`")
def _() -> bool:
    import jax
    from optax.perturbations import make_perturbed_fun

    perturbed = make_perturbed_fun(lambda x: x, num_samples=100_000, sigma=1.0)
    return near(perturbed(jax.random.key(0), jax.numpy.zeros(1)).tolist(), 0.577, by=0.02)


@check("ott-jax", "`topk_mask` gives 100 x + 7")
def _() -> bool:
    import jax
    from ott.tools.soft_sort import topk_mask

    x = jax.numpy.arange(6.0)
    narrow, wide = (topk_mask(scores, k=3, epsilon=0.05) for scores in (x, 100 * x + 7))
    return bool(abs(narrow - wide).max() < 1e-3)


@check("numpyro", "Arguments of distributions are checked")
def _() -> bool:
    import jax
    import numpyro.distributions as dist

    with contextlib.suppress(ValueError):
        return dist.Categorical(logits=jax.numpy.array([0.0, 1.0, -jax.numpy.inf])) is None
    return True


@check("sae-lens", "`BatchTopK(k)` keeps")
def _() -> bool:
    from sae_lens.saes.batchtopk_sae import BatchTopK

    kept = [int((BatchTopK(k)(torch.rand(100, 32) + 0.01) != 0).sum()) for k in (0.29, 0.57, 0.58, 1.15)]
    return kept == [28, 56, 57, 114]


@check("sae-lens", "The threshold of a saved autoencoder")
def _() -> bool:
    from sae_lens import SAE
    from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
    from sae_lens.saes.sae import TrainStepInput

    torch.manual_seed(0)
    trained = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(d_in=16, d_sae=32, k=4))

    def active_units() -> float:
        with tempfile.TemporaryDirectory() as folder:
            trained.save_inference_model(folder)
            return (SAE.load_from_disk(folder).encode(torch.randn(2048, 16)) != 0).sum(-1).double().mean().item()

    active = [active_units()]
    for step in range(1000):
        trained.training_forward_pass(TrainStepInput(torch.randn(256, 16), {}, None, step, False))
        if step in (99, 999):
            active.append(active_units())
    return near(active, 16, 7.4, 4, by=0.3)


@check("sae-lens", "`fold_W_dec_norm()` folds")
def _() -> bool:
    from sae_lens.saes.topk_sae import TopKTrainingSAE, TopKTrainingSAEConfig

    trained = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=16, d_sae=32, k=4))
    trained.fold_W_dec_norm()
    return bool(trained.cfg.rescale_acts_by_decoder_norm)


@check("sae-lens", "A checkpoint of sparsify")
def _() -> bool:
    from sae_lens.loading.pretrained_sae_loaders import sparsify_disk_loader
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model" / "layers.3"
        path.mkdir(parents=True)
        (path / "cfg.json").write_text(json.dumps({"d_in": 8, "num_latents": 32, "k": 4}))
        decoder = {"W_dec": torch.randn(32, 8), "b_dec": torch.zeros(8)}
        save_file(
            {"encoder.weight": torch.randn(32, 8), "encoder.bias": torch.zeros(32), **decoder}, path / "sae.safetensors"
        )
        return tuple(sparsify_disk_loader(path)[1]["W_dec"].shape) == (8, 32)


@check("dictionary-learning", "A new `BatchTopKSAE`")
def _() -> bool:
    from dictionary_learning.trainers.batch_top_k import BatchTopKSAE

    torch.manual_seed(0)
    return near((BatchTopKSAE(16, 32, 2).encode(torch.randn(4096, 16)) != 0).sum(-1).double().mean(), 16, by=0.5)


@check("transformers", "`router_logits` of Mixtral")
def _() -> bool:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

    router = MixtralTopKRouter(MixtralConfig(hidden_size=4, num_local_experts=4))
    router.weight.data = torch.eye(4)
    x = torch.tensor([[-3.0, 1.0, 2.0, 0.0]])
    return torch.equal(router(x)[0], x)


def balance(*layers: torch.Tensor) -> float:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return float(load_balancing_loss_func(layers, 4, 2))


@check("transformers", "The balance loss at equal loads")
def _() -> bool:
    logits = torch.zeros(6, 4)
    for token, experts in enumerate(itertools.combinations(range(4), 2)):
        logits[token, list(experts)] = 5.0
    return near(balance(logits), 2.0)


@check("transformers", "The balance loss adds up")
def _() -> bool:
    first = torch.tensor([[9.0, 9.0, 0.0, 0.0]]).repeat(8, 1)
    return near([balance(first), balance(first, first.flip(-1))], 4.0, 2.0)


@check("transformers", "DeepSeek-V3's router closes")
def _() -> bool:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = DeepseekV3Config(hidden_size=8, n_routed_experts=8, num_experts_per_tok=4, n_group=4, topk_group=2)
    router = DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(8)
    router.e_score_correction_bias.fill_(-2.0)
    experts = router(torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0, 2.5, 2.6]]))[2]
    return set(experts.flatten().tolist()) == {0, 1, 6, 7}


@check("transformers", "`TopKLogitsWarper(k)` keeps")
def _() -> bool:
    from transformers import TopKLogitsWarper

    scores = TopKLogitsWarper(2)(None, torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]))
    return int(scores.isfinite().sum()) == 5


@check("torchmetrics", "Precision, recall, average precision")
def _() -> bool:
    from torchmetrics.functional import retrieval

    x, relevant = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([False, False, True])
    recall, dcg = retrieval.retrieval_recall(x, relevant, top_k=3), retrieval.retrieval_normalized_dcg(x, relevant)
    return near([recall, dcg], 0.0, 0.5)


@check("torchmetrics", "Of 300 equal scores")
def _() -> bool:
    from torchmetrics.functional import retrieval

    x, relevant = torch.ones(300), torch.arange(300) < 100
    precision = [retrieval.retrieval_precision(x, relevant, top_k=k) for k in (100, 3)]
    return near([retrieval.retrieval_normalized_dcg(x, relevant, top_k=100), *precision], 0.333, 0.0, 1.0)


@check("torchmetrics", "Average precision at k")
def _() -> bool:
    from torchmetrics.functional import retrieval

    x, relevant = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([True, False, True, True])
    return near(retrieval.retrieval_average_precision(x, relevant, top_k=2), 1.0)


@check("lightgbm", "nDCG of equal scores")
def _() -> bool:
    import lightgbm
    import numpy as np

    def ndcg(relevance: list[int], queries: int = 50) -> float:
        data = lightgbm.Dataset(np.zeros((4 * queries, 1)), np.tile(relevance, queries), group=[4] * queries)
        values: dict[str, Any] = {}
        parameters = {"objective": "lambdarank", "metric": "ndcg", "eval_at": [1], "verbosity": -1}
        lightgbm.train(parameters, data, 1, valid_sets=[data], callbacks=[lightgbm.record_evaluation(values)])
        return values["training"]["ndcg@1"][0]

    return near([ndcg([1, 0, 0, 0]), ndcg([0, 0, 0, 1]), ndcg([0, 0, 0, 0])], 1.0, 0.0, 1.0)


@check("xgboost", "The same; `ndcg@1-`")
def _() -> bool:
    import numpy as np
    import xgboost

    def ndcg(relevance: list[int], metric: str = "ndcg@1", queries: int = 50) -> float:
        data, values = xgboost.DMatrix(np.zeros((4 * queries, 1)), np.tile(relevance, queries)), {}
        data.set_group([4] * queries)
        parameters = {"objective": "rank:ndcg", "eval_metric": metric, "verbosity": 0}
        xgboost.train(parameters, data, 1, evals=[(data, "data")], evals_result=values, verbose_eval=False)
        return values["data"][metric][0]

    found = [ndcg([1, 0, 0, 0]), ndcg([0, 0, 0, 1]), ndcg([0, 0, 0, 0]), ndcg([0, 0, 0, 0], "ndcg@1-")]
    return near(found, 1.0, 0.0, 1.0, 0.0)


@check("pytrec-eval-terrier", "Scores are rounded to float32")
def _() -> bool:
    import pytrec_eval

    evaluator = pytrec_eval.RelevanceEvaluator({"query": {"a": 1, "b": 0}}, {"recip_rank"})
    return near(evaluator.evaluate({"query": {"a": 100000.001, "b": 100000.0}})["query"]["recip_rank"], 0.5)


@check("st-moe-pytorch", "In evaluation, the second expert")
def _() -> bool:
    from st_moe_pytorch import MoE

    torch.manual_seed(0)
    x = 5 * torch.randn(1, 1000, 16)

    def change(**options: float) -> float:
        moe = MoE(dim=16, num_experts=4, **options).eval()
        with torch.no_grad():
            return (moe(x).outputs - moe(x).outputs).abs().max().item()

    return change() > 1e-3 and change(threshold_eval=0.0) == 0


@check("stg", "The gates of a `FeatureSelector`")
def _() -> bool:
    from stg.layers import FeatureSelector

    gates = FeatureSelector(5, 0.5, "cpu").train()(torch.ones(1000, 5))
    return bool((gates == gates[0]).all())


@check("torch", "Draws of `RelaxedOneHotCategorical`")
def _() -> bool:
    from torch.distributions import RelaxedOneHotCategorical, constraints

    torch.manual_seed(0)
    relaxed = RelaxedOneHotCategorical(torch.tensor(0.05), logits=torch.randn(10), validate_args=False)
    draws = relaxed.sample((10_000,))
    outside = ~constraints.simplex.check(draws)
    return near([relaxed.log_prob(draws).isnan().float().mean()], 0.47, by=0.03) and 50 < outside.sum() < 200


@check("colt5-attention", "The entries sum to more than k")
def _() -> bool:
    from colt5_attention import coor_descent

    torch.manual_seed(0)
    return near([coor_descent(10 * torch.randn(1000, 64), n_iters=50, k=8, eps=0.1).sum(-1).mean()], 18.5, by=0.5)


@check("overcomplete", "`BatchTopKSAE(top_k=4)` keeps")
def _() -> bool:
    from overcomplete.sae import BatchTopKSAE

    torch.manual_seed(0)
    autoencoder = BatchTopKSAE(16, 64, top_k=4).train()
    kept = (autoencoder.encode(torch.randn(100, 16))[1] != 0).sum()
    return int(kept) == 4 and not any("threshold" in name for name in autoencoder.state_dict())


@check("allRank", "`neuralNDCG_transposed(")
def _() -> bool:
    from allrank.models.losses.neuralNDCG import neuralNDCG, neuralNDCG_transposed

    grades, order = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([[30.0, 20.0, 10.0, 0.0]])
    losses = [f(order, grades, temperature=0.1, powered_relevancies=False) for f in (neuralNDCG, neuralNDCG_transposed)]
    return near(losses, -1.0, -0.507, by=1e-3)


SIX = [0.15, 0.3, 0.45, 0.6, 0.7, 0.8]
FIVE = [0.15, 0.25, 0.35, 0.5, 0.75]


def of_samplics(method: str, sizes: list[float], k: int, draws: int = 10_000, **arguments: Any) -> torch.Tensor:
    """How often samplics draws each unit."""
    import numpy as np
    from samplics import SelectMethod
    from samplics.sampling import SampleSelection

    np.random.seed(0)
    design, counts = SampleSelection(getattr(SelectMethod, method), wr=False), np.zeros(len(sizes))
    for _ in range(draws):
        counts += np.asarray(design.select(np.arange(len(sizes)), k, mos=np.array(sizes), **arguments)[0]).astype(int)
    return torch.tensor(counts / draws)


def of_svy(method: str, sizes: list[float], n: int, **arguments: Any) -> tuple[torch.Tensor, list[int]]:
    """How often svy draws each unit, and the number of rows of its samples."""
    import polars as pl
    import svy

    frame = pl.DataFrame({"unit": [*range(len(sizes))], "size": sizes})
    sampling = svy.Sample(frame, svy.Design(mos="size")).sampling
    samples = [
        sample.data["unit"].to_list() for sample in getattr(sampling, method)(n=n, rstate=0, n_draws=5000, **arguments)
    ]
    drawn = torch.tensor([unit for sample in samples for unit in sample])
    return torch.bincount(drawn, minlength=len(sizes)) / len(samples), [len(sample) for sample in samples]


@check("samplics", "Brewer's method misses")
def _() -> bool:
    return near(of_samplics("pps_brewer", SIX, 3, draws=40_000)[0], 0.157, by=0.0055)


@check("svy", "Brewer's method misses them in svy")
def _() -> bool:
    return near(of_svy("pps_brewer", [1.0, 0.8, 0.6, 0.4, 0.2], 3, certainty_threshold=1.0)[0][1], 0.738, by=0.03)


@check("samplics", "Rao-Sampford misses")
def _() -> bool:
    return near(of_samplics("pps_rs", FIVE, 2)[0], 0.132, by=0.015)


@check("samplics", "Hanurav-Vijayan draws")
def _() -> bool:
    return near(of_samplics("pps_hv", [0.2, 0.4, 0.6, 0.8], 2, draws=2000)[3], 0.06, by=0.03)


@check("samplics", "A systematic sample after `shuffle=True`")
def _() -> bool:
    return near(of_samplics("pps_sys", [0.83, *[0.1671428] * 7], 2, draws=4000, shuffle=True)[0], 0.33, by=0.04)


@check("samplics", "A systematic sample of equal probabilities")
def _() -> bool:
    frequencies = of_samplics("sys", [1.0] * 11, 4, draws=500)
    return not frequencies[8:].any() and bool(frequencies[:8].all())


@check("samplics", "`inclusion_probs` of Murthy's procedure")
def _() -> bool:
    return near(of_samplics("pps_murphy", FIVE, 2)[0], 0.1716, by=0.02)


@check("svy", "A unit that is drawn twice")
def _() -> bool:
    sizes = of_svy("pps_wr", FIVE, 2)[1]
    return near(sizes.count(1) / len(sizes), 0.26, by=0.035)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="only the rows of these packages")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    others: dict[str, str] = {}
    for row in rows():
        behaves = the_check(row)
        if behaves is None or (options.packages and row.package not in options.packages):
            continue
        try:
            installed = metadata.version(row.package)
            outcome = "as before" if behaves() else "changed"
        except (ImportError, metadata.PackageNotFoundError) as error:
            print(f"not run ({error}): {row.package}: {row.behaviour}")
            continue
        print(f"{outcome}: {row.package}: {row.behaviour}")
        if installed.split("+")[0] != row.version:
            others[row.package + row.version] = f"{row.package} is {installed} here, {row.version} on the page"
    print("\n".join(["", *others.values()]) if others else "\nAll versions are those of the page.")


if __name__ == "__main__":
    main()
