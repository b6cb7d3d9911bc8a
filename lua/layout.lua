-- The form of a record, described in celery_idempotent/record/layout.py. Every script begins with it.
local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
