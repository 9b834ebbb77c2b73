"""The commands, one file each; a row here makes one known."""

from __future__ import annotations

from ppdiag.registry import Registry

COMMANDS = Registry(
    "ppdiag.commands",
    {
        "run": "ppdiag.commands.run:run",
        "analyze": "ppdiag.commands.analyze:analyze",
        "compare": "ppdiag.commands.compare:compare",
        "whatif": "ppdiag.commands.whatif:whatif",
        "explain": "ppdiag.commands.explain:explain",
        "export": "ppdiag.commands.export:export",
        "env": "ppdiag.commands.env:env",
        "record": "ppdiag.commands.record:record",
        "attach": "ppdiag.commands.attach:attach",
        "nccl": "ppdiag.commands.nccl:nccl",
        "plan": "ppdiag.commands.plan:plan",
        "check": "ppdiag.commands.check:check",
        "calc": "ppdiag.commands.calc:calc",
        "schedule": "ppdiag.commands.schedule:schedule",
    },
)
