"""Benchmarks, one file each, ending with ``BENCHMARK = ...``: ``python -m tests.bench --list``."""
