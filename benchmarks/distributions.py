"""Every design: time and memory of its draws, probabilities and inclusion probabilities, and how they grow with n.

Run `python benchmarks/distributions.py [recursion] [samplers] [ranking] [growth]` (default: all four parts).

recursion   ConditionalPoisson.log_prob with its gradient against the plain O(nk) recursion, compared for correctness
            before they are timed. Targets: at least 5 times faster at (128, 1000, 500), not slower at (1280, 10, 5).
samplers    one draw against torch.topk on the same tensor, and against torch.rand + torch.topk. Targets at
            (128, 1000, 500): 3 times torch.topk for designs that are noise and a top-k, 20 times for Pivotal; at k = 10
            order sampling within 1.5 times torch.rand + torch.topk.
ranking     PlackettLuce.log_prob against torch.log_softmax and gather, which is what its terms would take if nothing
            were removed, and with gradients. Target at (128, 1000, 50): 3 times that.
growth      all operations over n = 10 ... 10^6, k = 10 and n / 2, batch 1 and 128, as a table and a plot. Target:
            ConditionalPoisson at n = 10^6 within 15 s and 4 GB for each. A series ends where a call takes seconds.
"""

import time
from collections.abc import Callable

import torch
from timing import RESULTS, interleaved, peak_bytes, run_parts
from torch import Tensor

import khot
from khot import ConditionalPoisson

Row = dict[str, object]

OF_PROBS: dict[str, Callable[[Tensor], khot.SamplingDesign]] = {
    "Sampford": lambda p: khot.Sampford(probs=p, validate_args=False),
    "Pivotal": lambda p: khot.Pivotal(probs=p, validate_args=False),
    "Brewer": lambda p: khot.Brewer(probs=p, validate_args=False),
    "Systematic": lambda p: khot.Systematic(probs=p, validate_args=False),
    "ParetoSampling": lambda p: khot.ParetoSampling(probs=p, validate_args=False),
    "PhantomUnit(Pivotal)": lambda p: khot.PhantomUnit(khot.Pivotal, probs=0.99 * p, validate_args=False),
}
OF_LOGITS: dict[str, Callable[[Tensor, int], khot.SamplingDesign]] = {
    "ConditionalPoisson": lambda t, k: ConditionalPoisson(logits=t, k=k, validate_args=False),
    "GumbelTopK": lambda t, k: khot.GumbelTopK(logits=t, k=k, validate_args=False),
}
ORDER_SAMPLING = ("ParetoSampling", "GumbelTopK")
SERIES_ENDS = {"seconds": 0.3, "elements": 2 * 10**6}


def designs(batch: int, n: int, k: int) -> dict[str, tuple[Tensor, Callable[[Tensor], khot.SamplingDesign]]]:
    """Name to the parameter and the design made of it; a new design for each call, so that no result is kept."""
    logits = torch.randn(batch, n, dtype=torch.float64)
    probs = khot.sigmoid_topk(logits, k)
    found = {name: (probs, make) for name, make in OF_PROBS.items()}
    return found | {name: (logits, lambda t, make=make: make(t, k)) for name, make in OF_LOGITS.items()}


def recursion_log_prob(logits: Tensor, k: int, value: Tensor) -> Tensor:
    """By log e_k, adding one item at a time: log e_j <- logaddexp(log e_j, log e_{j-1} + logits_i)."""
    log_e = logits.new_full((*logits.shape[:-1], k + 1), -1e30)
    log_e = torch.cat([torch.zeros_like(log_e[..., :1]), log_e[..., 1:]], -1)
    for i in range(logits.shape[-1]):
        taken = log_e[..., :-1] + logits[..., i, None]
        log_e = torch.cat([log_e[..., :1], torch.logaddexp(log_e[..., 1:], taken)], -1)
    return (value * logits).sum(-1) - log_e[..., k]


def tree_log_prob(logits: Tensor, k: int, value: Tensor) -> Tensor:
    return ConditionalPoisson(logits=logits, k=k, validate_args=False).log_prob(value)


