-- The form of a record, which every script begins with: celery_idempotent/record/layout.py describes it.
local LAYOUT = '>c1BI7I6Bc0I2c0Bc0Bc0Bc0'
