"""``diloco-comm report``: one file for a bug report, without keys."""
