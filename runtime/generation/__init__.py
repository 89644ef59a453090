"""Private generation: a prompt once, then one token after another, over keys and values that stay shares."""
