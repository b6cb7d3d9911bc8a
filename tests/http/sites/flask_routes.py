"""The views of the app with Flask, each with the decorator instead of the middleware."""

from __future__ import annotations

from flask import Flask

from celery_idempotent.contrib.flask import by_header, idempotent_route
from tests.http.sites import flask_site
from tests.http.sites.common import OPTIONS, is_allowed

protect = idempotent_route(
    identity=by_header("Authorization"),
    required=lambda request: request.path.startswith("/required"),
    authorize_replay=lambda request: is_allowed(request.headers["Idempotency-Key"]),
    **OPTIONS,
)
app = Flask("routes")
for rule in flask_site.app.url_map.iter_rules():
    if rule.endpoint != "static":
        app.add_url_rule(
            rule.rule,
            view_func=protect(flask_site.app.view_functions[rule.endpoint]),
            methods=["GET"] if "GET" in (rule.methods or ()) else ["POST", "PATCH"],
            endpoint=rule.rule,
        )
