"""The class of a message in the worker's main process."""

from __future__ import annotations

import pytest
from celery.exceptions import ImproperlyConfigured
from celery.worker.request import Request

from celery_idempotent.task.request import IdempotentRequest, request_class
from tests.unit.conftest import add, shop


class OwnRequest(Request):
    """A class of the user's."""


class TestRequestClass:
    @pytest.mark.parametrize("own", [OwnRequest, f"{__name__}:OwnRequest"], ids=["class", "path"])
    def test_of_the_users_own_is_combined(self, own: object) -> None:
        combined = request_class(add(shop(), Request=own))

        assert combined.__mro__[:4] == (combined, IdempotentRequest, OwnRequest, Request)
        assert request_class(add(shop(), Request=combined)) is combined

    def test_is_ours_by_default(self) -> None:
        assert request_class(add(shop())) is IdempotentRequest

    def test_that_cannot_be_combined_is_refused(self) -> None:
        task = add(shop(), Request=object)

        with pytest.raises(ImproperlyConfigured, match="shop.charge: its Request, object, "):
            task.start_strategy(task.app, None)
