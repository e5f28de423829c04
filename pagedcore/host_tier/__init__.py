"""The second tier of the KV cache: which blocks lie in host memory, in plain Python. The copies themselves are `pagedcore/swap/`."""
