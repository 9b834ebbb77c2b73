"""ppdiag: what is each GPU of a pipeline-parallel training job waiting for?

This package holds the shared words (``model``, ``rundir``, ``trace``, ``diagnosis``, ``errors``) and the command line.
It imports nothing here, since it is also loaded inside the training process, before torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
