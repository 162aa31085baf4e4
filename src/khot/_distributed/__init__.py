"""Tensors that are spread over processes, ``torch.distributed.tensor.DTensor``, on their way into and out of the maps.

The engine is PyTorch's own. :mod:`.placements` handles placements, :mod:`.boundary` brings calls with DTensors to the
local tensors of each process and their results back, and :mod:`.shards` has reductions for rows that are sharded over
processes.
"""
