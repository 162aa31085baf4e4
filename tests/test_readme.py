"""The README's snippets run, and arrive where they say."""

import re
from pathlib import Path

import pyro
import pytest
import torch

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
RESULTS = (
    torch.tensor([0.0, 0, 1, 0, 0, 1, 0, 1]),
    torch.tensor(10.0),
    torch.tensor([0.0, 0, 0, 0, 0, 1, 1, 1]),
)


@pytest.mark.parametrize(("snippet", "result"), list(zip(SNIPPETS, RESULTS, strict=True)))
def test_snippet(snippet, result, capsys):
    pyro.clear_param_store()
    torch.manual_seed(0)
    exec(snippet, {})
    printed = re.match(r"tensor\((.*?)(, grad_fn.*)?\)$", capsys.readouterr().out.strip()).group(1)
    torch.testing.assert_close(torch.tensor(eval(printed)), result, rtol=0, atol=0.5)
    pyro.clear_param_store()
