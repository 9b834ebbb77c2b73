"""What a command has wrong, in the order in which to look: what must divide, then TP across nodes, then communication.

An error is what a framework refuses or cannot do; a warning is what costs time or memory; a note is what to expect.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ppdiag.analyzers.planning import formulas, orders
from ppdiag.analyzers.planning.arguments import Claim, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ppdiag.analyzers.planning.hardware import Device, Network

ERROR, WARNING, NOTE = "error", "warning", "note"
FEW = 2
ENOUGH = 3
"""M should be 2 to 3 times P."""
LONGEST_WORD = 40
DEAR_TRANSFER = 0.2
"""Above this share of a stage's compute, sending more often does not pay: do not interleave."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a command.

    Attributes:
        severity: error, warning or note.
        rule: its name.
        words: what is so, with the numbers.
        fix: what to do; empty for a note.
    """

    severity: str
    rule: str
    words: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The finding as JSON-serialisable data."""
        return asdict(self)


def check(
    command: Sequence[str], *, folder: Path, device: Device | None = None, network: Network | None = None
) -> tuple[Claim, list[Finding]]:
    """All findings about a command.

    Raises:
        PathNotFound: it names a configuration that is not there.
        BadConfig: the configuration cannot be read.
    """
    claim = read(command, folder=folder)
    return claim, findings(claim, device=device, network=network)


def findings(claim: Claim, *, device: Device | None = None, network: Network | None = None) -> list[Finding]:
    """All findings about a claim, in order."""
    if claim.framework is None:
        words = "no arguments of Megatron, DeepSpeed or torchtitan are in it; nothing was checked"
        return [Finding(NOTE, "framework", words)]
    found = [*_unread(claim), *_divides(claim), *_experts(claim), *_batches(claim), *_places(claim), *_schedule(claim)]
    found += _interleaving(claim, device, network)
    return [*found, *_expected(claim)]


def _unread(claim: Claim) -> Iterator[Finding]:
    for name, text in claim.unread:
        if text is None:
            words = f"{name} is not in the command, so that how many stages a rank has (V) is not known"
            yield Finding(NOTE, "not read", words)
        elif "$" in text:
            yield Finding(NOTE, "not read", f"{name} is {_short(text)}: rules that need it are left out")
        else:
            words = f"{name} is {_short(text)}" if text else f"{name} has no value"
            yield Finding(ERROR, "value", words, "a whole number above 0")


def _short(text: str) -> str:
    """What stands where a number should, at a length that a line bears."""
    return repr(text if len(text) <= LONGEST_WORD else f"{text[:LONGEST_WORD]}…")


def _experts(claim: Claim) -> Iterator[Finding]:
    """Megatron's rules for expert parallelism."""
    spread = claim.expert
    if spread == 1:
        return
    if claim.experts is None and not claim.unread:
        yield Finding(ERROR, "experts", f"EP = {spread}, but there are no experts", "--num-experts")
    elif claim.experts is not None and claim.experts % spread:
        words = f"{claim.experts} experts cannot be divided over EP = {spread}"
        yield Finding(ERROR, "experts", words, f"EP one of {_sizes(claim.experts)}")
    unit = (claim.expert_tensor or claim.tensor) * spread * claim.pipeline
    if claim.world_size is not None and claim.world_size % unit:
        words = f"{claim.world_size} processes are no multiple of expert TP x EP x PP = {unit}"
        yield Finding(ERROR, "experts", words, "EP that divides TP x DP / expert TP")


