"""How long the first call of a function takes in a new process: with an empty folder of machine code, and a full one.

Run `python benchmarks/first_call.py [name ...]`. Each call has a process of its own that has imported torch and khot,
and goes forward and backward on (16, 100) float32 scores, k = 10. Times are of the processor, so that other work on the
machine does not count. `loops` is how many loops of numba's were compiled. Targets are below.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import RESULTS, write_csv

COLD, WARM = 4.0, 0.7  # targets in seconds, with an empty folder and with a full one
MAP = "{}(x, 10).square().sum().backward()"
OF_SCORES = "{}(x).square().sum().backward()"
STEP = "d = {}; (d.log_prob(d.sample()).sum() + d.mean.square().sum()).backward()"
PATHWISE = "reinmax({}(logits=x, k=10), lambda s: s.square().sum(-1)).sum().backward()"
BLOCKS = re.findall("```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
README_BLOCK = next(block for block in BLOCKS if "AutoKHot(" in block)
CALLS = {
    **dict.fromkeys(("sigmoid_topk", "log_sigmoid_topk", "lapsum_topk", "normal_topk", "sparse_topk"), MAP),
    **dict.fromkeys(("sparse_topk_magnitude", "sparse_topk_signed", "capped_softmax", "topk_threshold"), MAP),
    **dict.fromkeys(("sorted_transport_topk", "successive_softmax_topk"), MAP),
    "topk_mask": "topk_mask(x, 10)",
    **dict.fromkeys(("soft_rank", "soft_sort", "permutahedron_rank"), OF_SCORES),
    "ConditionalPoisson": STEP.format("ConditionalPoisson(logits=x, k=10)"),
    "ConditionalPoisson(probs)": STEP.format("ConditionalPoisson(probs=sigmoid_topk(x, 10))"),
    "Sampford": "d = Sampford(logits=x, k=10); d.log_prob(d.sample()).sum().backward()",
    "GumbelTopK": STEP.format("GumbelTopK(logits=x, k=10)"),
    "ParetoSampling": STEP.format("ParetoSampling(logits=x, k=10)"),
    "Brewer": "Brewer(logits=x, k=10).sample()",
    "reinmax of Pivotal": PATHWISE.format("Pivotal"),
    "reinmax of ConditionalPoisson": PATHWISE.format("ConditionalPoisson"),
    "Pyro block of the README": README_BLOCK,
    "KHotSelector.fit": "KHotSelector(3, random_state=0).fit(table, table[:, :3].sum(1))",
}
TARGETS = {  # of those that have others
    "sigmoid_topk": (3.0, WARM),
    "ConditionalPoisson": (5.0, WARM),
    "reinmax of ConditionalPoisson": (6.0, WARM),
    "Pyro block of the README": (8.0, 1.0),
    "KHotSelector.fit": (COLD, 1.5),
}
PROCESS = """
import time
import torch
torch.set_num_threads(1)
torch.ones(2, requires_grad=True).square().sum().backward()  # torch's own first call
from khot import *
{imports}
x = torch.linspace(-1, 1, 1600).view(16, 100).sin().requires_grad_()
table = torch.randn(300, 20, generator=torch.Generator().manual_seed(0)).numpy()
start = time.process_time()
{call}
print(time.process_time() - start)
"""


def seconds(call: str, folder: str) -> float:
    """Of the call in a new process that keeps its machine code in this folder."""
    environment = {**os.environ, "KHOT_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
    imports = "from khot.sklearn import KHotSelector" if "KHotSelector" in call else ""
    command = [sys.executable, "-c", PROCESS.format(call=call, imports=imports)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return float(found.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CALLS], help="which functions; all by default, into a table")
    parser.add_argument("--csv", type=Path, default=RESULTS / "first_call.csv", help="where the table goes")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in options.names or CALLS:
        call = CALLS[name].replace("{}", name)
        most, most_again = TARGETS.get(name, (COLD, WARM))
        with tempfile.TemporaryDirectory() as folder:
            cold, warm = seconds(call, folder), min(seconds(call, folder) for _ in range(2))
            loops = len(list(Path(folder).rglob("*.nbc")))
        marks = "".join(mark for mark, missed in ((" cold", cold > most), (" warm", warm > most_again)) if missed)
        print(f"{name:<30}{cold:>7.2f}{warm:>7.2f}{loops:>4}{marks and '  above the target:' + marks}", flush=True)
        rows.append({"function": name, "cold_s": f"{cold:.2f}", "warm_s": f"{warm:.2f}", "loops": loops})
    if not options.names:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
