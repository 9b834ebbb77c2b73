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
torch.cuda.current_stream = lambda *_: None  # 0.19: the gradient buffers of its data parallelism
