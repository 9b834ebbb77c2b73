"""The unmodified trainer of torchtitan on CPU and gloo, several times in one process to pay the imports once.

    python torchtitan_trainer.py --make-assets DIR
    cd DIR && torchrun --nproc-per-node 2 torchtitan_trainer.py results- 29600,29601 "--options of one job" "..."

Each job needs a port of its own: torchtitan makes and destroys the process group in each.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

SETTINGS = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tokenizer"
[metrics]
log_freq = 1
[lr_scheduler]
warmup_steps = 2
[training]
local_batch_size = 8
seq_len = 32
steps = 2
dataset = "c4_test"
[debug]
seed = 1
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 1
[activation_checkpoint]
mode = "none"
"""


def make_assets(folder: Path) -> None:
    """A tokenizer that knows the bytes, and two thousand lines of text where torchtitan looks for its test data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tests" / "assets" / "c4_test").mkdir(parents=True)
    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    lines = (f"Sample {i}: the quick brown fox jumps over the lazy dog {i % 7} times. " * 4 for i in range(2000))
    data = folder / "tests" / "assets" / "c4_test" / "data.json"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "settings.toml").write_text(SETTINGS)


def shim() -> None:
    """Let torchtitan 0.2.2 run on a machine without an accelerator."""
    import torch
    import torch._utils
    from torch.distributed.fsdp import FSDPModule

    torch._utils._get_available_device_type = lambda: "cpu"  # else torchtitan takes cuda
    cpu: Any = torch.cpu  # its device module: the calls that only its metrics use
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda *_: "cpu"
    cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
    cpu.memory_stats = lambda *_: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
    cpu.set_stream = lambda *_: None
    torch.accelerator.current_stream = lambda *_: None  # the overlap of DualPipeV
    divide = FSDPModule.set_gradient_divide_factor

    def divide_and_sum(self: Any, factor: float) -> None:  # gloo has no PREMUL_SUM
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_and_sum
    for wanted, module in (("tensorboard", "torch.utils.tensorboard"), ("triton", "torchtitan.models.moe.kernels")):
        if find_spec(wanted) is None:  # imported whatever the settings are
            sys.modules[module] = MagicMock(__spec__=None)


class Observer:
    """What the test wants to know of a job and torchtitan does not print: exact losses, the schedule's own plan."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.schedules: list[Any] = []
        self.slow = (-1, 0.0)
        """(layer, seconds)."""

    def install(self) -> None:
        from torch.distributed.pipelining import schedules
        from torchtitan.components.metrics import MetricsProcessor
        from torchtitan.models.llama3.model.model import TransformerBlock

        log, make, build = MetricsProcessor.log, schedules._PipelineSchedule.__init__, TransformerBlock.__init__

        def log_loss(metrics: Any, step: int, average: float, *args: Any, **kwargs: Any) -> None:
            self.losses.append(float(average).hex())
            log(metrics, step, average, *args, **kwargs)

        def make_schedule(schedule: Any, *args: Any, **kwargs: Any) -> None:
            make(schedule, *args, **kwargs)
            self.schedules.append(schedule)

        def build_block(block: Any, layer: int, *args: Any, **kwargs: Any) -> None:
            build(block, layer, *args, **kwargs)
            if layer == self.slow[0]:
                block.register_forward_pre_hook(lambda *_: time.sleep(self.slow[1]))

        MetricsProcessor.log = log_loss
        schedules._PipelineSchedule.__init__ = make_schedule
        TransformerBlock.__init__ = build_block

    def result(self) -> dict[str, Any]:
        schedule = self.schedules[-1]
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        order = getattr(schedule, "pipeline_order_with_comms", None)
        actions = (
            [part for action in order[stages[0].group_rank] for part in action.sub_actions or [action]] if order else []
        )
        plan = dict(Counter(action.computation_type.name for action in actions))
        return {"losses": self.losses, "plan": plan, "stages": [stage.stage_index for stage in stages]}


def main() -> None:
    import torch
    from torchtitan.config import ConfigManager

    torch.set_num_threads(1)
    prefix, ports, *lines = sys.argv[1:]
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    observer = Observer()
    observer.install()
    first_step = 0
    for line, port in zip(lines, ports.split(","), strict=True):
        os.environ["MASTER_PORT"] = port
        observer.losses, observer.schedules = [], []
        slow, _, options = line.partition(" ") if line.startswith("slow=") else ("slow=-1:0", "", line)
        layer, _, time_ms = slow.removeprefix("slow=").partition(":")
        observer.slow = (int(layer), float(time_ms) / 1e3)
        # its parser took the default of its arguments from sys.argv when it was imported
        ConfigManager.parse_args.__defaults__ = (["--job.config_file", "settings.toml", *shlex.split(options)],)
        runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
        with Path(f"{prefix}{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps({"job": line, "first_step": first_step, **observer.result()}) + "\n")
        first_step += len(observer.losses)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make-assets"]:
        make_assets(Path(sys.argv[2]))
    else:
        shim()
        main()
