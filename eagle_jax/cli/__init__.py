"""What the scripts share: flags, progress, reports, exit codes."""
