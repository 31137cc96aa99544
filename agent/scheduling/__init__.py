"""What runs when: queues, costs, batches. Pure: time is an argument, in seconds of one monotonic clock."""
