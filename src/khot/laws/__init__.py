"""The mathematics of the designs, in plain torch: between the kernels, which it calls, and the distributions.

One module a design: ``conditional_poisson``, ``sampford``, ``brewer``, ``pivotal``, ``systematic``,
``order_sampling`` and ``plackett_luce``. Beside them ``unit_by_unit`` has the passes behind what is asked of a
``conditional_poisson`` design most, ``inverse`` finds the parameters of given inclusion probabilities, ``quadrature``
has rules for integrals, ``subsets`` lists k-hot vectors, and ``kept`` is where a design keeps what its methods share.
"""
