"""Outputs of a diagnosis, one file each. They compute nothing that is a finding."""

from __future__ import annotations

from ppdiag.registry import Registry

REPORTS = Registry(
    "ppdiag.reports",
    {
        "terminal": "ppdiag.reports.terminal:render",
        "json": "ppdiag.reports.json:write",
        "html": "ppdiag.reports.html:write",
        "hang": "ppdiag.reports.hang:render",
    },
)