def _divides(claim: Claim) -> Iterator[Finding]:
    tensor, ranks = claim.tensor, claim.model_ranks
    sizes = f"TP x PP{' x CP' * (claim.context > 1)} = {ranks}"
    if claim.world_size is not None and claim.world_size % ranks:
        near = max(ranks, claim.world_size // ranks * ranks)
        words = f"{claim.world_size} processes are no multiple of {sizes}"
        yield Finding(ERROR, "world size", words, f"start {near}, or change TP or PP")
    elif claim.world_size is not None and claim.data is not None and claim.data * ranks != claim.world_size:
        words = f"{sizes} times DP = {claim.data} are {claim.data * ranks}, not {claim.world_size} processes"
        yield Finding(ERROR, "world size", words, f"set DP to {claim.world_size // ranks}")
    if claim.heads is not None and claim.heads % tensor:
        words = f"{claim.heads} attention heads cannot be divided over TP = {tensor}"
        yield Finding(ERROR, "heads", words, f"TP one of {_sizes(claim.heads)}")
    elif claim.kv_heads is not None and claim.kv_heads % tensor and tensor % claim.kv_heads:
        words = f"{claim.kv_heads} key/value heads and TP = {tensor}: neither divides the other"
        yield Finding(ERROR, "key/value heads", words, f"TP one of {_sizes(claim.kv_heads)}")
    if claim.hidden is not None and claim.heads is not None and claim.hidden % claim.heads:
        words = f"a width of {claim.hidden} cannot be divided over {claim.heads} heads"
        yield Finding(ERROR, "width", words, "change --hidden-size or --num-attention-heads")
    yield from _layers(claim)


def _layers(claim: Claim) -> Iterator[Finding]:
    stages = claim.pipeline * claim.chunks
    if claim.layers is None or stages == 1:
        return
    if claim.layers < stages:
        words = f"{claim.layers} layers do not fill {stages} stages"
        yield Finding(ERROR, "layers", words, "fewer ranks along the pipeline, or fewer stages a rank")
    elif claim.layers % stages and not claim.uneven:
        words = (
            f"{claim.layers} layers cannot be divided over PP x V = {claim.pipeline} x {claim.chunks} = {stages} stages"
        )
        fix = f"PP x V one of {_sizes(claim.layers)}"
        if (claim.layers + 2) % stages == 0:
            fix += ", or --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        yield Finding(ERROR, "layers", words, fix)


def _batches(claim: Claim) -> Iterator[Finding]:
    data, micro, whole = claim.data_size, claim.micro_batch, claim.global_batch
    if data and micro and whole and claim.framework != "torchtitan":
        if claim.accumulation is not None and micro * data * claim.accumulation != whole:
            words = (
                f"micro batch x accumulation x DP = {micro} x {claim.accumulation} x {data} = "
                f"{micro * data * claim.accumulation}, not the train batch of {whole}"
            )
            yield Finding(ERROR, "batch", words, "leave one of the three out: DeepSpeed works it out")
        elif claim.accumulation is None and whole % (micro * data):
            # Megatron interleaves only where PP divides M.
            unit = micro * data * (claim.pipeline if claim.chunks > 1 else 1)
            below = max(1, whole // unit) * unit
            words = (
                f"a global batch of {whole} is no multiple of micro batch x DP = {micro} x {data} = {micro * data}: "
                f"M would be {whole / (micro * data):.2f}"
            )
            yield Finding(ERROR, "batch", words, f"a global batch of {below} or {below + unit}")
    if claim.pipeline > 1 and claim.local_batch and micro and claim.local_batch % micro:
        words = f"a local batch of {claim.local_batch} cannot be cut into microbatches of {micro}"
        yield Finding(ERROR, "batch", words, f"pipeline_parallel_microbatch_size one of {_sizes(claim.local_batch)}")
    if claim.pipeline > 1 and (claim.zero_stage or 0) >= 2 and claim.framework == "deepspeed":
        words = f"ZeRO stage {claim.zero_stage} and a pipeline: every microbatch would reduce the gradients"
        yield Finding(ERROR, "ZeRO", words, "stage 0 or 1; DeepSpeed's pipeline engine takes no other")
    every = claim.microbatches
    if claim.schedule and every is not None and every == int(every) >= 1 and claim.pipeline > 1:
        yield from _shape(claim, int(every))


def _shape(claim: Claim, every: int) -> Iterator[Finding]:
    """The schedule has no such shape."""
    ranks, fix = claim.pipeline, f"M a multiple of {claim.pipeline}, or one stage a rank"
    if claim.framework == "megatron" and claim.chunks > 1 and every % ranks:
        words = f"Megatron interleaves only where PP divides M: M = {every}, PP = {ranks}"
        yield Finding(ERROR, "schedule", words, fix)
        return
    problem = None
    if ranks * claim.chunks * every <= 10**5:  # beyond it only very long lists would tell
        problem = orders.refusal(claim.schedule or "1f1b", ranks=ranks, chunks=claim.chunks, microbatches=every)
    if problem:
        yield Finding(ERROR, "schedule", problem, fix)


def _places(claim: Claim) -> Iterator[Finding]:
    tensor, per_node = claim.tensor, claim.per_node
    if per_node is None or tensor == 1:
        return
    if tensor > per_node:
        words = f"TP = {tensor} is larger than a node of {per_node} processes: every layer's sums cross the network"
        yield Finding(WARNING, "TP across nodes", words, f"TP of at most {per_node}; more PP instead")
    elif per_node % tensor:
        words = f"TP = {tensor} does not divide a node of {per_node} processes: some groups lie across two nodes"
        yield Finding(WARNING, "TP across nodes", words, f"TP one of {_sizes(per_node)}")


def _schedule(claim: Claim) -> Iterator[Finding]:
    every, ranks = claim.microbatches, claim.pipeline
    if every is None or ranks == 1:
        return
    if every < FEW * ranks:
        words = f"M = {every:g} microbatches for PP = {ranks}: the bubble takes {_bubble(claim)} of the pipeline phase"
        fix = f"M of {FEW * ranks} to {ENOUGH * ranks}: a larger global batch, a smaller micro batch or less DP"
        yield Finding(WARNING, "microbatches", words, fix)
    if claim.schedule == "gpipe" and every >= ranks:
        words = f"GPipe keeps the activations of all {every:g} microbatches; 1F1B keeps {ranks} with the same bubble"
        yield Finding(WARNING, "GPipe", words, "the schedule 1F1B")


def _interleaving(claim: Claim, device: Device | None, network: Network | None) -> Iterator[Finding]:
    if claim.chunks == 1 or claim.pipeline == 1:
        return
    if claim.slow_network is not None:
        words = f"{claim.chunks} stages a rank send {claim.chunks} times as often, and {claim.slow_network} is set"
        yield Finding(WARNING, "interleaving", words, "one stage a rank, or the fast network")
    if device is None or network is None:
        return
    known = (claim.hidden, claim.seq, claim.layers)
    if all(value is not None for value in known):
        share = _transfer_share(claim, device, network)
        if share > DEAR_TRANSFER:
            words = f"a message takes {100 * share:.0f} % of the time of a stage's forward"
            fix = "one stage a rank: sending more often does not pay above 20 %"
            yield Finding(WARNING, "interleaving", words, fix)


def _transfer_share(claim: Claim, device: Device, network: Network) -> float:
    """Time of one message over the time of one stage's forward, at 60 % of the device's peak."""
    hidden, seq, layers = claim.hidden or 1, claim.seq or 1, claim.layers or 1
    per_gpu = network.bytes_per_s / (1 if network.per_gpu else claim.per_node or 8)
    transfer_s = 2 * seq * hidden / claim.tensor / per_gpu + network.latency_s
    flops = 24 * seq * hidden**2 + 4 * seq**2 * hidden
    stage_s = layers / (claim.pipeline * claim.chunks) * flops / (claim.tensor * 0.6 * device.flops_per_s)
    return transfer_s / stage_s


def _expected(claim: Claim) -> Iterator[Finding]:
    every, ranks = claim.microbatches, claim.pipeline
    if ranks == 1 and claim.framework == "deepspeed":
        yield Finding(NOTE, "bubble", "the command does not say how many stages there are; PipelineModule may")
    elif ranks == 1:
        if not any("pipeline" in name for name, _ in claim.unread):
            yield Finding(NOTE, "bubble", "PP = 1: there is no pipeline, and so no bubble")
    elif every is None or every < 1:
        words = "M is not known: the world size, or the global or micro batch, cannot be read from the command"
        yield Finding(NOTE, "bubble", words)
    elif claim.schedule is None:
        words = f"expect a bubble of at most {_bubble(claim)} of the pipeline phase, with P = {ranks}, M = {every:.6g}"
        yield Finding(NOTE, "bubble", f"{words}; the schedule or V is not known")
    else:
        ideal = formulas.bubble_of_ideal(ranks, claim.chunks, int(every))
        words = (
            f"expect a bubble of {_bubble(claim)} of the pipeline phase ({100 * ideal:.1f} % over the ideal time), "
            f"with P = {ranks}, V = {claim.chunks}, M = {every:.6g}; "
            f"the first rank keeps the activations of {_kept(claim, int(every)):g} microbatches"
        )
        if every < ENOUGH * ranks:
            better = formulas.bubble_of_total(ranks, claim.chunks, ENOUGH * ranks)
            words += f"; with M = {ENOUGH} P = {ENOUGH * ranks} it would be {100 * better:.1f} %"
        yield Finding(NOTE, "bubble", words)


def _kept(claim: Claim, every: int) -> float:
    """Microbatches whose activations the first rank keeps at most: those of its stages, over V."""
    ranks, chunks = claim.pipeline, claim.chunks
    by_name = {
        "gpipe": every * chunks,
        "looped-bfs": every * chunks,
        "interleaved": (chunks - 1) * ranks + 2 * ranks - 1,
    }
    return min(by_name.get(claim.schedule or "", ranks * chunks), every * chunks) / chunks


def _bubble(claim: Claim) -> str:
    exact = formulas.bubble_of_total(claim.pipeline, claim.chunks, max(1, int(claim.microbatches or 1)))
    return f"{100 * exact:.1f} %"


def _sizes(number: int) -> str:
    """Divisors worth naming."""
    divisors = [size for size in range(1, min(number, 256) + 1) if number % size == 0]
    return ", ".join(map(str, divisors[:12]))
