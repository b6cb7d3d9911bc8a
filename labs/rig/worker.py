"""What the app of a worker knows of its site: its settings, the ledger, plans of late packets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery.signals import worker_init

from labs.rig.ledger import Ledger
from tests.servers.program import die_with_parent

SETTINGS_VARIABLE = "LABS_SETTINGS"


def settings_of_worker() -> dict[str, Any] | None:
    """Returns the settings of the app, in a worker of a site; elsewhere None."""
    if SETTINGS_VARIABLE not in os.environ:
        return None
    worker_init.connect(die_with_parent)
    settings: dict[str, Any] = json.loads(os.environ[SETTINGS_VARIABLE])
    return settings


def ledger_of(settings: Mapping[str, Any]) -> Ledger:
    """Returns the ledger of the site whose app has `settings`."""
    return Ledger(Path(settings["lab_folder"]) / "ledger")


def plans_of(settings: Mapping[str, Any]) -> Path:
    """Returns the folder of the plans of late packets."""
    return Path(settings["lab_folder"]) / "plans"
