"""The device waits for its host: ops are launched just in time, since the host was held up before.

What it finds: Host time costs something, and at least half of the forwards and backwards were launched only just
before they ran, although the host could run far ahead of the device.

Why it matters: A host that waits for the device (.item(), a copy to the CPU, torch.cuda.synchronize, operators that
need sizes) begins its launches from nothing each time, and every pause of the host then shows on the device.

What to try: Find the synchronising call on the path of forward, backward and messages. Megatron synchronises after
each batch of messages for the sake of old versions of torch.

Source: NVIDIA/Megatron-LM#543, NVIDIA/Megatron-LM#1625, verl#2009, NVIDIA/Megatron-LM#167, NVIDIA/Megatron-LM#420,
NVIDIA/Megatron-LM#1144.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ppdiag.analyzers.steps import pipeline_work
from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Cause, Symptom, percent
from ppdiag.model import Flag

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

JUST_IN_TIME = 0.05
"""A lead below this share of the op's own time is none."""
HOW = in_words_of(
    megatron="batch_p2p_sync=False in the model's configuration (test the loss: it guards a race of old versions of "
    "torch); torch.cuda.set_sync_debug_mode('warn') names the other calls",
    other="torch.cuda.set_sync_debug_mode('warn') names the calls that wait for the device",
)
MEASURE_AFTER = "the lead of the launches, and host time of the stage table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on device times whose launches have no lead, where host time costs at least 5 % of the step."""
    share = evidence.diagnosis.why.host
    lead_ns, time_ns = _leads(evidence)
    if share < WORTH_SAYING or not len(lead_ns) or np.median(lead_ns) > JUST_IN_TIME * np.median(time_ns):
        return None
    advice = Advice(
        action="Find what makes the host wait for the device",
        how=evidence.says(HOW),
        gain_fraction=max(0.0, evidence.gains[Cause.HOST]),
        source="replay of the run without host time: an upper bound",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"host {percent(share)} of the step",
        (
            f"half of the forwards and backwards were launched at most {np.median(lead_ns) / 1e6:.2f} ms early; "
            f"they take {np.median(time_ns) / 1e6:.2f} ms"
        ),
    )
    return Symptom("no-launch-lead", "The device waits for its host", severity(share), numbers, (advice,))


def _leads(evidence: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """Lead of each launch, and time of its op, of the analysed steps; empty where the host timed them."""
    spans, steps = evidence.trace.spans, evidence.analysis.steps
    on_device = (spans["flags"] & np.uint16(Flag.DEVICE)) != 0
    ops = spans[pipeline_work(spans) & on_device & np.isin(steps.number, steps.kept)]
    return np.maximum(ops["start_ns"] - ops["launch_ns"], 0), ops["end_ns"] - ops["start_ns"]
