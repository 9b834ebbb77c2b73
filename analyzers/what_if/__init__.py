"""What a change of a measured job would do to its step time: the run is replayed with the change."""

from __future__ import annotations

from ppdiag.analyzers.what_if.change import Change, LinkFactor, Place
from ppdiag.analyzers.what_if.predict import Prediction, predict
from ppdiag.analyzers.what_if.run import Run, run_of

__all__ = ["Change", "LinkFactor", "Place", "Prediction", "Run", "predict", "run_of"]
