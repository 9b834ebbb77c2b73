"""The host waits for its device again and again: calls that synchronise, seen one by one.

What it finds: Calls in which the host waits until its device is done (torch.cuda.synchronize, synchronize of a stream
or an event), after which ops are launched late for 5 % of the step or more.

Why it matters: While such a call waits nothing is launched, and when it returns the device has nothing left to do: it
stands still until the next launch arrives. Megatron synchronises after each batch of messages, to guard a race of old
versions of torch.

What to try: Take the calls out of the path of forward, backward and messages; wait for one event instead of the device.

Source: NVIDIA/Megatron-LM#543, NVIDIA/Megatron-LM#167, NVIDIA/Megatron-LM#420, NVIDIA/Megatron-LM#1144.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.host_time import spans_of
from ppdiag.analyzers.replay import World
from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent
from ppdiag.model import PIPELINE_KINDS, Flag, HostCause, Kind
from ppdiag.trace import rank_slices

if TYPE_CHECKING:
    from ppdiag.analyzers.graph import Graph
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="batch_p2p_sync=False in the model's configuration, where the calls follow messages (test the loss: it "
    "guards a race of old versions of torch); torch.cuda.set_sync_debug_mode('warn') names the others",
    other="torch.cuda.set_sync_debug_mode('warn') names the calls; CUDA events instead of torch.cuda.synchronize",
)
MEASURE_AFTER = "synchronising calls of the host time, and step time"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where what follows synchronising calls costs 5 % of the step."""
    share = evidence.diagnosis.host.synchronising
    if share < WORTH_SAYING:
        return None
    calls = spans_of(evidence.analysis, HostCause.SYNCHRONISING)
    gain = evidence.gain(without_calls)
    advice = Advice(
        action="Take synchronising calls out of the pipeline's way",
        how=evidence.says(HOW),
        gain_fraction=gain.fraction,
        gain_range=gain.over_steps,
        source="replay of the run without the host time that follows these calls",
        measure_after=MEASURE_AFTER,
    )
    a_step = len(calls) / len(evidence.analysis.steps.kept) / max(1, len(np.unique(calls["rank"])))
    numbers = (
        f"late launches after synchronising calls: {percent(share)} of the step",
        (
            f"{a_step:.1f} calls a step on each rank that makes them, {_after_messages(evidence, calls)} of "
            f"{len(calls)} right behind a message"
        ),
    )
    title = "The host waits for its device"
    return Symptom("synchronising-calls", title, severity(share), numbers, (advice,), replaces="no-launch-lead")


def without_calls(graph: Graph) -> World:
    """Host time without what follows synchronising calls."""
    part_NK = graph.host_parts.get("synchronising")
    return World() if part_NK is None else World(host_NK=np.maximum(graph.host_NK - part_NK, 0.0))


def _after_messages(evidence: Evidence, calls: np.ndarray) -> int:
    """How many of the calls come after a message was posted or waited for, with no op launched in between."""
    spans = evidence.trace.spans
    slices, found = rank_slices(spans["rank"]), 0
    for rank, own in rank_slices(calls["rank"]).items():
        events = spans[slices[rank]]
        events = events[np.isin(events["kind"], (*PIPELINE_KINDS, Kind.SEND, Kind.RECV))]
        on_device = (events["flags"] & np.uint16(Flag.DEVICE)) != 0
        entered = np.where(on_device, events["launch_ns"], events["start_ns"])
        order = np.argsort(entered, kind="stable")
        before = np.searchsorted(entered[order], calls["start_ns"][own], "right") - 1
        last = events["kind"][order][before[before >= 0]]
        found += int(np.isin(last, (Kind.SEND, Kind.RECV)).sum())
    return found
