"""Code of a user, checked by mypy and pyright in `make lint`; nothing here is run."""
