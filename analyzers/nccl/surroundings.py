"""What NCCL found and chose on each host: versions, networks, devices, interfaces, variables, plug-ins."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ppdiag.analyzers.nccl.bounded import Bounded
from ppdiag.analyzers.nccl.fallback import NO_DEVICE, PLUGIN_FAILED, SWITCHED_OFF, TCP_PROVIDER, Reason
from ppdiag.analyzers.nccl.model import GdrDecision, Hca, Interface, Plugin
from ppdiag.analyzers.nccl.rules import ADDRESS, DEVICE

if TYPE_CHECKING:
    from ppdiag.analyzers.nccl.lines import Entry

MAX_NAMES = 10_000
"""Of each kind. Beyond it they are counted, not kept."""

_KINDS = {"coll": "collnet", "network": "net", "": "net"}


class Surroundings:
    """One method for each rule about what NCCL found."""

    def __init__(self) -> None:
        self.versions: Bounded[str, None] = Bounded(MAX_NAMES)
        self.networks: Bounded[str, None] = Bounded(MAX_NAMES)
        self.providers: Bounded[str, None] = Bounded(MAX_NAMES)
        self.environment: Bounded[tuple[str, str], None] = Bounded(MAX_NAMES)
        self.hcas: Bounded[tuple[str, str, int], Hca] = Bounded(MAX_NAMES)
        self.interfaces: Bounded[Interface, None] = Bounded(MAX_NAMES)
        self.plugins: Bounded[Plugin, None] = Bounded(MAX_NAMES)
        self.gdr: Bounded[GdrDecision, None] = Bounded(MAX_NAMES)
        self.reasons: Bounded[Reason, None] = Bounded(MAX_NAMES)
        self._wants_plugin = False

    @property
    def dropped(self) -> int:
        """Records beyond the limits."""
        return sum(store.dropped for store in vars(self).values() if isinstance(store, Bounded))

    def on_version(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """The release."""
        self.versions.keep(match["version"].replace("NCCL version ", "").replace(" version", ""), None)

    def on_network(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """A network that was loaded."""
        self.networks.keep(match["network"], None)

    def on_provider(self, entry: Entry, match: re.Match[str]) -> None:
        """What is below a Libfabric plug-in."""
        provider = match["provider"]
        self.providers.keep(provider, None)
        if provider.startswith(("tcp", "sockets", "udp")):
            self._because(entry, TCP_PROVIDER, f"the Libfabric provider is {provider}")

    def on_hcas(self, entry: Entry, match: re.Match[str]) -> None:
        """The list of RDMA devices, which may be empty."""
        for device in DEVICE.finditer(match["devices"]):
            self._hca(entry.host, device["name"], int(device["port"]), link=device["link"])
        if match["interface"]:
            interface = Interface(entry.host, "oob", match["interface"], _address(match["address"]))
            self.interfaces.keep(interface, None)

    def on_hca(self, entry: Entry, match: re.Match[str]) -> None:
        """An RDMA device with its speed."""
        self._hca(
            entry.host,
            match["name"],
            int(match["port"]),
            link=match["link"],
            speed_mbps=int(match["speed"]),
            provider=match["provider"],
        )

    def on_hca_gdr(self, entry: Entry, match: re.Match[str]) -> None:
        """Whether a device can reach GPU memory."""
        enabled = match["state"] == "Enabled"
        for key in [key for key in self.hcas if key[:2] == (entry.host, match["name"])]:
            self.hcas[key] = replace(self.hcas[key], gdr=enabled)
        self.gdr.keep(GdrDecision(entry.host, enabled, match["name"]), None)

    def on_gdr(self, entry: Entry, match: re.Match[str]) -> None:
        """Whether a GPU and a card use GPU Direct RDMA."""
        decision = GdrDecision(entry.host, match["state"] == "Enabled", match["subject"], match["reason"] or "")
        self.gdr.keep(decision, None)

    def _hca(self, host: str, name: str, port: int, **facts: str | int) -> None:
        known = self.hcas.get((host, name, port)) or Hca(host, name, port, "")
        self.hcas.change((host, name, port), replace(known, **facts))  # type: ignore[arg-type]

    def on_no_hca(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """There is no RDMA device that NCCL can see."""
        self._because(entry, NO_DEVICE, "NCCL found no RDMA device (NET/IB : No device found)")

    def on_no_verbs(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """The RDMA library is not there."""
        self._because(entry, NO_DEVICE, "libibverbs could not be opened")

    def on_bootstrap(self, entry: Entry, match: re.Match[str]) -> None:
        """The interface for set-up."""
        self._addresses(entry, "bootstrap", match["interfaces"])

    def on_bootstrap_device(self, entry: Entry, match: re.Match[str]) -> None:
        """The network device for set-up."""
        self.interfaces.keep(Interface(entry.host, "bootstrap", match["device"]), None)

    def on_socket_interfaces(self, entry: Entry, match: re.Match[str]) -> None:
        """The interfaces for NET/Socket."""
        self._addresses(entry, "socket", match["interfaces"])

    def on_interface(self, entry: Entry, match: re.Match[str]) -> None:
        """An interface that was found."""
        self.interfaces.keep(Interface(entry.host, "found", match["name"]), None)

    def _addresses(self, entry: Entry, use: str, text: str) -> None:
        for found in ADDRESS.finditer(text):
            self.interfaces.keep(Interface(entry.host, use, found["name"], found["address"]), None)

    def on_environment(self, entry: Entry, match: re.Match[str]) -> None:
        """A variable of NCCL's."""
        name, value = match["name"], match["value"]
        self.environment.keep((name, value), None)
        off = (name == "NCCL_IB_DISABLE" and value not in {"0", ""}) or (
            name == "NCCL_NET" and value.lower() == "socket"
        )
        if off:
            self._because(entry, SWITCHED_OFF, f"{name}={value} is set")
        self._wants_plugin |= name == "NCCL_NET_PLUGIN" and value != "none"

    def _because(self, entry: Entry, kind: str, text: str) -> None:
        self.reasons.keep(Reason(entry.host, kind, text), None)

    def on_plugin_loaded(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """A plug-in with the version of its API."""
        self._plugin(match["kind"], match["name"], "loaded", match["detail"])

    def on_plugin_loaded_external(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """A plug-in from a file."""
        self._plugin(match["kind"] or "", match["name"], "loaded")

    def on_plugin_requested(self, entry: Entry, match: re.Match[str]) -> None:  # noqa: ARG002
        """A plug-in that the user asked for."""
        self._plugin(match["kind"] or "", match["name"].removesuffix("\\n"), "requested")
        self._wants_plugin |= match["kind"] in {None, "NET"}

    def on_plugin_failed(self, entry: Entry, match: re.Match[str]) -> None:
        """A plug-in that cannot be used."""
        name, kind = match["name"] or match["other"], match["kind"] or ""
        self._plugin(kind, name, "failed")
        if kind in {"", "network"}:
            self._because(entry, PLUGIN_FAILED, f"the network plug-in {name} could not be used")

    def on_plugin_missing(self, entry: Entry, match: re.Match[str]) -> None:
        """Plug-ins that are not there; most jobs need none."""
        names = re.findall(r"[^\s,;]*\.so[^\s,;]*", match["name"] or match["names"] or "")
        for name in names or [""]:
            self._plugin(match["kind"], name.rstrip("."), "missing")
        if match["kind"] == "NET" and self._wants_plugin:
            self._because(entry, PLUGIN_FAILED, "the network plug-in that was asked for was not found")

    def _plugin(self, kind: str, name: str, status: str, detail: str = "") -> None:
        kind = kind.lower()
        self.plugins.keep(Plugin(_KINDS.get(kind, kind), name, status, detail), None)


def _address(text: str) -> str:
    """An address without its port.

    >>> _address("192.168.0.3<0>")
    '192.168.0.3'
    """
    return text.partition("<")[0]
