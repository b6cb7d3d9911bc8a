"""What the log, the alerts, doctor and the dashboard say of eight incidents, and how soon."""
