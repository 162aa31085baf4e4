"""The links that have a Triton piece; ``test_link_functions.py`` sees to it that none is missing."""

from khot.kernels.links.base import Link
from khot.kernels.links.capped_exponential import CAPPED_EXPONENTIAL
from khot.kernels.links.clipped_power import clipped_power
from khot.kernels.links.laplace import LAPLACE
from khot.kernels.links.logistic import LOGISTIC

LINKS: list[Link] = [
    LOGISTIC,
    LAPLACE,
    clipped_power(2.0),
    clipped_power(1.5),
    CAPPED_EXPONENTIAL,
]
