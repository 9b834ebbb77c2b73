"""Hypothesis here: always the same examples, few enough for every commit."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "analysis", derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("analysis")
