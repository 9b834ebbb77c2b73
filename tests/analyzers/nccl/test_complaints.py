"""Warnings: which known message each is, once, and which lines mean nothing."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.nccl.known_messages import KNOWN
from ppdiag.analyzers.nccl.model import Severity
from tests.analyzers.nccl.formats import FORMATS, HEADER, fill_somehow, read

WARN = "gpu1:31:40 [0] misc/x.cc:12 NCCL WARN "

SLUGS = {
    # format string of NCCL: the known message, judged by hand
    "NET/IB : Got async event : %s": "ib-port-event",
    "NET/IB : %s:%d Got async event : %s": "ib-port-event",
    "NET/IB : %s:%d Got async error event: %s": "ib-port-event",
    "NET/IB : %s:%d Got non-fatal async event: %s(%d)": "ib-port-event",
    "NET/IB : %s:%d GID table changed": "ib-port-event",
    "NET/IB : %s:%d async fatal event: %s": "ib-fatal-event",
    "NET/IB : %s:%d async fatal event on QP (%p): %s": "ib-fatal-event",
    "NET/IB : %s:%d async fatal event on CQ (%p): %s": "ib-fatal-event",
    "NET/IB : %s:%d unknown event type (%d)": "ib-fatal-event",
    "NET/IB : Unable to open device %s": "ib-open",
    "NET/IB : Unable to query device %s": "ib-open",
    "NET/IB : Unable to query port %d": "ib-open",
    "NET/IB : Unable to query port_num %d": "ib-open",
    "IB device %s not found": "ib-open",
    "Call to ibv_modify_qp failed with %d %s, %s": "ib-connect",
    "Call to ibv_poll_cq() returned %d": "ib-completion",
    "NET/IB: %s: Got CQE with error (devIndex=%d, req=%p, comm=%p (%s), wr_id=%lu, qp_num=%d)sendrecv": "ib-completion",
    "NET/IB : Can't make virtual NIC with 0 devices": "ib-other",
    "NET/IB : Local mergedDev %s has a different number of devices=%d as remote %s %d": "ib-rails",
    "NET/IB : req %d/%d tag %x peer %s collective mismatch error, local size %d remote size %d": "collective-mismatch",
    "NET/IB : req %d/%d tag %x peer %s posted incorrect receive info: size %ld addr %lx rkeys[0]=%x": (
        "collective-mismatch"
    ),
    "NET/IB : No IP interface found.": "no-interface",
    "Bootstrap : no socket interface found": "no-interface",
    "Failed to initialize any NET plugin": "no-network-plugin",
    "Error: network %s not found.": "no-network-plugin",
    "NET/IB : unable to allocate requests": "ib-other",
    "ibv_post_send() failed with error %s, Bad WR %p, First WR %p": "ib-other",
    "Failed to open libibverbs.so[.1]": "ib-other",
    "socketProgress: Connection closed by remote peer %s": "peer-closed",
    "Connect to %s failed : %s": "connect-failed",
    "%s: connect to %s failed : %s": "connect-failed",
    "%s: connect to %s returned %s, exceeded error retry count after %d attempts": "connect-failed",
    "socketStartConnect: Connect to %s failed : %s": "connect-failed",
    "socketPollConnect: exceeded timeouts (%d)": "connect-failed",
    "ncclOsSocketPollConnect to %s failed with error %s": "connect-failed",
    "socketProgressOpt: Call to recv from %s failed : %s": "socket",
    "Net : Call to recv from %s failed : %s": "socket",
    "Call to recv failed : %s": "socket",
    "socketTryAccept: Accept failed: %s": "socket",
    "ncclSocketInit: Socket creation failed : %s": "socket",
    "Duplicate GPU detected : rank %d and rank %d both on CUDA device %lx": "duplicate-gpu",
    "Mismatched NCCL version detected : rank %d version %d rank %d version %d": "version-mismatch",
    "NCCL version mismatch with remote peer %s (local: %s, remote %s)": "version-mismatch",
    "Error while %s shared memory segment %s (size %ld)creatingattaching to": "shared-memory",
    "Error: failed to extend %s to %ld bytes, error: %s (%d)": "shared-memory",
    "Cuda failure '%s'": "cuda",
    "Cuda failure %d '%s'": "cuda",
    "CUDA Driver version found is %d. Minimum requirement is %d": "cuda",
    "failed to peer with device %d(=%lx): %d %s": "p2p-disabled",
    "Rank %d has no transport for %s peer %d on channel %d/%d": "no-transport",
    "MNNVL is not supported on this system": "mnnvl",
    "Failed to open libnvidia-ml.so.1": "nvml",
    "Comm %p is in abort state": "abort",
    "Bootstrap Root : mismatch in rank count from procs %d : %d": "bootstrap",
    "Invalid rank requested : %d/%d": "invalid-argument",
    "dlvsym failed on %s - %s version %s": "symbol-missing",
}


@pytest.mark.parametrize("text", SLUGS)
def test_a_warning_of_nccl_is_the_known_message(text):
    assert ("WARN", text) in {(row.level, row.text) for row in FORMATS}
    (message,) = read(WARN + fill_somehow(text) + "\n").messages
    assert message.slug == SLUGS[text]


def test_every_format_string_that_names_a_network_or_socket_is_a_known_message():
    for row in FORMATS:
        if row.level == "WARN" and row.text.startswith(("NET/IB", "ncclSocket", "socket", "Bootstrap", "Cuda")):
            (message,) = read(WARN + fill_somehow(row.text).split("\\n")[0] + "\n").messages
            assert message.slug != "other", row.text


COMPLETIONS = [
    "NET/IB : Got completion with error {}, opcode 0, len 0, vendor err 129",
    "NET/IB : Got completion from peer 10.0.0.2<5> with error {}, opcode 0, len 0, vendor err 129",
    "NET/IB : Got completion from peer 10.0.0.2<5> with status={} opcode=0 len=0 vendor err 129 (Recv)",
    "NET/IB: Got completion from peer 10.0.0.2<5> with status={} opcode=0 len=0 vendor err 129 (Recv) hca mlx5_0",
    "NET/IB: Got completion from peer 10.0.0.2<5> with status=IBV_WC_SOME_ERR({}) opcode=IBV_WC_SEND(0) vendor_err=129",
]


@pytest.mark.parametrize("form", COMPLETIONS)
@pytest.mark.parametrize(
    ("status", "slug"),
    [(12, "ib-retry-exceeded"), (5, "ib-flushed"), (4, "ib-protection"), (10, "ib-access"), (1, "ib-completion")],
)
def test_the_status_of_a_failed_completion_names_the_cause(form, status, slug):
    (message,) = read(WARN + form.format(status) + "\n").messages
    assert message.slug == slug


def test_a_flushed_queue_is_a_consequence_and_comes_after_the_error():
    lines = WARN + COMPLETIONS[1].format(5) + "\n" + WARN + COMPLETIONS[1].format(12) + "\n"
    assert [message.slug for message in read(lines).messages] == ["ib-retry-exceeded", "ib-flushed"]


def test_a_warning_is_shown_once_with_its_count_and_hosts():
    lines = "".join(
        f"\ngpu{host}:3{host}:40 [0] transport/net_ib.cc:12 NCCL WARN NET/IB : Unable to open device mlx5_{host}\n"
        for host in (1, 2, 1)
    )
    (message,) = read(lines).messages
    assert (message.count, message.hosts, message.where) == (3, ("gpu1", "gpu2"), "transport/net_ib.cc:12")


def test_a_warning_with_a_timestamp_is_read():
    text = "[2025-06-12 16:57:52] gpu0301:8:9 [0] misc/nvmlwrap.cc:74 NCCL WARN Failed to open libnvidia-ml.so.1\n"
    (message,) = read(text).messages
    assert (message.slug, message.where, message.hosts) == ("nvml", "misc/nvmlwrap.cc:74", ("gpu0301",))


HARMLESS = [
    f"{HEADER}comm 0xaa rank 0 nranks 2 cudaDev 0 busId c1000 - Abort COMPLETE\n",
    (
        "gpu1:31:40 [0] misc/socket.cc:1 NCCL WARN Call to bind failed: Address already in use\n"
        f"{HEADER}RAS failed to establish a client listening socket at 127.0.0.1<28028>\n"
    ),
    (
        "gpu1:31:40 [0] misc/socket.cc:1 NCCL WARN Call to  failed: Address already in use\n"
        f"{HEADER}Continuing in spite of a RAS initialization error\n"
    ),
    (
        f"{HEADER}comm 0xaa rank 0 nRanks 2 cudaDev 0 busId c1000 - Abort START\n{HEADER}misc/socket.cc:64 -> 3\n"
        f"{HEADER}misc/socket.cc:881 -> 3\n"
    ),
    f"{HEADER}transport/net_ib.cc:300 -> 2\n",
    f"{HEADER}NET/Plugin: Failed to find ncclNetPlugin_v10 symbol.\n",
    f"{HEADER}dlvsym failed on mlx5dv_reg_dmabuf_mr - libmlx5.so: undefined symbol version MLX5_1.25\n",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_means_nothing_is_harmless(text):
    assert {message.severity for message in read(text).messages} <= {Severity.HARMLESS}


def test_a_bind_that_fails_without_ras_is_an_error():
    (message,) = read(f"{WARN}Call to bind failed: Address already in use\n").messages
    assert (message.slug, message.severity) == ("bind-failed", Severity.ERROR)


def test_the_way_up_of_an_error_is_kept_as_notes():
    text = f"{WARN}Cuda failure 'out of memory'\n{HEADER}init.cc:355 -> 1\n{HEADER}transport/net_ib.cc:5 -> 2\n"
    found = [(message.slug, message.severity) for message in read(text).messages]
    assert found == [
        ("cuda", Severity.ERROR),
        ("returned-ncclUnhandledCudaError", Severity.NOTE),
        ("returned-ncclSystemError", Severity.NOTE),
    ]


def test_the_exception_of_torch_names_the_error():
    text = f"{HEADER}Using network IB\n[rank0]: ncclSystemError: System call (e.g. socket, malloc) failed\n"
    (message,) = read(text).messages
    assert (message.slug, message.severity) == ("exception", Severity.ERROR)


def test_each_row_of_the_table_says_what_to_do_and_where_it_comes_from():
    for known in KNOWN:
        assert known.advice
        assert known.source
        assert known.versions[0] in {row.first for row in FORMATS}
        assert known.versions[1] in {row.last for row in FORMATS}


def test_each_row_of_the_table_matches_a_format_string_of_nccl_or_a_line_of_a_thread():
    lines = [fill_somehow(row.text) for row in FORMATS] + [
        each.format(status) for each in COMPLETIONS for status in (4, 5, 9, 12)
    ]
    lines.append("Call to bind failed: Address already in use")
    unmatched = [known.slug for known in KNOWN if not any(known.pattern.search(line) for line in lines)]
    assert unmatched == []