def with_gradient(function: Callable[..., Tensor], param: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    param = param.detach().requires_grad_()
    log_prob = function(param, *args)
    return log_prob.detach(), torch.autograd.grad(log_prob.sum(), param)[0]


def recursion(seconds: float) -> list[Row]:
    rows: list[Row] = []
    print(f"{'batch':>6} {'n':>8} {'k':>7}  log_prob forward+backward of ConditionalPoisson")
    for batch, n, k in [(1280, 10, 5), (128, 64, 8), (128, 1000, 500)]:
        logits = torch.randn(batch, n, dtype=torch.float64)
        value = ConditionalPoisson(logits=logits, k=k).sample()
        calls = {
            "ConditionalPoisson": lambda a=(logits, k, value): with_gradient(tree_log_prob, *a),
            "recursion": lambda a=(logits, k, value): with_gradient(recursion_log_prob, *a),
        }
        torch.testing.assert_close(*(call() for call in calls.values()), rtol=1e-9, atol=1e-9)
        timings = interleaved(calls, seconds, rounds=7)
        ratio = timings["recursion"].median / timings["ConditionalPoisson"].median
        print(f"{batch:>6} {n:>8} {k:>7}  {timings['ConditionalPoisson'].median * 1e3:.2f} ms, recursion {ratio:.2f}x")
        rows += [
            {"batch": batch, "n": n, "k": k, "function": name, "median_ms": f"{timing.median * 1e3:.3f}"}
            for name, timing in timings.items()
        ]
    return rows


def samplers(seconds: float) -> list[Row]:
    rows: list[Row] = []
    for batch, n, k in [(128, 1000, 500), (128, 1000, 10), (1280, 10, 5), (1, 10**5, 10**4)]:
        x = torch.randn(batch, n)
        calls: dict[str, Callable[[], object]] = {
            "torch.topk": lambda x=x, k=k: x.topk(k),
            "torch.rand + torch.topk": lambda x=x, k=k: torch.rand(x.shape).topk(k),
        }
        for name, (param, make) in designs(batch, n, k).items():
            design = make(param.float())  # parameters in place, as when many draws are taken from one design
            calls[name] = design.sample
            if name in ORDER_SAMPLING:
                calls[f"{name} indices"] = design.sample_indices
        timings = interleaved(calls, seconds, rounds=9)
        print(f"\n{f'(batch, n, k) = ({batch}, {n}, {k})':<34}one draw      /topk   /rand + topk")
        for name, timing in timings.items():
            to_topk = timing.median / timings["torch.topk"].median
            to_noise = timing.median / timings["torch.rand + torch.topk"].median
            print(f"{name:<30}{timing.median * 1e3:>9.3f} ms {to_topk:>9.2f}x {to_noise:>12.2f}x")
            rows.append({
                "batch": batch, "n": n, "k": k, "function": name, "median_ms": f"{timing.median * 1e3:.4f}",
                "to_topk": f"{to_topk:.2f}", "to_rand_topk": f"{to_noise:.2f}",
            })  # fmt: skip
    return rows


def softmax_log_prob(logits: Tensor, k: int, value: Tensor) -> Tensor:
    """As if each unit could be chosen again."""
    return logits.log_softmax(-1).gather(-1, value).sum(-1)


def ranking_log_prob(logits: Tensor, k: int, value: Tensor) -> Tensor:
    return khot.PlackettLuce(logits, k).log_prob(value)


def ranking(seconds: float) -> list[Row]:
    rows: list[Row] = []
    for batch, n, k in [(128, 1000, 50), (1024, 1000, 50), (128, 1000, 1000), (1, 10**6, 50)]:
        logits = torch.randn(batch, n)
        value = khot.PlackettLuce(torch.zeros(batch, n), k).sample()
        law, given = khot.PlackettLuce(logits, k), (logits, k, value)
        calls: dict[str, Callable[[], object]] = {
            "softmax": lambda a=given: softmax_log_prob(*a),
            "PlackettLuce": lambda law=law, value=value: law.log_prob(value),
            "softmax+backward": lambda a=given: with_gradient(softmax_log_prob, *a),
            "PlackettLuce+backward": lambda a=given: with_gradient(ranking_log_prob, *a),
        }
        timings = interleaved(calls, seconds, rounds=9, clock=time.process_time)
        for part in ("", "+backward"):
            own, base = timings[f"PlackettLuce{part}"].median, timings[f"softmax{part}"].median
            name = f"log_prob{part}"
            print(f"{batch:>6} {n:>8} {k:>7}  {name:<18} {own * 1e3:.3f} ms, {own / base:.2f} times the softmax")
            rows.append({
                "batch": batch, "n": n, "k": k, "function": name, "median_ms": f"{own * 1e3:.4f}",
                "to_softmax": f"{own / base:.2f}",
            })  # fmt: skip
    return rows


def operations(param: Tensor, make: Callable[[Tensor], khot.SamplingDesign]) -> dict[str, Callable[[], object]]:
    """Those that the design has."""
    value = make(param).sample()
    found: dict[str, Callable[[], object]] = {
        "sample": lambda: make(param).sample(),
        "mean": lambda: make(param).mean,
    }
    try:
        make(param[:1, :]).log_prob(value[:1])
    except NotImplementedError:
        return found
    found["log_prob"] = lambda: make(param).log_prob(value)
    found["log_prob+backward"] = lambda: with_gradient(lambda t: make(t).log_prob(value), param)
    return found


def growth(seconds: float) -> list[Row]:
    rows: list[Row] = []
    for batch in (1, 128):
        for share in (False, True):
            over: set[tuple[str, str]] = set()  # series that have come to their end
            for n in (10 if share else 20, 100, 1000, 10**4, 10**5, 10**6):
                k = n // 2 if share else 10
                if batch * n > SERIES_ENDS["elements"]:
                    continue
                for name, (param, make) in designs(batch, n, k).items():
                    if (name, "sample") not in over:
                        rows += measure(name, param, make, k, over, seconds)
    print_exponents(rows)
    plot(rows)
    return rows


def measure(
    name: str,
    param: Tensor,
    make: Callable[[Tensor], khot.SamplingDesign],
    k: int,
    over: set[tuple[str, str]],
    seconds: float,
) -> list[Row]:
    rows: list[Row] = []
    batch, n = param.shape
    for operation, call in operations(param, make).items():
        if (name, operation) in over:
            continue
        timing = interleaved({operation: call}, seconds / 10, rounds=3)[operation].median
        megabytes = peak_bytes(call) / 2**20
        if timing > SERIES_ENDS["seconds"]:
            over.add((name, operation))
        print(f"{batch:>4} {n:>8} {k:>7}  {name:<22}{operation:<18}{timing * 1e3:>12.3f} ms {megabytes:>10.1f} MB")
        rows.append({
            "batch": batch, "n": n, "k": k, "function": name, "operation": operation,
            "median_ms": f"{timing * 1e3:.4f}", "peak_mb": f"{megabytes:.1f}",
        })  # fmt: skip
    return rows


def series(rows: list[Row], batch: int, share: bool) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(design, operation) to n and milliseconds, for k = n / 2 or k = 10."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        n, k = int(str(row["n"])), int(str(row["k"]))
        if row["batch"] == batch and (2 * k == n if share else k == 10):
            found.setdefault((str(row["function"]), str(row["operation"])), []).append(
                (n, float(str(row["median_ms"])))
            )
    return found


def print_exponents(rows: list[Row]) -> None:
    for share in (True, False):
        for (name, operation), points in series(rows, 1, share).items():
            if len(points) > 1 and points[-1][0] >= 10**4:
                (n0, t0), (n1, t1) = points[-2:]
                exponent = torch.tensor(t1 / t0).log() / torch.tensor(n1 / n0).log()
                print(
                    f"{name:<22}{operation:<18} k = {'n / 2' if share else '10':<6} time ~ n^{exponent:.2f} up to {n1}"
                )


def plot(rows: list[Row]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ("sample", "mean", "log_prob", "log_prob+backward")
    figure, axes = plt.subplots(2, 4, figsize=(18, 8), layout="constrained", sharex=True, sharey=True)
    for line, share in zip(axes, (True, False), strict=True):
        for axis, operation in zip(line, names, strict=True):
            for (name, what), points in series(rows, 1, share).items():
                if what == operation:
                    axis.loglog(*zip(*points, strict=True), marker=".", label=name)
            axis.set_title(f"{operation}, k = {'n / 2' if share else '10'}")
            axis.set_xlabel("n")
        line[0].set_ylabel("ms, one row")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(RESULTS / "distributions_growth.png", dpi=80)


def main() -> None:
    parts = {"recursion": recursion, "samplers": samplers, "ranking": ranking, "growth": growth}
    run_parts(__doc__, "distributions", parts)


if __name__ == "__main__":
    main()
