"""Words under which users look for a public name that its own text may lack. The search of the site finds them."""

import re

PHRASES = {
    "sigmoid_topk": "top-k mask, soft top-k, differentiable top-k, relaxed top-k, k-hot softmax, LML, SOFT",
    "sparse_topk": "sparse top-k mask, entmax, sparsemax, budget, projection onto the capped simplex, exact zeros",
    "topk_mask": "hard top-k mask, k-hot, argtopk, one-hot of topk, select the k largest",
    "lapsum_topk": "LapSum top-k mask, Laplace soft top-k",
    "straight_through_topk": "hard top-k mask with gradient, straight-through, STE",
    "transport_topk": "optimal transport top-k mask, Sinkhorn, SOFT top-k operator",
    "soft_rank": "differentiable ranking, torchsort, argsort, Spearman",
    "soft_sort": "differentiable sorting, torchsort, NeuralSort, SoftSort",
    "soft_permutation": "permutation matrix, doubly stochastic, Sinkhorn, NeuralSort, SoftSort",
    "permutahedron_rank": "torchsort, fast soft sort, differentiable ranking",
    "permutahedron_sort": "torchsort, fast soft sort, differentiable sorting",
    "ConditionalPoisson": "k-subset distribution, SIMPLE, maximum entropy, sampling without replacement",
    "GumbelTopK": "Gumbel top-k trick, sampling without replacement, weighted reservoir sampling, successive sampling",
    "Pivotal": "fast subset sampling, splitting method, unequal probability sampling",
    "Sampford": "survey sampling, unequal probability sampling without replacement, probability proportional to size",
    "PhantomUnit": "learned k, fractional k, random size",
    "RelaxedKHot": "Gumbel-softmax, Concrete, relaxed subset, subset Concrete",
    "StraightThrough": "straight-through estimator, STE, SIMPLE",
    "ReinMax": "straight-through estimator, second order",
    "score_function": "REINFORCE, policy gradient, SFESS, leave-one-out, RLOO, black box loss",
    "unordered_set": "sampling without replacement gradient, Kool",
    "horvitz_thompson": "survey estimate, total, variance, inverse probability weighting",
    "TopK": "top-k activation, sparse autoencoder, SAE, k-sparse",
    "BatchTopK": "batch top-k, sparse autoencoder, SAE",
    "ExpertChoice": "mixture of experts, MoE router, gating",
    "NMSparsity": "2:4 sparsity, structured pruning, semi-structured",
    "KHotSelector": "feature selection, scikit-learn, SelectKBest",
    "KHotSwap": "MCMC, Gibbs, locally balanced proposals, variable selection, spike and slab",
    "AutoKHot": "autoguide, variational inference, automatic guide",
    "TopKCrossEntropyLoss": "top-k classification loss",
    "PlackettLuce": "ranking distribution, ordered sampling without replacement",
    "topk_attention": "sparse attention, top-k attention",
}

# Entries of the index: a query for one of these phrases finds the name first.
ENTRIES = {name: text.split(", ") for name, text in PHRASES.items()}
# Sphinx indexes the text between two commas as one keyword, but splits a query into words.
OF = {name: ", ".join(dict.fromkeys(re.findall(r"\w+", text.lower()))) for name, text in PHRASES.items()}
