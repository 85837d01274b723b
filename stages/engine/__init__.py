"""Runs build steps: when one runs, its receipt, digests, files, locks and caches. It knows no models."""
