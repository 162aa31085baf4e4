"""How many functions of khot a call passes through, and in how many files: what it costs before anything is computed.

The counts are exact. A larger one is a fixed cost for every user, so it needs a reason; a smaller one is welcome.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # so that members of designs ask whether it is at work, whatever ran before

import khot
from khot import ConditionalPoisson, GumbelTopK
from khot.kernels.operators.platforms import HAS_NUMBA
from khot.nn import TopK
from tests.loops import for_each

ROOT = str(Path(khot.__file__).parent)
X = torch.randn(8, 20)
LEAF = X.clone().requires_grad_()
MODULE = TopK(5)
VALUE = khot.topk_mask(X, 5)
DESIGN = GumbelTopK(logits=X, k=5)


CALLS = {
    "mask": (lambda: khot.sigmoid_topk(X, 5), 13, 9),
    "mask with a graph": (lambda: khot.sigmoid_topk(LEAF, 5), 15, 9),
    "mask and gradient": (lambda: torch.autograd.grad(khot.sigmoid_topk(LEAF, 5), LEAF, X), 28, 9),
    "exponent": (lambda: khot.sparse_topk(X, 5), 15, 10),
    "hard mask": (lambda: khot.topk_mask(X, 5), 24, 12),
    "module": (lambda: MODULE(X), 17, 11),
    "constructor of a design": (lambda: ConditionalPoisson(logits=X, k=5), 14, 7),
    "density of a design": (lambda: ConditionalPoisson(logits=X, k=5).log_prob(VALUE), 55, 17),
    "draw of a design": (lambda: DESIGN.sample(), 24, 11),
}


@pytest.mark.needs_torch("2.8")  # earlier, one more function finds out whether Dynamo watches
@pytest.mark.skipif(not HAS_NUMBA, reason="plain torch passes through more functions")
@for_each("name", CALLS)
def test_a_call_passes_through(name):
    call, functions, files = CALLS[name]
    passed = passed_by(call)
    assert (len(passed), len({file for file, _ in passed})) == (functions, files), passed


@pytest.mark.skipif(not HAS_NUMBA, reason="plain torch passes through other files")
def test_the_path_of_a_call_is_as_contributors_read_it():
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. `([\w/]+\.py)`:", text.partition("## The path of a call")[2], flags=re.MULTILINE)
    assert listed == list(dict.fromkeys(file for file, _ in passed_by(lambda: khot.sigmoid_topk(X, 2))))


def passed_by(call):
    """The files and names of the functions of khot that a call passes through, when it is not the first one."""
    call()
    passed = []

    def note(frame, event, _):
        is_own = frame.f_code.co_filename.startswith(ROOT)
        if event == "call" and is_own and frame.f_code.co_name != "<listcomp>":  # which is no call since Python 3.12
            passed.append((frame.f_code.co_filename.removeprefix(ROOT)[1:], frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return passed
