"""Small faults, planted one after another into a copy of the sources: which does a test find?

Run by hand, before and after tests are removed: ``python -m tests.mutations [WORD ...]``; words choose faults by file.
Each fault names the files of tests that are nearest to it, with options of pytest that select from them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "conftest.py", "pyproject.toml")


class Fault(NamedTuple):
    """A text that occurs once in a file of ``src/khot``, what replaces it, and the arguments of pytest that show it."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    # Thresholds, links and other maps
    Fault("kernels/threshold/derivatives.py", "grad_s = -_lever(", "grad_s = _lever(", "relaxations/test_sigmoid.py"),
    Fault(
        "kernels/threshold/derivatives.py",
        "shift - shares.rate * dk",
        "shift + shares.rate * dk",
        "relaxations/test_threshold.py",
    ),
    Fault(
        "kernels/threshold/residual.py",
        "excess, below = total - rows.k,",
        "excess, below = total - rows.k.floor(),",
        "relaxations/test_sigmoid.py -k oracle",
    ),
    Fault(
        "kernels/links/laplace.py",
        "return tail / (2 - tail)",
        "return tail / (1 + tail)",
        "relaxations/test_contract.py -k lapsum",
    ),
    Fault("kernels/links/normal.py", "-(z + 0.5 * beyond) * beyond", "-z * beyond", "kernels/test_links.py"),
    Fault(
        "kernels/links/clipped_power_numba.py",
        "below * (high + real(q) * real(z - high))",
        "below * high",
        "relaxations/test_sparse_accuracy.py",
    ),
    Fault(
        "kernels/transport/plan.py",
        "solve_dual(plan, plan.sum(-1), right)",
        "solve_dual(plan, plan.sum(-1), -right)",
        "relaxations/test_sorted_transport.py",
    ),
    Fault("relaxations/order.py", "+ 0.5 * (after - before)", "+ 0.5 * (after + before)", "relaxations/test_order.py"),
    Fault("relaxations/successive_softmax.py", "(j < k)", "(j <= k)", "relaxations/test_successive_softmax.py"),
    Fault(
        "relaxations/axes.py",
        ".movedim(tuple(range(-len(axes), 0)), axes)",
        ".movedim(tuple(range(-len(axes), 0)), axes[::-1])",
        "relaxations/test_joint_axes.py",
    ),
    # Selection and draws
    Fault(
        "kernels/selection/exact.py",
        "dtype=torch.int32) <= rest",
        "dtype=torch.int32) < rest",
        "kernels/test_selection.py",
    ),
    Fault(
        "laws/systematic.py",
        "((u * ONE).long() - start)",
        "((u * ONE).long() + start)",
        "distributions/test_systematic.py",
    ),
    Fault("kernels/draws/exact.py", "spread, share.clamp(-1, 1))", "spread, share)", "distributions/test_pivotal.py"),
    # Designs
    Fault(
        "laws/conditional_poisson.py",
        "miss * size.masked_fill(sure, 0.0)",
        "miss * size",
        "distributions/test_infinite_logits.py",
    ),
    Fault(
        "laws/conditional_poisson.py",
        "ratios.sum(-1) + (positive.sum(-1) - tilted.k)",
        "ratios.sum(-1) + (positive.sum(-1) + tilted.k)",
        "distributions/test_order_sampling.py",
    ),
    Fault(
        "laws/sampford.py",
        "one - 0.5).mul_(2 / mean)",
        "0.5 - one).mul_(2 / mean)",
        "distributions/test_contract.py -k sampford",
    ),
    Fault(
        "laws/order_sampling.py",
        "(came.sum(-1, keepdim=True) + came)",
        "came.sum(-1, keepdim=True)",
        "distributions/test_order_sampling.py",
    ),
    Fault(
        "laws/order_sampling.py",
        "torch.where(contradicts, -torch.inf, 0.0)",
        "0.0",
        "distributions/test_infinite_logits.py",
    ),
    Fault(
        "kernels/order_sampling/noises.py", "y * torch.exp(-y) / cdf", "y / cdf", "distributions/test_order_sampling.py"
    ),
    Fault(
        "laws/once.py",
        "if any(isinstance(x, torch.Tensor) and has_derivative(x, recorded) for x in args)",
        "if False",
        "distributions/test_sampford.py",
    ),
    Fault("laws/size_prior.py", "prior.low + log_p.argmax(0)", "log_p.argmax(0)", "distributions/test_size_prior.py"),
    Fault(
        "distributions/phantom_unit.py",
        "1 + k - probs.sum(-1)",
        "probs.sum(-1) - k",
        "distributions/test_phantom_unit.py",
    ),
    Fault(
        "distributions/relaxed_khot.py",
        "(n - 1) * log_temperature",
        "n * log_temperature",
        "distributions/test_relaxed_khot.py",
    ),
    Fault(
        "distributions/kl.py",
        "(size > q.largest_k.unsqueeze(-1))",
        "(size >= q.largest_k.unsqueeze(-1))",
        "distributions/test_size_prior.py -k divergences",
    ),
    Fault(
        "distributions/totals.py",
        "masked_fill(random_units == 1, torch.nan)",
        "masked_fill(random_units == 0, torch.nan)",
        "distributions/test_horvitz_thompson.py",
    ),
    # Estimators and inference
    Fault(
        "estimators/_score_function.py", "(losses.shape[0] - 1)", "losses.shape[0]", "estimators/test_score_function.py"
    ),
    Fault(
        "estimators/_score_function.py",
        "(1 - self.decay) / self._weight",
        "(1 - self.decay)",
        "estimators/test_score_function.py",
    ),
    Fault(
        "estimators/_reinmax.py",
        "return 2 * slope * (g - mean)",
        "return slope * (g - mean)",
        "estimators/test_reinmax.py",
    ),
    Fault(
        "estimators/_unordered_set.py",
        "but_one = every - factor",
        "but_one = every + factor",
        "estimators/test_unordered_set.py",
    ),
    Fault(
        "estimators/_perturbed_topk.py",
        "as_axes(y.to(x.dtype), x, dim)",
        "as_axes(y, x, dim)",
        "test_half_precision.py -k perturbed_topk",
    ),
    Fault(
        "estimators/imle.py",
        "design.top(scores - size * g)",
        "design.top(scores + size * g)",
        "estimators/test_perturbed.py",
    ),
    Fault("infer/swaps.py", "+ back - forth", "+ forth - back", "infer/test_swaps.py"),
    Fault("infer/swaps.py", "u + uniform, v + informed", "v + uniform, u + informed", "infer/test_swaps.py"),
    # Modules, losses, scikit-learn, processes, constraints
    Fault("nn/routing.py", "return 0.5 * torch.where(", "return torch.where(", "nn/test_route.py"),
    Fault("nn/jump_relu.py", "< self.bandwidth / 2", "< self.bandwidth", "nn/test_modules.py"),
    Fault("nn/idle_units.py", "self.idle >= self.dead_after", "self.idle > self.dead_after", "nn/test_modules.py"),
    Fault("nn/batch_topk.py", "1 / count.clamp(min=1)", "1 / (count + 1)", "nn/test_stacks.py -k average"),
    Fault(
        "losses/fenchel_young.py",
        "grad.unsqueeze(-1) * y, -grad * penalty",
        "grad.unsqueeze(-1) * y, grad * penalty",
        "test_losses.py",
    ),
    Fault(
        "losses/rank_metric.py",
        "1 / (sizes + 1).double().log2()",
        "1 / (sizes + 2).double().log2()",
        "test_losses.py -k TopKMetric",
    ),
    Fault(
        "losses/cross_entropy.py",
        "torch.arange(1, len(weights) + 1",
        "torch.arange(0, len(weights)",
        "test_losses.py -k CrossEntropy",
    ),
    Fault("sklearn/start.py", "(1 / probs - 1)[:, None]", "(1 / probs)[:, None]", "sklearn/test_start.py"),
    Fault(
        "sklearn/data.py",
        "(shares * (1 - shares)).sqrt()",
        "(shares * (1 - shares))",
        "sklearn/test_data.py sklearn/test_start.py",
    ),
    Fault(
        "_distributed/calls.py",
        'return total / math.prod(shape) if reduction == "mean"',
        'return total if reduction == "mean"',
        "distributed/test_one_process.py",
    ),
    Fault("constraints.py", "(size <= self.upper)", "(size < self.upper)", "test_constraints.py"),
    Fault(
        "constraints.py", "(value >= 0) & (value < self.n)", "(value >= 0) & (value <= self.n)", "test_constraints.py"
    ),
]


