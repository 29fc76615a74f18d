"""Benches: each is run as `python -m bench.NAME`, with `--json` for machines."""
