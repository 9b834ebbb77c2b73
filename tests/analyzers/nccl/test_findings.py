"""What follows from several lines together."""

from __future__ import annotations

import pytest

from tests.analyzers.nccl.formats import read

DEVICES = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>"
DISABLED = "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'"
ENABLED = "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'"
RECEIVE = "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0"
SEND = "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"


def _messages(*texts: str, host: str = "gpu1"):
    return read("".join(f"{host}:31:40 [0] NCCL INFO {text}\n" for text in texts)).messages


def test_rdma_through_host_memory_is_a_warning():
    (message,) = _messages(DEVICES, DISABLED, RECEIVE, SEND)
    assert (message.slug, message.hosts) == ("no-gpu-direct", ("gpu1",))
    assert message.text.startswith("1 of 1 receiving RDMA channels")


@pytest.mark.parametrize(
    "texts",
    [
        (DEVICES, ENABLED, RECEIVE + "/GDRDMA", SEND),
        (DEVICES, ENABLED, RECEIVE),
        (DEVICES, DISABLED, SEND),
        (DEVICES, DISABLED),
    ],
)
def test_gpu_direct_that_is_used_or_not_known_to_be_off_is_no_warning(texts):
    assert _messages(*texts) == ()


@pytest.mark.parametrize("interface", ["veth1a2b:172.17.0.2", "docker0:172.17.0.1", "ib1:fe80::5054:ff:fe12:3456%ib1"])
def test_an_interface_that_leads_to_no_other_machine_is_a_warning(interface):
    other = "gpu2:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.2<0>\n"
    (message,) = read(f"gpu1:1:1 [0] NCCL INFO Bootstrap : Using {interface}<0>\n{other}").messages
    assert (message.slug, message.hosts) == ("odd-interface", ("gpu1",))


def test_one_machine_may_use_any_interface():
    assert _messages("Bootstrap : Using docker0:172.17.0.1<0>") == ()
