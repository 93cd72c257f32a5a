"""More tests of restores and stores with pages and states on a device: too long for CI."""

from __future__ import annotations

import pytest
from device_double import on_device  # noqa: F401
from test_overlap import (  # noqa: F401
    test_a_state_with_a_number_that_is_none,
    test_another_comes_after_the_first_chunk,
    test_any_resume_point_and_any_chunk,
    test_two_restored_at_once_that_hardly_fit,
    test_what_turns_out_corrupt_on_the_way,
)
from test_store import (  # noqa: F401
    test_a_store_that_offers_rubbish_again_and_again,
    test_many_random_lives,
    test_random_cut_points_across_a_restart,
    test_random_lives,
    test_what_is_corrupt_is_computed_again,
)

pytestmark = pytest.mark.deep
