"""`route` and `TokenChoice` beside the router classes of transformers, with random weights.

``python -m tests.peers.routers`` prints the largest differences of the dense weights; it needs transformers.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from khot.nn import TokenChoice, route
from tests.peers.table import compare

TOKENS, D, E, K, C, SHARED, WORDS = 200, 32, 16, 4, 2.5, 2, 50
OPTIONS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"), K),
    **dict.fromkeys(("routed_scaling_factor", "route_scale"), C),
    **{"hidden_size": D, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "topk_method": "group_limited_greedy"},
    **{"moe_norm_min": 1e-12, "zero_expert_num": 0, "use_expert_bias": True, "scoring_func": "sqrtsoftplus"},
    **{"n_shared_experts": SHARED, "rms_norm_eps": 1e-6, "vocab_size": WORDS},
}
V3 = {"scores": "sigmoid", "groups": (4, 2), "eps": 1e-20, "scale": C}
PLAIN = {"renormalize": False}
BIAS = "e_score_correction_bias"
SIMPLE = [  # folder, class, options of the model, words of `route`
    ("mixtral", "MixtralTopKRouter", {}, {}),
    ("minimax", "MiniMaxTopKRouter", {}, {}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {}, {}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": False}, PLAIN),
    ("qwen3_next", "Qwen3NextTopKRouter", {}, {}),
    ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": False}, PLAIN),
    ("flex_olmo", "FlexOlmoTopKRouter", {"norm_topk_prob": False}, PLAIN),
    ("gpt_oss", "GptOssTopKRouter", {}, {}),
    ("granitemoe", "GraniteMoeTopKRouter", {}, {}),
    ("jamba", "JambaTopKRouter", {}, PLAIN),
    ("deepseek_v2", "DeepseekV2TopkRouter", {}, {"groups": (4, 2, 1), "scale": C, **PLAIN}),
    ("deepseek_v2", "DeepseekV2TopkRouter", {"topk_method": "greedy"}, {"scale": C, **PLAIN}),
    ("mistral4", "Mistral4TopkRouter", {}, {"groups": (4, 2), "eps": 1e-20, "scale": C}),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {}, {"bias": BIAS}),
    ("longcat_flash", "LongcatFlashTopkRouter", {}, {"bias": BIAS, "scale": C, **PLAIN}),
    ("llama4", "Llama4Router", {}, {"scores": "sigmoid", **PLAIN}),
    ("minimax_m2", "MiniMaxM2TopKRouter", {}, {"scores": "sigmoid", "bias": "given"}),
    ("lfm2_moe", "Lfm2MoeTopKRouter", {}, {"scores": "sigmoid", "bias": "given", "eps": 1e-6, "scale": C}),
    ("afmoe", "AfmoeTokenChoiceRouter", {}, {"scores": "sigmoid", "bias": "given", "eps": 1e-20, "scale": C}),
    ("deepseek_v3", "DeepseekV3TopkRouter", {}, V3 | {"bias": BIAS}),
    ("glm4_moe", "Glm4MoeTopkRouter", {}, V3 | {"bias": BIAS}),
    ("dots1", "Dots1TopkRouter", {}, V3 | {"bias": BIAS}),
    ("nemotron_h", "NemotronHTopkRouter", {}, V3 | {"bias": BIAS}),
    ("exaone_moe", "ExaoneMoeTopkRouter", {}, V3 | {"bias": BIAS}),
    ("solar_open", "SolarOpenTopkRouter", {}, V3 | {"bias": BIAS}),
    ("deepseek_v4", "DeepseekV4TopKRouter", {}, {"scores": "sqrtsoftplus", "bias": BIAS, "eps": 1e-20, "scale": C}),
]


def main() -> None:
    torch.manual_seed(0)
    for folder, name, options, words in SIMPLE:
        router, hidden = made(folder, name, options), torch.randn(TOKENS, D)
        arguments, words = (), dict(words)
        if words.get("bias") == "given":
            words["bias"] = 0.05 * torch.randn(E)
            arguments = (words["bias"],)
        elif "bias" in words:
            words["bias"] = next(b for n, b in router.state_dict().items() if BIAS in n).reshape(E)
        logits, *theirs = router(hidden.view(1, TOKENS, D) if name == "AfmoeTokenChoiceRouter" else hidden, *arguments)
        if name == "Llama4Router":
            expected, logits = logits, *theirs
        else:
            expected = dense(*theirs)
        row(name + "".join(f", {o}={v}" for o, v in options.items()), logits, expected, words)
    _of_several_steps()
    _balance()


def made(folder: str, name: str, options: dict[str, Any]) -> Any:
    """A router with random weights, and biases that move choices."""
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    router = getattr(module, name)(SimpleNamespace(**OPTIONS | options))
    with torch.no_grad():
        for of, tensor in (*router.named_parameters(), *router.named_buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.05 if "bias" in of else 0.3)
    return router


def dense(weights: Tensor, indices: Tensor, n: int = E) -> Tensor:
    return torch.zeros(TOKENS, n).scatter(-1, indices, weights)


def row(what: str, logits: Tensor, expected: Tensor, words: dict[str, Any]) -> None:
    """The function, and the module with the same words."""
    found = dense(*route(logits, **{"k": K} | words), n=expected.shape[-1])
    compare("transformers", transformers, what, found, expected, 2e-6)
    bias, indices = words.get("bias"), words.get("indices")
    own = {name: value for name, value in words.items() if name not in ("k", "indices")}
    own["renormalize"] = "kept" if own.get("renormalize", True) else None
    module = TokenChoice(K, **own | {"bias": False if bias is None else E})
    if bias is not None:
        module.bias.copy_(bias)
    assert (module(logits, indices=indices) - expected).abs().max() < 2e-6, what


def _of_several_steps() -> None:
    """Routers that take a choice from elsewhere, or a factor for each expert."""
    hidden = torch.randn(TOKENS, D)
    router = made("deepseek_v4", "DeepseekV4HashRouter", {})
    router.tid2eid.copy_(torch.randn(WORDS, E).topk(K).indices)
    ids = torch.randint(WORDS, (TOKENS,))
    logits, *theirs = router(hidden, ids)
    table = {"scores": "sqrtsoftplus", "indices": router.tid2eid[ids], "eps": 1e-20, "scale": C}
    row("DeepseekV4HashRouter", logits, dense(*theirs), table)

    router = made("kolibri1", "Kolibri1TopKRouter", {})
    logits, *theirs = router(hidden)
    experts = route(logits, K, scores=lambda x: x, bias=router.e_score_correction_bias).indices
    row("Kolibri1TopKRouter", logits, dense(*theirs), {"scores": "sigmoid", "indices": experts})

    router = made("inkling", "InklingTopkRouter", {})
    _, weights, experts, of_shared = router(hidden)
    shared = torch.arange(E, E + SHARED).expand(TOKENS, SHARED)
    expected = dense(torch.cat([weights, of_shared], -1), torch.cat([experts, shared], -1), E + SHARED)
    logits = hidden @ router.weight.T
    own = route(logits[:, :E], K, scores="sigmoid", bias=router.e_score_correction_bias).indices
    scale = C * router.global_scale.item()
    row(
        "InklingTopkRouter",
        logits,
        expected,
        {"k": None, "scores": "sigmoid", "scale": scale} | {"indices": torch.cat([own, shared], -1)},
    )

    router = made("gemma4", "Gemma4TextRouter", {})
    probabilities, *theirs = router(hidden)
    weights, experts = route(probabilities.log(), K)
    found = dense(weights * router.per_expert_scale[experts], experts)
    compare("transformers", transformers, "Gemma4TextRouter", found, dense(*theirs), 2e-6)


def _balance() -> None:
    module = importlib.import_module("transformers.models.mixtral.modeling_mixtral")
    logits, router = torch.randn(TOKENS, E), TokenChoice(K)
    router(logits)
    expected = module.load_balancing_loss_func((logits,), E, K)
    compare("transformers", transformers, "load_balancing_loss_func", K * router.balance_loss(), expected, 1e-6)


if __name__ == "__main__":
    main()
