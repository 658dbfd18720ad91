"""Measuring: what a round costs and how well drafts are accepted."""
