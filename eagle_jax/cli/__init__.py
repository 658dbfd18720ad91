"""The commands, and the flags, progress, reports and exit codes that they share."""
