"""Activations, step function and auxiliary loss beside those of SAELens and dictionary_learning, gradients included.

``python -m tests.peers.autoencoders`` prints the largest differences; it needs sae-lens and dictionary-learning. The
last rows train an autoencoder of SAELens with activations of khot, and load the checkpoints with SAELens.
"""

import importlib.metadata
import tempfile
from types import SimpleNamespace

import sae_lens
import torch
from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
from sae_lens.saes import batchtopk_sae, jumprelu_sae, topk_sae
from sae_lens.saes.sae import TrainStepInput
from torch import Tensor
from torch.nn import Module, ReLU, Sequential

from khot.nn import BatchTopK, JumpReLU, TopK
from tests.peers.table import compare

ROWS, UNITS, INPUTS, K = 50, 64, 16, 4
DICTIONARIES = SimpleNamespace(__version__=importlib.metadata.version("dictionary-learning"))


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, UNITS).requires_grad_()
    for k, module, theirs in (
        (K, TopK, topk_sae.TopK),
        (K, BatchTopK, batchtopk_sae.BatchTopK),
        (2.5, BatchTopK, batchtopk_sae.BatchTopK),
    ):
        mine = Sequential(ReLU(), module(k))
        _compare_with_gradients(f"{module.__name__}({k})", mine(x), theirs(k)(x), [("x", x, x)])
    kept = [(module(2.556)(x) != 0).sum().item() for module in (BatchTopK, batchtopk_sae.BatchTopK)]
    assert kept == [128, 127], kept  # k B = 127.8 is rounded here and truncated there
    for through_input in (False, True):
        _compare_thresholds(x.detach(), through_input)
    _compare_auxiliary_losses()
    _compare_dictionaries()
    _compare_checkpoints()


def _compare_with_gradients(name: str, mine: Tensor, theirs: Tensor, leaves: list[tuple[str, Tensor, Tensor]]) -> None:
    """Two results, and the gradients of their sums with random weights in my leaf and in theirs."""
    weights = torch.randn_like(theirs)
    compare("SAELens", sae_lens, name, mine, theirs, 1e-6)
    for which, mine_of, theirs_of in leaves:
        pairs = ((mine, mine_of), (theirs, theirs_of))
        grads = [torch.autograd.grad((y * weights).sum(), leaf, retain_graph=True)[0] for y, leaf in pairs]
        compare("SAELens", sae_lens, f"{name}, gradient in {which}", *grads, 1e-5)


def _compare_thresholds(x: Tensor, through_input: bool) -> None:
    module = JumpReLU(torch.rand(UNITS), learn_threshold=True, bandwidth=0.3, through_input=through_input)
    x, theta = x.clone().requires_grad_(), module.threshold.detach().clone().requires_grad_()
    arguments, name = (x, theta, 0.3, through_input), ", ste_to_input" if through_input else ""
    leaves = [("x", x, x), ("threshold", module.threshold, theta)]
    _compare_with_gradients(f"JumpReLU{name}", module(x), jumprelu_sae.JumpReLU.apply(*arguments), leaves)
    steps = jumprelu_sae.Step.apply(*arguments).sum(-1)
    _compare_with_gradients(f"sum of Step{name}", module.count(x), steps, leaves[0 if through_input else 1 :])


def _autoencoder(module: str, k: float) -> Module:
    torch.manual_seed(1)
    name = "BatchTopK" if module == "batchtopk_sae" else "TopK"
    config = {"d_in": INPUTS, "d_sae": UNITS, "k": k, "dtype": "float32", "device": "cpu"}
    source = batchtopk_sae if module == "batchtopk_sae" else topk_sae
    return getattr(source, f"{name}TrainingSAE")(getattr(source, f"{name}TrainingSAEConfig")(**config))


def _step(sae: Module, x: Tensor, dead: Tensor | None = None) -> Tensor:
    return sae.training_forward_pass(TrainStepInput(x, {}, dead, 0, False))


def _compare_auxiliary_losses() -> None:
    """With 5 and 20 dead units, fewer and more than the half of the inputs that are to explain what is left over."""
    sae, x = _autoencoder("topk_sae", K), torch.randn(ROWS, INPUTS)
    for count in (5, 20):
        dead = torch.arange(UNITS) < count
        units = TopK(K, n=UNITS, dead_after=1)
        units.idle.copy_(dead)
        output = _step(sae, x, dead)
        residual = (x - output.sae_out).detach()
        scores = (x - sae.b_dec) @ sae.W_enc + sae.b_enc if sae.cfg.apply_b_dec_to_input else x @ sae.W_enc + sae.b_enc
        scores = scores * sae.W_dec.norm(dim=-1) if sae.cfg.rescale_acts_by_decoder_norm else scores
        decoder = sae.W_dec / (sae.W_dec.norm(dim=-1, keepdim=True) if sae.cfg.rescale_acts_by_decoder_norm else 1)
        mine = units.auxiliary_loss(
            scores, lambda z, d=decoder, r=residual: (z @ d - r).square().sum(-1).mean(), INPUTS // 2, scaled=True
        )
        theirs = output.losses["auxiliary_reconstruction_loss"] / sae.cfg.aux_loss_coefficient
        _compare_with_gradients(f"auxiliary loss, {count} dead units", mine, theirs, [("W_enc", sae.W_enc, sae.W_enc)])


def _compare_dictionaries() -> None:
    """Training and, once a threshold is there, evaluation of dictionary_learning's BatchTopK."""
    torch.manual_seed(2)
    sae, module, x = BatchTopKSAE(INPUTS, UNITS, K), BatchTopK(K), torch.randn(ROWS, INPUTS)
    activations = torch.relu(sae.encoder(x - sae.b_dec))
    compare(
        "dictionary_learning", DICTIONARIES, "BatchTopK", module(activations), sae.encode(x, use_threshold=False), 0
    )
    sae.threshold = module.threshold
    compare("dictionary_learning", DICTIONARIES, "with threshold", module.eval()(activations), sae.encode(x), 0)


def _compare_checkpoints() -> None:
    """Trained beside a copy with SAELens' own activation, and once more with a gradient that this one does not have."""
    for module, activation in (
        ("topk_sae", lambda: TopK(K)),
        ("batchtopk_sae", lambda: BatchTopK(K, track_running_stats=False)),
        ("topk_sae", lambda: TopK(K, softness=0.1, straight_through=True)),
    ):
        mine, theirs = _autoencoder(module, K), _autoencoder(module, K)
        mine.activation_fn = Sequential(ReLU(), activation())
        for sae in (mine, theirs):
            torch.manual_seed(3)
            optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
            for _ in range(30):
                optimizer.zero_grad()
                _step(sae, torch.randn(ROWS, INPUTS)).loss.backward()
                optimizer.step()
        x, loaded = torch.randn(ROWS, INPUTS), []
        for sae in (mine, theirs):
            with tempfile.TemporaryDirectory() as folder:
                sae.save_inference_model(folder)
                loaded.append(sae_lens.SAE.load_from_disk(folder))
        name = f"checkpoint of {type(mine).__name__} with {mine.activation_fn[1]}"
        if module == "topk_sae":
            compare("SAELens", sae_lens, f"{name}, loaded", loaded[0](x), mine(x), 1e-6)
        if "straight" not in name:
            compare("SAELens", sae_lens, f"{name}, beside a copy of SAELens", loaded[0](x), loaded[1](x), 1e-5)


if __name__ == "__main__":
    main()
