"""The proxy: trees of tool calls, and the one way a call takes through them."""
