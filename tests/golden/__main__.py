"""Writes the states that this version leaves, where its file lacks them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from celery_idempotent.record import layout
from tests.golden.cases import FOLDER
from tests.golden.messages import CASES
from tests.golden.shop import Shop
from tests.servers.redis_server import RedisServer


def main() -> None:
    """Adds the missing cases."""
    file = FOLDER / f"layout-{layout.VERSION}.json"
    written = json.loads(file.read_text("utf-8")) if file.exists() else {}
    with RedisServer.start(config={}) as server, tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if name not in written:
                shop = Shop(server, Path(folder))
                kept = case.leave(shop)
                written[name] = {"kept": kept, **shop.take()}
                shop.close()
    file.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n", "utf-8")
    print(f"{file} has {len(written)} cases")


if __name__ == "__main__":
    main()
