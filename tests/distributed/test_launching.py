"""What every launch of real processes shares."""

import os

from tests.support.launching import python_path


def test_ranks_find_the_modules_of_the_user_too():
    ours = python_path("")
    assert "" not in ours.split(os.pathsep)
    assert python_path("/theirs:/others") == os.pathsep.join([ours, "/theirs:/others"])
