"""What the commands share: exit statuses, printing, output files, measuring."""
