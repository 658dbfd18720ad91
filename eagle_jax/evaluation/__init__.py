"""Measures of acceptance: questions, records, statistics, tables and figures."""
