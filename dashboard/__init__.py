"""Dashboard of a cluster: it polls every node, merges their ledgers, keeps a history, and serves an API and pages.

    nodes ──/status, /accounts, /episodes──▶ Aggregator ──▶ Cluster (current state) ──────▶ /api/..., /metrics
                                                       └──▶ History (SQLite) ────────────▶ curves, CSV, TensorBoard
                                                       └──▶ Hub ─────────────────────────▶ one stream for all tabs

The dashboard polls nodes once a second, independent of the number of open pages. The dashboard only reads, and cannot
change a cluster. The folder is `dashboard/` of the repository; `memoire.dashboard` is a link to it.
"""
