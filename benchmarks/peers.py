"""What differs from other libraries, measured where they are installed: the numbers of the page "Coming from ...".

    pip install entmax torchsort difftopk softtorch jaxopt optax ott-jax; python benchmarks/peers.py

Each number is the largest distance between the results of the peer and of khot on the same tensors.
"""

import argparse
import csv
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
    ranks = torchsort.soft_rank(small, regularization_strength=2.0) - khot.permutahedron_rank(small, 2.0)
    values = torchsort.soft_sort(small, regularization_strength=2.0) - khot.permutahedron_sort(small, 2.0)
    return [
        same("soft ranks", ranks),
        same("soft sorted values", values),
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
        *factors_of_softtorch(softtorch),
    ]


def factors_of_softtorch(softtorch: ModuleType) -> list[Row]:
    x, k, s = normal_scores(), 3, 0.3
    squashed = torch.sigmoid((x - x.mean()) / x.std(correction=0))
    plain = {"softness": s, "standardize": False}
    isotonic = {"method": "fast_soft_sort", "mode": "c0", "standardize": False}
    plan = softtorch.topk(x, k, method="ot", **plain)[1] - khot.sorted_transport_topk(x, k, k * s).T
    standard = softtorch.topk(x, k, method="ot", softness=s)[1] - khot.sorted_transport_topk(squashed, k, k * s).T
    ranks = softtorch.rank(x, softness=4.0, descending=False, **isotonic) - khot.permutahedron_rank(x, 4.0 / 6)
    values = softtorch.sort(x, softness=s, **isotonic).values - khot.permutahedron_sort(x, 6 * s)
    return [
        same('topk(method="ot"), epsilon = k s', plan),
        same("the same, standardised and squashed", standard),
        same("rank, strength = s / (n - 1)", ranks),
        same("sort, strength = (n - 1) s", values),
    ]


def of_entmax(entmax: ModuleType) -> list[Row]:
    x = normal_scores()
    return [
        same("budget_bisect and sparse_topk", entmax.budget_bisect(x, 3) - khot.sparse_topk(x, 3)),
        same("entmax15 and sparse_topk(x, 1, 2, p=1.5)", entmax.entmax15(x) - khot.sparse_topk(x, 1, 2.0, p=1.5)),
    ]


def of_jaxopt(jaxopt: ModuleType) -> list[Row]:
    from jaxopt.projection import projection_box_section

    x = normal_scores()
    there = from_jax(projection_box_section(x.numpy(), (0.0, 1.0, torch.ones(7).numpy(), 3.0)))
    return [same("projection_box_section and sparse_topk", there - khot.sparse_topk(x, 3))]


def of_optax(optax: ModuleType) -> list[Row]:
    x = normal_scores()
    there = from_jax(optax.projections.projection_simplex(x.numpy()))
    return [same("projection_simplex and sparse_topk, k = 1", there - khot.sparse_topk(x, 1))]


def of_ott(ott: ModuleType) -> list[Row]:
    from ott.tools import soft_sort

    x, k, epsilon = normal_scores(), 3, 0.05
    settings = {"epsilon": epsilon, "threshold": 1e-6, "max_iterations": 100_000}
    squashed = torch.sigmoid((x - x.mean()) / x.std(correction=0))
    values = from_jax(soft_sort.sort(x.numpy(), topk=k, **settings)).flip(0)
    mask = from_jax(soft_sort.topk_mask(x.numpy(), k=k, **settings))
    plan = khot.sorted_transport_topk(squashed, k, k * epsilon)
    return [
        same("sort(topk=k), epsilon = k times its own", values - plan.T @ x),
        same("topk_mask and transport_topk, the same epsilon", mask - khot.transport_topk(squashed, k, epsilon)),
    ]


def normal_scores() -> Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(0))


def from_jax(array: object) -> Tensor:
    return torch.tensor(array.tolist())


def same(question: str, difference: Tensor) -> Row:
    """A call that has an equal here: their distance."""
    return row(f"{question}: distance from each other", difference.abs().max().item(), 0.0)


def row(question: str, there: float, here: float) -> Row:
    return {"question": question, "there": f"{there:.2g}", "here": f"{here:.2g}"}


MEASURED = {
    "entmax": of_entmax,
    "torchsort": of_torchsort,
    "difftopk": of_difftopk,
    "softtorch": of_softtorch,
    "jaxopt": of_jaxopt,
    "optax": of_optax,
    "ott-jax": of_ott,
}


def versions_on_page(name: str) -> list[str]:
    """The versions of a library in the page's table, which is made from the file of results."""
    with (RESULTS / "peers.csv").open(encoding="utf-8", newline="") as file:
        return sorted({row["version"] for row in csv.DictReader(file) if row["library"] == name})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RESULTS / "peers.csv", help="where the table goes")
    options = parser.parse_args()
    rows = []
    for name, measure in MEASURED.items():
        if library := optional(name.removesuffix("-jax")):
            rows += [{"library": name, "version": metadata.version(name), **found} for found in measure(library)]
    for name, version in sorted({(str(row["library"]), str(row["version"])) for row in rows}):
        if version not in (on_page := versions_on_page(name)):
            print(f"{name} is {version} here, {' and '.join(on_page) or 'not'} on the page")
    if rows:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
