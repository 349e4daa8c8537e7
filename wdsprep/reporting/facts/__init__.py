"""Collect the facts of a report about datasets."""
