"""A real Prometheus scrapes every node of a cluster: all metrics of the catalogue arrive, none besides; rules are evaluated,
and every panel of the boards has an answer."""
