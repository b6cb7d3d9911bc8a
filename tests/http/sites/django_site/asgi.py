"""The project under ASGI."""

import django.core.asgi

application = django.core.asgi.get_asgi_application()
