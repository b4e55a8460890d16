"""`make gpu-check` (`scripts/gpu_check.py`): is everything right on a GPU, and how much of its bandwidth do we get?

Parts, each a process of its own with a time limit, so that one that fails or hangs stops no other (`parts.py`): kernels
beside the references, memory shared by two processes, pages moved by the real mover, bandwidth of kernels, and a model
that generates over a daemon. `machine.py` says on what they run: a GPU, or a fake one at tiny sizes for tests.
"""
