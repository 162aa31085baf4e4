"""How biased and how noisy are the gradient estimators? The toy problems of SIMPLE and SFESS, with exact gradients.

    python experiments/compare_estimators.py

x is drawn from a conditional Poisson design, k = 5 of n = 10 with random logits. Estimates of the gradient of E[f(x)]
are compared with the exact one, which is a sum over all 252 subsets. The losses, with random b and A:

    linear     <b, x>
    distance   |x - b|², the loss of SIMPLE's toy. On binary x it equals a linear function, but its slope between them
               does not, and straight-through looks at slopes: it is biased
    quadratic  <x, Ax>, where units interact
    evidence   -log p(y | x) of variable_selection.py, in both of its forms: "squared" and "linear" agree on every
               k-hot x, so that an estimator that looks at nothing else cannot tell which one it is given

Straight-through on this design is SIMPLE; the score function with leave-one-out baseline is what SFESS is meant to be.
Each estimate takes 4 draws. Each seed is a different problem. The table of each loss has

    bias       length of the difference between the mean estimate and the exact gradient. It is never quite 0: without
               bias it is about as large as its standard error, the next column
    variance   of an estimate, summed over the entries
    cosine     of the angle between estimate and exact gradient, on average

and the figures show how these change with the number of draws, and the time that an estimate takes.

Ahmed, Zeng, Niepert, Van den Broeck (2023), "SIMPLE: a gradient estimator for k-subset sampling". Wijk, Vinuesa,
Azizpour (2025), "SFESS: score function estimators for k-subset sampling".
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common import Table, each_seed, experiment_parser, parse, save_figure
from khot import (
    ConditionalPoisson,
    compare_estimators,
    reinmax,
    score_function,
    straight_through,
    unordered_set,
)
from khot.diagnostics import Comparison
from variable_selection import FORMS, make_problem, row_name

N, K = 10, 5
DRAWS, OTHER_DRAWS = 4, (1, 4, 16)  # of the tables, and of the figures
FIRST, SECOND, SCORE, BASELINE = "straight-through (SIMPLE)", "ReinMax", "score function", "…, leave-one-out (SFESS)"
ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    FIRST: straight_through,
    SECOND: reinmax,
    SCORE: score_function,
    BASELINE: partial(score_function, baseline="leave_one_out"),
    "unordered set": unordered_set,
}
BIAS, BIAS_ERROR, VARIANCE, COSINE = "bias", "its s.e.", "variance", "cosine"
LINEAR, DISTANCE, QUADRATIC, EVIDENCE = "linear", "distance", "quadratic", "evidence"
ONE_FORM = ""


def make_losses(seed: int) -> dict[str, dict[str, Callable[[Tensor], Tensor]]]:
    """Losses in all their forms, which agree on k-hot vectors."""
    b, a, problem = torch.randn(N), torch.randn(N, N), make_problem(1000 + seed, N, K)

    def evidence(form: str) -> Callable[[Tensor], Tensor]:
        return lambda x: -problem.log_evidence(x.double(), FORMS[form]).to(x.dtype)

    return {
        LINEAR: {ONE_FORM: lambda x: x @ b},
        DISTANCE: {ONE_FORM: lambda x: (x - b).square().sum(-1)},
        QUADRATIC: {ONE_FORM: lambda x: (x @ a * x).sum(-1)},
        EVIDENCE: {form: evidence(form) for form in FORMS},
    }


def add_rows(table: Table, comparison: Comparison, form: str) -> None:
    for row in comparison.rows:
        if row.num_samples == DRAWS:
            scores = {BIAS: row.bias, BIAS_ERROR: row.bias_error, VARIANCE: row.variance, COSINE: row.cosine}
            table.add(row_name(row.estimator, form) if form else row.estimator, scores)


def add_findings(table: Table, loss: str) -> None:
    if loss == EVIDENCE:
        first, second = ({form: row_name(name, form) for form in FORMS} for name in (FIRST, SECOND))
        for name, rows in ((FIRST, first), (SECOND, second)):
            linear, squared = rows["linear"], rows["squared"]
            table.find(f"{name}: the linear form points nearer to the exact gradient", linear, squared, COSINE)
            table.find(f"{name}: the linear form is less biased", linear, squared, BIAS, lower=True)
        return
    table.find("straight-through has a lower variance than the score function", FIRST, SCORE, VARIANCE, lower=True)
    table.find("the baseline lowers the variance of the score function", BASELINE, SCORE, VARIANCE, lower=True)
    table.find("straight-through points nearer to the exact gradient than SFESS", FIRST, BASELINE, COSINE)
    if loss != LINEAR:  # where both are exact
        table.find("ReinMax is less biased than straight-through", SECOND, FIRST, BIAS, lower=True)


def main(arguments: list[str] | None = None) -> dict[str, Table]:
    parser = experiment_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=100, help="estimates to judge by (default: %(default)s)")
    args = parse(parser, arguments, smoke={"seeds": 2, "repeats": 5})

    columns = {BIAS: ".2f", BIAS_ERROR: ".2f", VARIANCE: ".2f", COSINE: ".2f"}
    tables: dict[str, Table] = {}
    figures = {}
    for seed, progress in each_seed(args, steps=5):
        design = ConditionalPoisson(logits=torch.randn(N), k=K)
        first = seed == args.seed
        sizes = OTHER_DRAWS if first and not args.smoke else DRAWS
        for loss, forms in make_losses(seed).items():
            title = f"Gradients of the {loss} loss, k = {K} of n = {N}, {DRAWS} draws"
            table = tables.setdefault(loss, Table(title, columns))
            for form, f in forms.items():
                comparison = compare_estimators(design, f, ESTIMATORS, num_samples=sizes, num_repeats=args.repeats)
                add_rows(table, comparison, form)
                if first:
                    figure = figures["_".join(filter(None, (loss, form)))] = comparison.plot()
                    figure.suptitle(f"{loss} loss{form and f', {form} form'}, k = {K} of n = {N}, one problem")
                progress.update()
    for loss, table in tables.items():
        add_findings(table, loss)
        table.save(args, f"compare_estimators_{loss}")
    for name, figure in figures.items():
        save_figure(figure, args, f"compare_estimators_{name}")
    return tables


if __name__ == "__main__":
    main()
