"""What of a report on NCCL's logs goes with the trace of a run, beside the transports: plain data for the symptoms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppdiag.analyzers.nccl.complaints import by_severity
from ppdiag.analyzers.nccl.model import Severity

if TYPE_CHECKING:
    from ppdiag.analyzers.nccl.model import NcclReport

MOST_MESSAGES = 100
"""The worst come first; ``ppdiag nccl`` has all."""


def digest_of(report: NcclReport) -> dict[str, Any]:
    """The digest.

    It has ``versions``, ``environment`` (NCCL's variables by name), ``plugins`` (kind and name of those that were
    loaded) and ``messages`` (errors and warnings: ``slug``, ``severity``, ``text``, ``advice``, ``count``, ``hosts``).
    """
    said = by_severity(report.complaints(Severity.ERROR, Severity.WARNING))[:MOST_MESSAGES]
    return {
        "versions": report.versions,
        "environment": dict(report.environment),
        "plugins": tuple((each.kind, each.name) for each in report.plugins if each.status == "loaded"),
        "messages": tuple(
            {
                "slug": each.slug,
                "severity": each.severity.value,
                "text": each.text,
                "advice": each.advice,
                "count": each.count,
                "hosts": each.hosts,
            }
            for each in said
        ),
    }
