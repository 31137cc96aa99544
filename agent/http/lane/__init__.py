"""The fast lane: plain infer requests, answered without a task or a future of their own."""
