"""All cases in groups of processes on this machine, which talk by gloo over the loopback address."""

import pytest
import torch.distributed as dist

from tests.distributed.group import run_group

CASES = {2: ("stacks", "graphs", "modules"), 4: ("maps", "parts")}  # four ranks of which some have no item

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs_torch("2.8"),  # earlier, DTensors lack rules, and lose the graphs of their derivatives
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
]


@pytest.mark.parametrize("ranks", CASES)
def test_the_ranks_agree_with_one_process(ranks):
    failed = run_group(ranks, [f"tests.distributed.cases_{name}" for name in CASES[ranks]], limit=900)
    assert not failed, "\n".join(failed)
