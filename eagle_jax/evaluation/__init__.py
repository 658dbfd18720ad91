"""How well drafts are accepted: questions, records, statistics, tables and figures."""
