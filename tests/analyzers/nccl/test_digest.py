"""The digest of a report has its errors and warnings, the worst first, and what was loaded."""

from __future__ import annotations

from ppdiag.analyzers.nccl.digest import MOST_MESSAGES, digest_of
from tests.analyzers.nccl.formats import read

LOG = """gpu1:31:40 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
gpu1:31:40 [0] NCCL INFO NCCL_IB_HCA set by environment to mlx5_0
gpu1:31:40 [0] misc/ibvwrap.cc:94 NCCL WARN Call to ibv_open_device failed
gpu1:31:40 [0] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<1> with status=12 opcode=0
"""


def test_the_digest_has_the_version_the_variables_and_the_worst_complaint_first() -> None:
    digest = digest_of(read(LOG))
    assert digest["versions"][0].startswith("2.21.5")
    assert digest["environment"] == {"NCCL_IB_HCA": "mlx5_0"}
    assert digest["messages"][0]["slug"] == "ib-retry-exceeded"
    assert digest["messages"][0]["severity"] == "error"
    assert "NCCL_IB_GID_INDEX" in digest["messages"][0]["advice"]


def test_the_digest_of_nothing_is_empty_and_that_of_much_is_bounded() -> None:
    assert digest_of(read(""))["messages"] == ()
    words = ["".join(chr(ord("a") + int(digit)) for digit in str(number)) for number in range(MOST_MESSAGES + 9)]
    lines = [f"gpu1:31:40 [0] misc/socket.cc:1 NCCL WARN odd {word}\n" for word in words]
    assert len(digest_of(read("".join(lines)))["messages"]) == MOST_MESSAGES
