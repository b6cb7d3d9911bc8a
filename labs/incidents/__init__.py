"""What the log, the alerts, health and the dashboard say of eight incidents, and how soon."""
