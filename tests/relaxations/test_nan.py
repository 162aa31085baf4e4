"""A NaN among the scores is an error, wherever it stands: loops that sum in any order must not optimise it away."""

import pytest
import torch

from tests.every_map import MAPS
from tests.inputs import normal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", MAPS, ids=lambda case: case.name)
@pytest.mark.usefixtures("cpu_backend")
def test_is_refused(case, dtype):
    for n, place in ((5, 0), (9, 8), (40, 17)):
        x = normal(3, n, dtype=dtype)
        x[1, place] = torch.nan
        with pytest.raises(ValueError, match="NaN|must be finite"):
            case.call(x, 0.7)
