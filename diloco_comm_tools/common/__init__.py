"""What the commands share: exit statuses, printing, output files, ranks, times, reports."""
