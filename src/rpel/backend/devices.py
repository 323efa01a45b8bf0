"""Which devices torch has here, and which worker has which."""

import torch


def local_device(device: str, local_rank: int) -> str:
    """The device of one of several workers on a machine: of "cuda" each has its own.

    >>> local_device("cpu", 1), local_device("cuda:1", 0)
    ('cpu', 'cuda:1')
    """
    if device != "cuda":
        return device
    return f"cuda:{local_rank % max(1, torch.cuda.device_count())}"


def sharing(device: str, here: int) -> int:
    """How many of the ``here`` workers on a machine have the same device.

    >>> sharing("cpu", 2), sharing("cuda:1", 3)
    (2, 3)
    """
    return -(-here // max(1, torch.cuda.device_count())) if device == "cuda" else here


def missing(device: str) -> str | None:
    """Why torch cannot use a device here, in a few words; None where it can.

    >>> missing("cpu") is None
    True
    """
    kind, _, number = device.partition(":")
    if kind == "mps":
        if torch.backends.mps.is_available():
            return None
        return (
            "torch sees no Apple GPU"
            if torch.backends.mps.is_built()
            else f"torch {torch.__version__} has no mps"
        )
    if kind != "cuda":
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU-only build, install one with CUDA"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: is its driver there?"
    return None if int(number or 0) < count else f"torch sees {count} of them, numbered from 0"


def free_memory(device: str) -> int | None:
    """Return the bytes that are free on a device; None where it uses the host's memory.

    >>> free_memory("cpu") is None
    True
    """
    kind = device.partition(":")[0]
    if kind == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if kind == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return None
