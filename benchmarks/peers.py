"""What differs from other libraries, measured where they are installed: the numbers of the page "Coming from ...".

    pip install torchsort difftopk softtorch; python benchmarks/peers.py

Each number is the largest distance of two results, of the peer and of khot, on the same tensors.
"""

import argparse
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch
from timing import RESULTS, optional, write_csv
from torch import Tensor

import khot

Row = dict[str, object]
Map = Callable[[Tensor], Tensor]


def permuted(mask: Map, x: Tensor) -> float:
    """How far the mask of reordered scores is from the reordered mask."""
    order = torch.tensor([3, 1, 2, 0, 4, 7, 6, 5])
    return (mask(x[:, order]) - mask(x)[:, order]).abs().max().item()


def against_double(ranks: Map, x: Tensor) -> float:
    """How far float32 is from float64."""
    return (ranks(x).double() - ranks(x.double())).abs().max().item()


def of_torchsort(torchsort: ModuleType) -> list[Row]:
    x = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) * 1e4 + 1e6
    small = torch.tensor([[2.9, 0.0, 1.2, 5.1]])
    values = torchsort.soft_rank(small, regularization_strength=2.0) - khot.permutahedron_rank(small, 2.0)
    return [
        row("soft ranks: distance from each other", values.abs().max().item(), 0.0),
        row(
            "soft ranks at an offset of 1e6: float32 from float64",
            *(against_double(ranks, x) for ranks in (torchsort.soft_rank, khot.permutahedron_rank)),
        ),
    ]


def of_difftopk(difftopk: ModuleType) -> list[Row]:
    x = torch.linspace(0, 0.7, 8).unsqueeze(0)
    rows = []
    for network in ("bitonic", "odd_even"):
        net = difftopk.DiffTopkNet(network, size=8, k=3, steepness=10.0, distribution="cauchy")
        there = permuted(lambda z, net=net: net(z)[1].sum(-1), x)
        here = permuted(lambda z: khot.sigmoid_topk(z, 3), x)
        rows.append(row(f"mask of permuted scores from the permuted mask, {network}", there, here))
    return rows


def of_softtorch(softtorch: ModuleType) -> list[Row]:
    def there(z: Tensor, k: int, softness: float) -> Tensor:
        return softtorch.topk(z, k, softness=softness)[1].sum(-2)

    masks = (there, khot.sigmoid_topk)
    x = torch.tensor([2.0, 1.4, 1.1, 0.2, -0.5, -1.3])
    changes = ((mask(100 * x + 7, 2, 0.5) - mask(x, 2, 0.5)).abs().max().item() for mask in masks)
    z = torch.tensor([-3.1, 0.7, 3.7, 0.7, 0.4, 1.9])
    excesses = (max(0.0, mask(z, 3, 0.1).max().item() - 1) for mask in masks)
    return [
        row("mask of 100 x + 7 from the mask of x, both at the softness 0.5", *changes),
        row("mass of an item above 1, k = 3 of 6", *excesses),
    ]


def row(question: str, there: float, here: float) -> Row:
    return {"question": question, "there": f"{there:.2g}", "here": f"{here:.2g}"}


MEASURED = {"torchsort": of_torchsort, "difftopk": of_difftopk, "softtorch": of_softtorch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS / "peers.csv", help="where the table goes")
    options = parser.parse_args()
    rows = []
    for name, measure in MEASURED.items():
        if library := optional(name):
            rows += [{"library": name, "version": metadata.version(name), **found} for found in measure(library)]
    if rows:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
