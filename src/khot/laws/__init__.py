"""The mathematics of the designs, in plain torch, between the kernels that it calls and the distributions.

There is one module per design: ``conditional_poisson``, ``sampford``, ``brewer``, ``pivotal``, ``systematic``,
``order_sampling`` and ``plackett_luce``. In addition, ``unit_by_unit`` has the passes behind the most common calls of
``conditional_poisson``, ``order_at_once`` and ``order_inclusion_at_once`` those of ``order_sampling``, whose positions
for Pareto sampling are in ``pareto``. ``inverse`` finds the parameters for given inclusion probabilities,
``quadrature`` has rules for integrals, ``subsets`` lists k-hot vectors, and ``kept`` stores intermediate values that
the methods of a design share.
"""
