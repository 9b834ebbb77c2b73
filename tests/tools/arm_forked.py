"""Arms a forked process as the start-up file arms a new one, in two parts: the saboteur runs between them."""

from __future__ import annotations

import os

if os.environ.get("PPDIAG_RUN_DIR"):
    from ppdiag.hooks import install

    if os.environ.get("ARM_NOW"):
        install.arm()
    os.environ["ARM_NOW"] = "1"
