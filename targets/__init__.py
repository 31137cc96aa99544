"""The contract both halves share: boards, tensor specifications, budgets, plans and the bundle manifest."""
