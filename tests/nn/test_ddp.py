"""Modules in DistributedDataParallel: two ranks that see half of the rows each learn what one process learns of all."""

import datetime
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from tests.inputs import normal
from tests.modules import MODULES, N

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
]
RANKS, LIMIT = 2, 120  # seconds for all
X = normal(4, 6, N, dtype=torch.float32)  # a step takes two of the four blocks, one on each rank
STATEFUL = [case for case in MODULES if case.target is None and case.make().state_dict()]
ROW_BY_ROW = ("topk_learned", "jump_relu_learned")  # rows do not know of each other: a rank needs no more than its own


def train(case, rank=None):
    """The parameters and buffers after two steps; of both ranks' rows where no rank is given."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(N, N), case.make())
    parallel = model if rank is None else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 if rank is None else rank)  # draws of its own
    for step in range(2):
        blocks = X[2 * step : 2 * step + 2]
        y = parallel(blocks.flatten(0, 1) if rank is None else blocks[rank])
        optimizer.zero_grad()
        (y * y.detach().cos()).mean().backward()
        optimizer.step()
    return model.state_dict()


def work(rank, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=LIMIT / 2),
    )
    torch.save({case.name: train(case, rank) for case in STATEFUL}, os.path.join(folder, str(rank)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank has learned, by the name of the case."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = mp.start_processes(work, (port, folder), RANKS, join=False, start_method="spawn")
    try:
        end = time.monotonic() + LIMIT
        while not processes.join(max(end - time.monotonic(), 0)):  # which returns whenever one of them is done
            assert time.monotonic() < end, f"the ranks have not finished in {LIMIT} s"
    finally:
        for process in processes.processes:
            process.kill()
    return [torch.load(os.path.join(folder, str(rank))) for rank in range(RANKS)]


@pytest.mark.parametrize("case", STATEFUL, ids=lambda case: case.name)
def test_ranks_stay_equal(case, ranks):
    first, second = (rank[case.name] for rank in ranks)
    parameters = dict(case.make().named_parameters())
    for name, value in first.items():
        assert value.isfinite().all()
        if name.startswith("0.") or name.removeprefix("1.") in parameters:
            assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("case", [case for case in STATEFUL if case.name in ROW_BY_ROW], ids=lambda case: case.name)
def test_as_one_process(case, ranks):
    torch.testing.assert_close(ranks[0][case.name], train(case))
