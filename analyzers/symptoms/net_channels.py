"""Few channels to each network peer: messages between many nodes do not fill the network.

What it finds: A job on eight hosts or more that loses time to communication, whose pairs of ranks on different hosts
have one or two channels of RDMA each, with NCCL 2.20 or later.

Why it matters: From some number of nodes on, NCCL gives each peer fewer channels than a message needs: 18 instead of
24 GB/s in the thread below.

What to try: More channels for each peer, and measure: too many can hang.

Source: NVIDIA/nccl#1272, NVIDIA/nccl#1915.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ppdiag.analyzers.symptoms import in_words_of, severity
from ppdiag.diagnosis import WORTH_SAYING, Advice, Symptom, percent

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

VARIABLE = "NCCL_NCHANNELS_PER_NET_PEER"
LEAST_HOSTS, MOST_CHANNELS, SINCE = 8, 2, (2, 20)
HOW = in_words_of(other=f"{VARIABLE}=4, then 8; 32 has hung (NVIDIA/nccl#1915)")
MEASURE_AFTER = "bandwidth of the links table"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on few channels of RDMA in a large job that communication costs 5 % of the step."""
    share = evidence.diagnosis.why.communication
    hosts = {row.host for row in evidence.diagnosis.ranks if row.host}
    told = VARIABLE in evidence.variables or VARIABLE in evidence.trace.nccl.get("environment", {})
    if share < WORTH_SAYING or len(hosts) < LEAST_HOSTS or told or not _is_new(evidence):
        return None
    rows = [row for row in evidence.diagnosis.transports if row["family"] == "IB" and row["src_rank"] is not None]
    few = [row for row in rows if row["channels"] <= MOST_CHANNELS]
    if not few or len(few) < len(rows) / 2:
        return None
    advice = Advice(
        action="Give each network peer more channels",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="NVIDIA/nccl#1272",
        measure_after=MEASURE_AFTER,
    )
    numbers = (
        f"communication {percent(share)} of the step, on {len(hosts)} hosts",
        f"{len(few)} of {len(rows)} pairs of ranks have at most {MOST_CHANNELS} channels of RDMA",
    )
    return Symptom("net-channels", "Few channels to each network peer", severity(share), numbers, (advice,))


def _is_new(evidence: Evidence) -> bool:
    """Whether NCCL's log names a version from which on this happens."""
    versions = [re.match(r"(\d+)\.(\d+)", text) for text in evidence.trace.nccl.get("versions", ())]
    return any(match and (int(match[1]), int(match[2])) >= SINCE for match in versions)
