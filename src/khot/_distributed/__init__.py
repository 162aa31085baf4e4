"""Tensors that are spread over processes, ``torch.distributed.tensor.DTensor``: what reaches the maps, and what leaves.

The engine is PyTorch's own. :mod:`.placements` says what lies where, :mod:`.boundary` brings calls on DTensors to the
local tensors of each process and their results back, and :mod:`.shards` has the reductions for rows of which each
process holds a part of the items.
"""
