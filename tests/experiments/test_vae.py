"""It runs from end to end; every row's site gives hard codes, gradients and a bound above the likelihood."""

import json

import pyro
import pytest
import torch

import vae
from khot import ConditionalPoisson
from tests.experiments.saved import read_table

SETTINGS = vae.Settings((16,), 32, 1e-3, 1, 1.0, 1)


@pytest.mark.slow
def test_runs(tmp_path, capsys):
    tables = vae.main(["--smoke", "--out", str(tmp_path)])
    assert list(tables) == ["vae_ten_exact"]
    assert (tmp_path / "vae_ten_exact.png").stat().st_size > 3_000
    document = json.loads((tmp_path / "vae_ten_exact.json").read_text())
    assert list(document["rows"]) == list(vae.METHODS) and len(document["findings"]) == 14
    for row in vae.METHODS:
        assert (tables["vae_ten_exact"].values(row, vae.BOUND) > 0).all()
    assert read_table(tmp_path / "vae_ten_exact.json") in capsys.readouterr().out


@pytest.mark.parametrize("prior", [vae.EXACT, *vae.PRIOR_TERMS])
@pytest.mark.parametrize("row", vae.METHODS)
def test_codes_are_hard_and_both_networks_get_a_gradient(row, prior):
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    images = torch.bernoulli(torch.full((6, 9), 0.5))
    read = []
    method = vae.METHODS[row]
    method = method._replace(read=lambda *site, read_=method.read: read.append(read_(*site)) or read[-1])
    autoencoder = vae.VAE(9, vae.Latent(2, 5, 2), method, prior, SETTINGS)
    loss = vae.TraceMeanField_ELBO().differentiable_loss(autoencoder.model, autoencoder.guide, images)
    loss.backward()
    assert loss.isfinite() and ConditionalPoisson(logits=torch.zeros(5), k=2).support.check(read[0].detach()).all()
    assert read[0].shape == (6, 2, 5)
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in autoencoder.parameters())


@pytest.mark.parametrize("row", vae.METHODS)
def test_a_guide_equal_to_the_prior_costs_nothing(row):
    pyro.set_rng_seed(0)
    autoencoder = vae.VAE(9, vae.Latent(2, 5, 2), vae.METHODS[row], vae.EXACT, SETTINGS)
    for parameter in autoencoder.encoder.parameters():
        parameter.detach().zero_()
    for parameter in autoencoder.decoder.parameters():
        parameter.detach().zero_()
    scores = vae.evaluate(autoencoder, torch.ones(4, 9), 2)
    assert scores[vae.BOUND] == pytest.approx(9 * torch.tensor(2.0).log().item(), abs=1e-4)
    assert scores[vae.RECONSTRUCTION] == pytest.approx(scores[vae.BOUND], abs=1e-4)


@pytest.mark.parametrize("prior", vae.PRIOR_TERMS)
def test_prior_terms_vanish_at_equal_logits_and_are_those_they_say(prior):
    method, images = vae.METHODS[vae.FIRST], torch.ones(3, 9)
    autoencoder = vae.VAE(9, vae.Latent(3, 2, 1), method, prior, SETTINGS)
    for parameter in autoencoder.encoder.parameters():
        parameter.detach().zero_()
    factor = vae.poutine.trace(autoencoder.guide).get_trace(images).nodes["prior_term"]["fn"].log_factor
    assert factor.abs().max() < 1e-6
    logits = torch.tensor([3.0, 1 / 3]).log()  # pi = (3/4, 1/4), softmax = (9/10, 1/10)
    autoencoder.encoder[-1].bias.data = logits.repeat(3)
    factor = vae.poutine.trace(autoencoder.guide).get_trace(images).nodes["prior_term"]["fn"].log_factor
    p = torch.tensor([0.25, 0.75] if prior == "per-item" else [0.9, 0.1])
    times = {"softmax": 3, vae.AVERAGED: 1, "per-item": 6}[prior]  # independent entries have two outcomes each
    assert factor.tolist() == pytest.approx([times * (p * (2 * p).log()).sum().item()] * 3, abs=1e-5)


def test_grey_values_cost_their_cross_entropy():
    autoencoder = vae.VAE(2, vae.Latent(1, 2, 1), vae.METHODS[vae.FIRST], vae.EXACT, SETTINGS)
    logits, grey = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.3, 0.6]])
    p = torch.sigmoid(logits)
    expected = (grey * p.log() + (1 - grey) * (1 - p).log()).sum(-1)
    torch.testing.assert_close(autoencoder.pixels(logits).log_prob(grey), expected)


def test_draws_of_ncpss_have_k_ones_and_near_probabilities():
    pyro.set_rng_seed(0)
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]).expand(20_000, 5)
    law = vae.ncpss(logits, 2, 1.0)
    value = law.sample()
    assert value.sum(-1).eq(2).all()
    assert (value.mean(0) - law.mean[0]).abs().max() < 0.1  # they are near, but not equal
