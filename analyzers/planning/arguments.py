"""Reads the layout of a job from its command: launchers, Megatron (or its YAML), DeepSpeed (JSON), torchtitan (TOML).

Nothing is run. What cannot be read (a variable that is not set, ``--nnodes 1:4``) is unknown; rules that need it are
left out.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ppdiag.analyzers.planning.command_words import assigned, expanded, first_of, number_of, uncounted
from ppdiag.analyzers.planning.configurations import leaves, load
from ppdiag.analyzers.planning.models import MODELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_MEGATRON = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "num-layers", "num-attention-heads")
_MEGATRON_COUNTS = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "num-virtual-stages-per-pipeline-rank",
    "num-layers-per-virtual-pipeline-stage",
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "num-query-groups",
    "seq-length",
    "num-experts",
    "micro-batch-size",
    "global-batch-size",
)
_DEEPSPEED_COUNTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class Claim:
    """What a command says about its job; None where it says nothing, or nothing that can be read.

    Attributes:
        framework: megatron, deepspeed, torchtitan, or None.
        world_size, per_node: processes in all and on each node.
        tensor, pipeline, context: sizes of the parallel dimensions; 1 where not given.
        data: data-parallel size, where it is given and not what is left over.
        chunks: stages a rank.
        micro_batch, global_batch: sequences.
        accumulation: accumulation steps, DeepSpeed's.
        local_batch: sequences of one pass through torchtitan's pipeline.
        layers, hidden, heads, kv_heads, ffn, vocab, seq: of the model.
        schedule: name of :data:`ppdiag.analyzers.planning.orders.SCHEDULES`.
        uneven: the command says by itself how the layers lie.
        recompute: activations are computed again.
        zero_stage: DeepSpeed's ZeRO stage, or 1 for Megatron's distributed optimizer.
        experts: of a layer.
        expert, expert_tensor: ranks over which the experts are spread, and over which each is divided; None: as TP.
        slow_network: what in the command says that the network is slow.
        unread: options that have no number, with what they have instead; None: the option is missing.
    """

    framework: str | None = None
    world_size: int | None = None
    per_node: int | None = None
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int | None = None
    chunks: int = 1
    micro_batch: int | None = None
    global_batch: int | None = None
    accumulation: int | None = None
    local_batch: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq: int | None = None
    schedule: str | None = None
    uneven: bool = False
    recompute: bool = False
    zero_stage: int | None = None
    experts: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    slow_network: str | None = None
    unread: tuple[tuple[str, str | None], ...] = ()

    @property
    def model_ranks(self) -> int:
        """GPUs of one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def data_size(self) -> int | None:
        """Data-parallel size: as given, or what the world size leaves; None where it does not divide."""
        if self.data is not None:
            return self.data
        if self.world_size is None or self.world_size % self.model_ranks:
            return None
        return self.world_size // self.model_ranks

    @property
    def microbatches(self) -> float | None:
        """M, not rounded."""
        if self.accumulation is not None:
            return self.accumulation
        if self.global_batch is None or self.micro_batch is None or self.data_size is None:
            return None
        return self.global_batch / (self.micro_batch * self.data_size)


def read(command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None) -> Claim:
    """The claim of a command; files that it names are looked for from ``folder``.

    Variables are those that the command sets for itself, then the environment.

    Raises:
        PathNotFound: it names a configuration that is not there.
        BadConfig: the configuration cannot be read.
    """
    variables = {**(os.environ if environment is None else environment), **assigned(command)}
    options = options_of([expanded(word, variables) for word in command])
    claim = _launcher(command, options)
    config = options.get("yaml-cfg")
    if config:
        options = {**_yaml_options(folder / config), **options}
    if any(name in options for name in _MEGATRON):
        claim = _megatron(claim, options)
    config = first_of(options, "deepspeed-config", "deepspeed")
    if config:
        claim = _deepspeed(claim, options, load(folder / config, "deepspeed"))
    config = first_of(options, "job.config-file", "config-file") or variables.get("CONFIG_FILE")
    if config and config.endswith(".toml"):
        claim = _torchtitan(claim, options, load(folder / config, "torchtitan"))
    return _without_unread(replace(claim, slow_network=_slow_network(variables)))


def _without_unread(claim: Claim) -> Claim:
    """The claim without what rests on a size that is not known."""
    names = " ".join(name for name, _ in claim.unread)
    if re.search("tensor.(model.)?parallel", names):
        claim = replace(claim, heads=None, kv_heads=None, per_node=None, world_size=None)
    if re.search("pipeline.(model.)?parallel|context.parallel|data.parallel", names):
        claim = replace(claim, world_size=None)
    if re.search("virtual|pipeline|num.layers", names):
        claim = replace(claim, layers=None, schedule=None)
    return claim


