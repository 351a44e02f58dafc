"""The dashboard's back: who asks every node how it stands, their ledgers merged, a history, and an API.

    nodes ──/status, /accounts, /episodes──▶ Aggregator ──▶ Cluster (what there is now) ──▶ /api/..., /metrics
                                                       └──▶ History (SQLite) ────────────▶ curves, CSV, TensorBoard
                                                       └──▶ Hub ─────────────────────────▶ one stream for all tabs

Nodes are asked once a second, however many people look. It only reads: nothing in a cluster can be changed from here.
The folder is `dashboard/` of the repository; `memoire.dashboard` is a link to it.
"""
