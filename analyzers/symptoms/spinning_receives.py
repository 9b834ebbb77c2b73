"""Receive kernels that mostly wait: a long SendRecv in the GPU's trace is no slow network.

What it finds: Receives on the device that take 20 % of the step or more, four fifths of it before the sender had sent.

Why it matters: NCCL's kernel runs from the moment at which its own end is ready, and spins until the other one is. A
profile of the GPU shows one long SendRecv, and tells transfer from waiting nowhere. Tuning the network changes nothing.

What to try: Leave the network as it is, and look at what the sender was late for: the bubble, a heavy stage or the
host.

Source: sail-sg/zero-bubble-pipeline-parallelism#25.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import CRITICAL, Advice, Cause, Symptom, percent
from ppdiag.model import Flag, Kind

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

MOSTLY = 0.8
"""Share of the time in receives that is a late sender's."""
HOW = in_words_of(other="no change of NCCL's variables or of the network; the verdict says where the waiting begins")
MEASURE_AFTER = "late sender and transfer of the idle time by place"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where the device's receives are mostly late senders, and communication is not the verdict."""
    where = evidence.diagnosis.where
    spans = evidence.trace.spans
    on_device = (spans["kind"] == Kind.RECV) & ((spans["flags"] & np.uint16(Flag.DEVICE)) != 0)
    received = where.late_sender + where.transfer
    if not on_device.any() or received < CRITICAL or where.late_sender < MOSTLY * received:
        return None
    if evidence.diagnosis.verdict.cause == Cause.COMMUNICATION.value:
        return None
    advice = Advice(
        action="Do not tune the network for the time in receive kernels",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="when each message was sent, beside when its receive began and ended",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"receives take {percent(received)} of the step, {percent(where.late_sender)} before the message was sent",
        f"bytes were in flight for {percent(where.transfer)} of the step",
    )
    return Symptom("spinning-receives", "Receive kernels that wait", "info", numbers, (advice,))
