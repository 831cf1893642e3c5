"""What the node tells its owner: page, JSON, metrics.

`view` is the tree of facts, `curve` keeps its curves bounded, `metrics` writes it for Prometheus,
`app` serves it with the page in `static/`.
"""
