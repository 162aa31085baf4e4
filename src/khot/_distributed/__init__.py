"""The boundary of functions of rows, and tensors that are spread over processes, ``torch.distributed.tensor.DTensor``.

The engine is PyTorch's own. :mod:`.boundary` finds out what kind of call comes in, :mod:`.calls` brings calls with
DTensors to the local tensors of each process and their results back, :mod:`.placements` handles placements, and
:mod:`.shards` has reductions for rows that are sharded over processes.
"""
