"""Each script on each kind of record does what the model does; `make proof` makes more calls."""

from __future__ import annotations

import pytest

from tests.proof import table
from tests.store.scene import Scene


@pytest.mark.parametrize("script", table.ARGUMENTS)
def test_a_call_does_what_the_model_does(scene: Scene, script: str) -> None:
    assert list(table.mismatches(scene.client, script)) == []
