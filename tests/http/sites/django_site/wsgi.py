"""The project under WSGI."""

import django.core.wsgi

application = django.core.wsgi.get_wsgi_application()
