"""The rounds of one fragment, from what is sent to what is applied."""