def options_of(command: Sequence[str]) -> dict[str, str]:
    """All options with their value, in one spelling (``-`` for ``_``); the last of equals counts."""
    options: dict[str, str] = {}
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if not word.startswith("-") or _is_number(word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        taken = value if equals else "" if following.startswith("-") and not _is_number(following) else following
        options[name.replace("_", "-")] = taken
    return options


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-?[0-9]+(\.[0-9]*)?", word) is not None


def _slow_network(variables: Mapping[str, str]) -> str | None:
    return next((f"{name}=1" for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE") if variables.get(name) == "1"), None)


# -- launchers --------------------------------------------------------------------------------------------------------


def _launcher(command: Sequence[str], options: Mapping[str, str]) -> Claim:
    programs = {PurePath(word).name for word in command[:12]} | {word for word in command if word in TORCHRUN_MODULES}
    if programs & {"torchrun", *TORCHRUN_MODULES}:
        per_node = number_of(options, "nproc-per-node") if "nproc-per-node" in options else 1
        nodes = number_of(options, "nnodes") if "nnodes" in options else 1
    elif "deepspeed" in programs:
        per_node, nodes = number_of(options, "num-gpus"), number_of(options, "num-nodes") or 1
    elif "srun" in programs:
        per_node, nodes = number_of(options, "ntasks-per-node"), number_of(options, "nodes", "N")
        total = number_of(options, "ntasks", "n")
        return Claim(world_size=total or _product(per_node, nodes), per_node=per_node)
    elif "accelerate" in programs:
        total, nodes = number_of(options, "num-processes"), number_of(options, "num-machines") or 1
        return Claim(world_size=total, per_node=total // nodes if total else None)
    else:
        return Claim()
    return Claim(world_size=_product(per_node, nodes), per_node=per_node)


def _product(first: int | None, second: int | None) -> int | None:
    return first * second if first is not None and second is not None else None


# -- frameworks -------------------------------------------------------------------------------------------------------


def _megatron(claim: Claim, options: Mapping[str, str]) -> Claim:
    """Megatron-LM's arguments."""
    pipeline = number_of(options, "pipeline-model-parallel-size") or 1
    layers = number_of(options, "num-layers")
    chunks = number_of(options, "num-virtual-stages-per-pipeline-rank") or 1
    each = number_of(options, "num-layers-per-virtual-pipeline-stage")
    if each and layers:
        chunks = max(1, layers // (pipeline * each))
    own_split = (
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "pipeline-model-parallel-layout",
    )
    heads = number_of(options, "num-attention-heads")
    unread: list[tuple[str, str | None]] = [(f"--{name}", text) for name, text in uncounted(options, _MEGATRON_COUNTS)]
    if each and "num-layers" not in options:
        unread.append(("--num-layers", None))
    return replace(
        claim,
        framework="megatron",
        tensor=number_of(options, "tensor-model-parallel-size") or 1,
        pipeline=pipeline,
        context=number_of(options, "context-parallel-size") or 1,
        chunks=chunks,
        micro_batch=number_of(options, "micro-batch-size"),
        global_batch=number_of(options, "global-batch-size"),
        layers=layers,
        hidden=number_of(options, "hidden-size"),
        heads=heads,
        kv_heads=number_of(options, "num-query-groups") or heads,
        ffn=number_of(options, "ffn-hidden-size"),
        vocab=number_of(options, "vocab-size"),
        seq=number_of(options, "seq-length"),
        schedule="interleaved" if chunks > 1 else "1f1b",
        uneven=any(name in options for name in own_split) or bool(each and layers and layers % (pipeline * each)),
        recompute="recompute-activations" in options or options.get("recompute-granularity") == "full",
        zero_stage=1 if "use-distributed-optimizer" in options else 0,
        experts=number_of(options, "num-experts"),
        expert=number_of(options, "expert-model-parallel-size") or 1,
        expert_tensor=number_of(options, "expert-tensor-parallel-size"),
        unread=tuple(unread),
    )


def _yaml_options(path: Path) -> dict[str, str]:
    """Megatron's arguments from its YAML; a switch that is off is not there."""
    settings = leaves(load(path, "megatron"), path)
    return {
        name.replace("_", "-"): "" if value is True else str(value)
        for name, value in settings.items()
        if value is not None and value is not False
    }


def _deepspeed(claim: Claim, options: Mapping[str, str], config: Mapping[str, Any]) -> Claim:
    """DeepSpeed's configuration; the pipeline's length is an argument of the script, or the number of its stages."""
    zero = config.get("zero_optimization")
    pipeline = number_of(options, "pipe-parallel-size", "pipeline-parallel-size", "num-stages")
    own = claim.framework is None
    return replace(
        claim,
        framework="deepspeed",
        tensor=claim.tensor if not own else number_of(options, "model-parallel-size", "tensor-parallel-size") or 1,
        pipeline=claim.pipeline if pipeline is None else pipeline,
        micro_batch=number_of(config, "train_micro_batch_size_per_gpu") or claim.micro_batch,
        global_batch=number_of(config, "train_batch_size") or claim.global_batch,
        accumulation=number_of(config, "gradient_accumulation_steps"),
        zero_stage=_stage(zero) if isinstance(zero, dict) else 0,
        schedule=claim.schedule or "1f1b",
        unread=(*claim.unread, *uncounted(config, _DEEPSPEED_COUNTS, words=("auto",))),
    )


def _stage(zero: Mapping[str, Any]) -> int:
    stage = zero.get("stage", 0)
    return stage if isinstance(stage, int) and 0 <= stage <= 3 else 0


_TORCHTITAN_DEGREES = tuple(
    f"{part}.{kind}-parallel-{what}"
    for part in ("parallelism", "training", "experimental")
    for kind, what in (
        ("tensor", "degree"),
        ("pipeline", "degree"),
        ("context", "degree"),
        ("data", "shard-degree"),
        ("data", "replicate-degree"),
    )
)
TORCHTITAN_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped-bfs",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}


def _torchtitan(claim: Claim, options: Mapping[str, str], config: Mapping[str, Any]) -> Claim:
    """Configuration of torchtitan, with what the command changes of it."""
    flat = {
        f"{section}.{key}".replace("_", "-"): value
        for section, values in config.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }
    flat.update({name: value for name, value in options.items() if "." in name})

    def count(*names: str) -> int | None:
        return number_of(
            flat, *(f"{part}.{name}" for name in names for part in ("parallelism", "training", "experimental"))
        )

    pipeline = count("pipeline-parallel-degree") or 1
    local = count("local-batch-size", "batch-size")
    name = str(
        flat.get("parallelism.pipeline-parallel-schedule", flat.get("experimental.pipeline-parallel-schedule", ""))
    )
    schedule = TORCHTITAN_SCHEDULES.get(name.lower()) if name else "1f1b"
    model = MODELS.get(f"{flat.get('model.name', '')}-{flat.get('model.flavor', '')}".lower())
    layers = count("pipeline-parallel-layers-per-stage") or count("layers-per-stage")
    chunks = 2 if schedule in ("interleaved", "looped-bfs", "zb-v", "dualpipe-v") else 1
    if chunks > 1 and layers and model is not None:  # embedding and head count as a layer each
        chunks = max(1, -(-(model.layers + 2) // layers) // pipeline)
    tensor, context = count("tensor-parallel-degree") or 1, count("context-parallel-degree") or 1
    replicas, shards = count("data-parallel-replicate-degree") or 1, count("data-parallel-shard-degree")
    micro = count("pipeline-parallel-microbatch-size") or 1
    data = None if shards is None else replicas * shards
    data_size = data or replace(claim, tensor=tensor, pipeline=pipeline, context=context).data_size
    total = count("global-batch-size") or _product(local, data_size)
    return replace(
        claim,
        framework="torchtitan",
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=data,
        chunks=chunks if pipeline > 1 else 1,
        micro_batch=micro if pipeline > 1 else local,
        global_batch=total,
        accumulation=_pipeline_steps(local, micro) if pipeline > 1 else None,
        local_batch=local,
        layers=None if model is None else model.layers,
        hidden=None if model is None else model.hidden,
        heads=None if model is None else model.heads,
        kv_heads=None if model is None else model.kv_heads,
        seq=count("seq-len"),
        schedule=schedule,
        uneven=True,
        recompute=str(flat.get("activation-checkpoint.mode", "")) == "full",
        unread=(*claim.unread, *uncounted(flat, _TORCHTITAN_DEGREES, words=(-1, "-1"))),
    )


def _pipeline_steps(local: int | None, micro: int) -> int | None:
    """Microbatches of one pass through torch's schedule: the local batch is cut into them."""
    return local // micro if local is not None and local % micro == 0 else None
