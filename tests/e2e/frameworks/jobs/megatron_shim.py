"""Lets Megatron-Core run on a machine without CUDA. To be imported before megatron.core."""

from __future__ import annotations

import functools
import sys
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch

if find_spec("triton") is None:  # 0.19 imports these kernels whatever the model is; only mixtures of experts use them
    sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock(__spec__=None)


def _cuda_means_cpu(function: Any) -> Any:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return on_cpu


torch.cuda.current_device = lambda: "cpu"  # given to torch.empty as the device of buffers
torch.cuda.synchronize = lambda *_: None  # after batched messages, and in timers
torch.zeros = _cuda_means_cpu(torch.zeros)  # the schedules count tokens in torch.zeros([], device="cuda")
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: (
    torch.get_rng_state()
)  # GPTModel's tracker
torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # tied embeddings


class Stream:
    """Of a device whose work is done when it has been issued: nothing is ever waited for."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.wait_event = self.wait_stream = self.synchronize = self.record = self.wait = lambda *_, **__: None

    def record_event(self, *_: Any) -> Event:
        return Event()

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Event(Stream):
    """A moment of it."""


stream = Stream()
torch.cuda.current_stream = lambda *_: stream  # 0.19: the gradient buffers of its data parallelism
# The combined forward and backward has a stream for its all-to-all; sizes that would come from the device are tensors.
torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, lambda _stream: stream
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: 0
torch.Tensor.record_stream = lambda *_: None
_all_to_all_single = torch.distributed.all_to_all_single


def _all_to_all(*args: Any, **kwargs: Any) -> Any:
    sizes = {
        name: value.tolist() for name, value in kwargs.items() if isinstance(value, torch.Tensor) and "split" in name
    }
    return _all_to_all_single(*args, **kwargs | sizes)


torch.distributed.all_to_all_single = _all_to_all
