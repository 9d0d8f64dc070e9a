"""Buffers that exchanges send from and receive into, used again and again.

On the CPU a new large buffer costs more than what is copied into it: the system hands out its pages one by one. On
other devices torch keeps freed memory itself.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor


class Staging:
    """Flat buffers of this process: as many as were ever in use at once, each as large as was ever asked of it."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []  # smallest first
        self._lock = Lock()

    def take(self, num_elements: int, like: Tensor) -> Tensor:
        """An uninitialised flat tensor of the dtype and device of `like`, until it is given back."""
        if not like.is_cpu:
            return like.new_empty(num_elements)
        num_bytes = num_elements * like.itemsize
        with self._lock:
            fitting = next((i for i, storage in enumerate(self._free) if len(storage) >= num_bytes), -1)
            storage = self._free.pop(fitting) if self._free else None
        if storage is None or len(storage) < num_bytes:
            storage = torch.UntypedStorage(num_bytes)
        return like.new_empty(0).set_(storage, 0, (num_elements,), (1,))

    def give(self, *buffers: Tensor) -> None:
        """Take back buffers that nothing reads any more."""
        with self._lock:
            self._free += [buffer.untyped_storage() for buffer in buffers if buffer.is_cpu]
            self._free.sort(key=len)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._free.clear()


STAGING = Staging()
