"""The site's tables of what composes with what, made by trying every cell of the registry.

`python -m tests.composition_table` writes them into their page; a test holds the page to them.
"""

import re
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from khot import Pivotal, SamplingDesign
from tests.maps import RELAXATIONS
from tests.registry import DESIGNS, FUNCTIONS, PHANTOM, DesignCase, FunctionCase

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "composition.md"
SECTION = re.compile(r"(?<=<!-- made by tests/composition_table.py -->\n).*?(?=<!-- end -->)", flags=re.DOTALL)
REASONS = {
    "has no log_prob": "no `log_prob`",
    "has none: pass it": "with `relaxation=`",
    "needs the slope": "with `relaxation=`",
    "needs a ConditionalPoisson": "–",
}
RELAXATION_NAMES = {"capped_simplex_map": "capped_simplex_map(link=)", "sparse_topk_any_p": "sparse_topk(p=)"}


def loss(x: Tensor) -> Tensor:
    return (x[..., 0] - 0.3).square() + x[..., 1] * x[..., 2]


def cell(case: FunctionCase, design: SamplingDesign, logits: Tensor) -> str:
    """Whether the estimator has a gradient on this design, or why not."""
    try:
        (gradient,) = torch.autograd.grad(case.estimate(design, loss, 3), logits)
    except NotImplementedError as error:
        return next(reason for said, reason in REASONS.items() if said in str(error))
    assert gradient.isfinite().all()
    return "✓"


def design_name(case: DesignCase) -> str:
    settings = case.make.keywords if isinstance(case.make, partial) else {}
    name = {"phantom_unit": "PhantomUnit"}.get(case.name) or getattr(case.make, "func", case.make).__name__
    return f"`{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})`" if settings else f"`{name}`"


def markdown(corner: str, columns: list[FunctionCase], rows: dict[str, list[str]]) -> str:
    head = [corner, *(f"`{case.name}`" for case in columns)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *([name, *cells] for name, cells in rows.items()))]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def tables() -> str:
    logits = torch.tensor([0.4, -1.2, 0.9, 0.1, -0.3], dtype=torch.float64, requires_grad=True)
    functions = [case for case in FUNCTIONS if case.name == getattr(case.estimate, "__name__", None)]
    slopes = [case for case in functions if case.name in ("straight_through", "reinmax")]
    of_designs = {
        design_name(case): [cell(f, case.make(logits=logits, k=2), logits) for f in functions]
        for case in [*DESIGNS, PHANTOM]
    }
    of_relaxations = {
        f"`{RELAXATION_NAMES.get(case.name, case.name)}`": [
            cell(f, Pivotal(logits=logits, k=2, relaxation=case.map), logits) for f in slopes
        ]
        for case in RELAXATIONS
    }
    return f"\n{markdown('design', functions, of_designs)}\n{markdown('relaxation', slopes, of_relaxations)}\n"


if __name__ == "__main__":
    PAGE.write_text(SECTION.sub(lambda _: tables(), PAGE.read_text()))
