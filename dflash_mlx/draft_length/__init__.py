"""How many tokens to draft next: the policy, what it measures, and prompt lookup."""
