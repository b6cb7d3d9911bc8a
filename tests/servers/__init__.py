"""Private servers that only this project's tests need: replicas, TLS, clusters, RabbitMQ."""
