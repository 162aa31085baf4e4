"""That a wheel works with what it asks for and nothing else: `make wheel` runs this in an empty environment."""

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import torch

import khot


def main() -> None:
    assert Path(khot.__file__).is_relative_to(sys.prefix), f"{khot.__file__} is not the installed one"
    assert khot.__version__ == metadata.version("khot")
    assert (Path(khot.__file__).parent / "py.typed").is_file()
    assert not [name for name in ("sklearn", "pytest") if importlib.util.find_spec(name)], "this is no empty place"

    scores = torch.linspace(-1, 1, 10, requires_grad=True)
    assert abs(khot.sigmoid_topk(scores, 3).sum().item() - 3) < 1e-6
    x = khot.StraightThrough(khot.ConditionalPoisson(logits=scores, k=3)).rsample((100,))
    assert (x.sum(-1) == 3).all()
    (gradient,) = torch.autograd.grad((x @ torch.arange(10.0)).mean(), scores)
    assert gradient.isfinite().all() and gradient.any()
    for name in khot.__all__:
        assert getattr(khot, name) is not None
    print(f"khot {khot.__version__} works with torch {torch.__version__} on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
