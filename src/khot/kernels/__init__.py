"""Hot loops behind khot: the mathematics, a plain-torch reference and the dispatch of each operation.

Reachable, not promised: the public names are those of ``khot`` and its other subpackages.
"""
