"""16 clients that come, leave and stop in the middle, for two minutes; `support/soak.py` runs it for an hour, by hand."""

import pytest
from soak import soak


@pytest.mark.full
def test_16_clients_that_come_and_leave_lose_no_request_and_leave_no_memory_behind():
    report = soak(seconds=120, seed=7)
    assert not report["faults"], report["faults"][:5]
    assert report["whole_answers"] >= 16 and report["server_counts"]["left"] > 0
