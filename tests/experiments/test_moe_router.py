"""The experiment runs with the smallest settings; its routers balance their loads."""

import pytest
import torch
from torch.testing import assert_close

import moe_router as experiment


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    table = experiment.main(["--smoke", "--out", str(tmp_path)])
    assert set(table.scores) == {experiment.ONE_EXPERT, experiment.WIDE, *experiment.ROUTERS}
    assert (tmp_path / "moe_router.png").stat().st_size > 3_000
    assert "sparse top-k routing beats hard top-k" in capsys.readouterr().out


def test_wrong_capacity(capsys):
    with pytest.raises(SystemExit):
        experiment.main(["--capacity", "9"])
    assert "--capacity must be in" in capsys.readouterr().err


@pytest.mark.parametrize("row", experiment.ROUTERS)
def test_every_expert_takes_k_tokens_and_the_router_learns(row):
    scores = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    mask = experiment.ROUTERS[row](5).mask(scores)
    assert_close(mask.sum(0), torch.full((4,), 5.0))
    (mask * scores.softmax(-1)).square().sum().backward()
    assert scores.grad.abs().sum() > 0


def test_networks_side_by_side_are_networks_alone():
    torch.manual_seed(0)
    networks, tokens = experiment.Networks(3, 5), torch.randn(7, experiment.INPUTS)
    first, second = networks.first[1], networks.second[1]
    hidden = (tokens @ first[:-1] + first[-1]).tanh()
    assert_close(networks(tokens)[:, 1], hidden @ second[:-1] + second[-1])
