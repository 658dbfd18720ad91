"""Medusa's heads."""
