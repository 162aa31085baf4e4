"""A k-hot site summed out by TraceEnum_ELBO: as vectors, and as the numbers of subsets by subset_categorical.

Run `python benchmarks/enumeration.py`. The model chooses k of n for each row of a plate, and observes a weighted sum of
the chosen ones with noise. As vectors, the site is the design itself; as numbers, it is a Categorical over C(n, k)
numbers, which subset_vector turns into vectors. A call computes the loss and its gradient. "Learned": the gradient of
the logits, so that each call makes a new distribution. "Fixed": the gradient of the weights; the distribution is made
once, like a prior without parameters. The results of each pair are compared before it is timed.
"""

import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import TraceEnum_ELBO
from timing import arguments, interleaved, write_csv
from torch import Tensor

from khot import ConditionalPoisson
from khot.infer import subset_categorical, subset_vector

CASES = [(1, 12, 3), (1, 16, 8), (1, 20, 8), (64, 12, 3), (256, 10, 5)]  # rows, n, k
VECTORS, NUMBERS = "vectors", "subset_categorical"
LEARNED, FIXED = "learned", "fixed"

Call = Callable[[], tuple[Tensor, Tensor]]


def make_call(site: str, prior: str, logits: Tensor, seen: Tensor, k: int) -> Call:
    """The loss of the model and its gradient."""
    n = logits.shape[-1]
    weight = torch.linspace(-1, 1, n, requires_grad=prior == FIXED)

    def make_law() -> dist.TorchDistribution:
        design = ConditionalPoisson(logits=logits if prior == LEARNED else logits.detach(), k=k)
        return design if site == VECTORS else subset_categorical(design)

    made = make_law()

    def model() -> None:
        with pyro.plate("rows", len(seen)):
            value = pyro.sample("x", make_law() if prior == LEARNED else made, infer={"enumerate": "parallel"})
            x = value if site == VECTORS else subset_vector(value, n, k)
            pyro.sample("y", dist.Normal((x * weight).sum(-1), 0.5), obs=seen)

    elbo = TraceEnum_ELBO(max_plate_nesting=1)

    def call() -> tuple[Tensor, Tensor]:
        loss = elbo.differentiable_loss(model, lambda: None)
        return loss.detach(), torch.autograd.grad(loss, logits if prior == LEARNED else weight)[0]

    return call


def main() -> None:
    options = arguments(__doc__, "enumeration.csv")
    pyro.set_rng_seed(0)
    rows: list[dict[str, object]] = []
    for count, n, k in CASES:
        logits, seen = torch.randn(count, n, requires_grad=True), torch.randn(count)
        for prior in (LEARNED, FIXED):
            calls = {site: make_call(site, prior, logits, seen, k) for site in (VECTORS, NUMBERS)}
            for one, other in zip(*(call() for call in calls.values()), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
            timings = interleaved(calls, options.seconds)
            for site, timing in timings.items():
                speed = timings[VECTORS].median / timing.median
                print(f"{count:>4} rows, {k} of {n:<4}{prior:<9}{site:<20}{timing.median * 1e3:>9.2f} ms{speed:>7.2f}")
                rows.append(
                    {
                        "rows": count, "n": n, "k": k, "vectors": math.comb(n, k), "prior": prior, "site": site,
                        "median_ms": f"{timing.median * 1e3:.4f}", "p20_ms": f"{timing.low * 1e3:.4f}",
                        "p80_ms": f"{timing.high * 1e3:.4f}", "times as fast": f"{speed:.2f}",
                    }
                )  # fmt: skip
    write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