def occurrences(fault: Fault) -> int:
    """How often its text occurs; must be once."""
    return (ROOT / "src/khot" / fault.file).read_text().count(fault.old)


def verdict(fault: Fault, tree: Path) -> str:
    """Whether tests in a copy of the repository that has this fault fail: "found" or "MISSED"."""
    target, where = tree / "src/khot" / fault.file, (tree / "src", tree)
    words = [f"tests/{word}" if word.endswith(".py") else word for word in fault.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--most", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, where)), "KHOT_CACHE_DIR": str(tree / "loops")}
    whole = target.read_text()
    target.write_text(whole.replace(fault.old, fault.new))
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    finally:
        target.write_text(whole)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{fault}: pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return f"found by {failed.split()[1]}" if done.returncode else "MISSED"


def main() -> None:
    chosen = [fault for fault in FAULTS if not sys.argv[1:] or any(word in fault.file for word in sys.argv[1:])]
    if wrong := [fault for fault in FAULTS if occurrences(fault) != 1]:
        sys.exit("\n".join(f"occurs {occurrences(fault)} times: {fault.file}: {fault.old}" for fault in wrong))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder, name)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        for fault in chosen:
            start = time.monotonic()
            found = verdict(fault, Path(folder))
            missed += found == "MISSED"
            seconds = time.monotonic() - start
            sys.stdout.write(f"{fault.file}: {fault.old} -> {fault.new}: {found}, {seconds:.0f} s\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - missed} of {len(chosen)} found\n")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
