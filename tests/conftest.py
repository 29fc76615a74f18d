"""What holds for every test. Fixtures live beside the tests that use them."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.daemon_fixture import connect, daemon, make_daemon

__all__ = ["connect", "daemon", "make_daemon"]

# No deadline, and slow drawing is no fault: on two busy cores a slow example says nothing about the
# code; pytest's time limit catches a hang. A failure prints the blob that repeats it.
settings.register_profile(
    "ci",
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.register_profile(
    "nightly", settings.get_profile("ci"), max_examples=5_000, stateful_step_count=100
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
