"""Labels: readable names shown beside keys, such as ``order 42``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from celery_idempotent.core.flow.extension import Option
from celery_idempotent.core.key.rule import KeyRule
from celery_idempotent.core.key.template import Template
from celery_idempotent.core.printable import printable
from celery_idempotent.errors import SettingsError

logger = logging.getLogger(__name__)

OPTION = "idempotency_label"


class Label(Option):
    """The labels of the calls of one task, from a template with fields as in a key rule.

    Args:
        rule: of the task; binds the arguments.

    Raises:
        SettingsError: if the template cannot be filled, or names an argument that the task lacks.
    """

    @classmethod
    def configure(cls, configuration: Any) -> None:
        """Adds the labels of the task."""
        configuration.label = cls(configuration.rule, configuration.settings.label)

    def __init__(self, rule: KeyRule, template: str) -> None:
        if not isinstance(template, str):
            kind = type(template).__name__
            raise SettingsError(f"{rule.task}: {OPTION} must be a template, not {kind}")
        self._rule = rule
        self._template = Template(rule.task, template, OPTION)
        rule.check_names(self._template.names, OPTION)
        #: Whether a call had no label, which is logged once.
        self._failed = False

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Returns the label of a call; empty if the template cannot be filled.

        The first failure is logged; a call never fails because of its label.
        """
        try:
            text, _ = self._template.fill(self._rule.arguments(args, kwargs))
        except Exception as error:
            if not self._failed:
                self._failed = True
                logger.warning("A call has no label: %s", error)
            return ""
        return printable(text)
